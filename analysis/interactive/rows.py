"""Differences to the baseline as interval rows."""

from analysis.figures.rows import drawn_interval, sorted_rows
from analysis.figures.style import Palette
from analysis.interactive.marks import SYMBOLS, Figure
from analysis.study import Comparable
from analysis.wording import p_text, signed


def difference_figure(part: Comparable) -> Figure | None:
    """Interval rows; names stand above their row, so that they fit any width."""
    comparison = part.comparison
    if comparison is None or not comparison.rows:
        return None
    palette = Palette(tuple(point.arm for point in part.points))
    rows = sorted_rows(comparison)
    traces, notes = [], []
    for height, row in enumerate(rows):
        look = palette.look(row.arm)
        interval = drawn_interval(row)
        text = f"{row.arm.label}: {signed(row.loss_gap)} nats<br>{row.verdict}"
        text += f", Holm p {p_text(row.p_holm)}"
        trace: Figure = {
            "type": "scatter",
            "mode": "markers",
            "x": [row.loss_gap],
            "y": [height],
            "marker": {
                "color": "PAPER" if row.is_single else look.color,
                "symbol": SYMBOLS[look.mark],
                "size": 9,
                "line": {"color": look.color, "width": 1.5},
            },
            "text": [text],
            "hovertemplate": "%{text}<extra></extra>",
        }
        if interval:
            trace["error_x"] = {
                "type": "constant",
                "value": interval.half_width,
                "color": look.color,
                "thickness": 2,
                "width": 0,
            }
        traces.append(trace)
        notes.append(
            {
                "text": f"{row.arm.label}: {row.verdict}",
                "xref": "paper",
                "x": 0,
                "y": height,
                "xanchor": "left",
                "yanchor": "bottom",
                "yshift": 4,
                "showarrow": False,
                "font": {"size": 12, "color": "INK"},
            }
        )
    margin = comparison.margin_nats
    zone = {
        "type": "rect",
        "yref": "paper",
        "x0": -margin,
        "x1": margin,
        "y0": 0,
        "y1": 1,
        "line": {"width": 0},
        "fillcolor": "rgba(128,128,128,0.2)",
        "layer": "below",
    }
    zero = {
        "type": "line",
        "yref": "paper",
        "x0": 0,
        "x1": 0,
        "y0": 0,
        "y1": 1,
        "line": {"color": "INK", "width": 1},
    }
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": f"loss minus that of {comparison.baseline.label}, nats"}},
            "yaxis": {
                "range": [len(rows) - 0.5, -0.9],
                "showticklabels": False,
                "showgrid": False,
                "zeroline": False,
            },
            "shapes": [zone, zero],
            "annotations": notes,
            "margin": {"l": 12, "r": 12, "t": 8, "b": 44},
        },
        "height": 38 * len(rows) + 90,
    }
