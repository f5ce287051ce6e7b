"""What stands at the edges of the interactive front: diverged arms and the unigram loss."""

import math

from analysis.figures.pareto_parts import diverged_marks
from analysis.figures.style import Palette
from analysis.interactive.marks import Figure
from analysis.study import Comparable


def diverged_traces(
    part: Comparable,
    palette: Palette,
    y_limits: tuple[float, float],
    x_limits: tuple[float, float],
) -> tuple[list[Figure], list[Figure]]:
    """Marks of arms with a rate that diverged, and a note on those without a place."""
    top = y_limits[1] - 0.015 * (y_limits[1] - y_limits[0])
    traces, unknown = [], []
    for point, speed, text in diverged_marks(part):
        if not x_limits[0] <= speed <= x_limits[1]:
            unknown.append(text)
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "x": [speed],
                "y": [top],
                "text": [text],
                "textposition": "bottom center",
                "marker": {
                    "symbol": "x-thin",
                    "size": 9,
                    "line": {"color": palette.look(point.arm).color, "width": 2},
                },
                "hovertext": [f"{point.arm.label}: {text.rsplit(' ', 1)[-1]} diverged"],
                "hoverinfo": "text",
                "cliponaxis": False,
            }
        )
    notes = []
    if unknown:
        more = " …" if len(unknown) > 3 else ""
        notes.append(_corner(f"× off this axis: {'; '.join(unknown[:3])}{more}", "right"))
    return traces, notes


def _corner(text: str, side: str) -> Figure:
    return {
        "text": text,
        "xref": "paper",
        "yref": "paper",
        "x": 0 if side == "left" else 1,
        "y": 1,
        "xanchor": side,
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 11, "color": "FAINT"},
    }


def unigram_notes(
    part: Comparable, y_limits: tuple[float, float]
) -> tuple[list[Figure], list[Figure]]:
    """Shapes and notes of the data's unigram cross-entropy: a line, or its value in words."""
    value = part.unigram_loss_nats
    if not math.isfinite(value):
        return [], []
    if not y_limits[0] <= value <= y_limits[1]:
        side = "above" if value > y_limits[1] else "below"
        return [], [_corner(f"unigram cross-entropy {value:.2f} nats, {side} this axis", "left")]
    line = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"color": "FAINT", "width": 1, "dash": "dash"},
    }
    note = {
        "text": f"unigram {value:.2f}",
        "xref": "paper",
        "x": 1,
        "y": value,
        "xanchor": "right",
        "yanchor": "bottom",
        "showarrow": False,
        "font": {"size": 11, "color": "FAINT"},
    }
    return [line], [note]
