"""Curves, other costs and context length as plotly data."""

import numpy as np
import pandas as pd

from analysis.figures.curves import build_curves, curve_limits
from analysis.figures.scaling import family_looks, shown_quantities
from analysis.figures.style import Palette, byte_ticks
from analysis.interactive.marks import SYMBOLS, Figure, dash, mark, rounded
from analysis.pareto import staircase
from analysis.scaling import Family
from analysis.stats import Array
from analysis.study import Comparable
from analysis.tradeoffs import TradeOff
from analysis.wording import bytes_text, count_text

LEGEND_BELOW: Figure = {
    "orientation": "h",
    "yref": "container",
    "y": 0,
    "yanchor": "bottom",
    "x": 0,
}
"""At the bottom of the whole figure, so that no axis title lies under it at any width."""


def curves_figure(part: Comparable, curves: pd.DataFrame) -> Figure | None:
    """Loss against training tokens; none without curves."""
    built = build_curves(part, curves)
    if not built:
        return None
    palette = Palette(tuple(point.arm for point in part.points))
    traces = []
    for curve in built:
        look = palette.look(curve.point.arm)
        half = curve.half_width
        trace: Figure = {
            "type": "scatter",
            "mode": "lines+markers",
            "name": curve.point.arm.label,
            "x": rounded(curve.tokens),
            "y": rounded(curve.mean),
            "line": {"color": look.color, "dash": dash(look), "width": 1.8},
            "marker": mark(look, size=5, is_single=curve.losses.shape[1] == 1),
            "hovertemplate": f"{curve.point.arm.label}<br>%{{y:.4f}} nats, %{{x:,.0f}} tokens"
            "<extra></extra>",
        }
        if half is not None:
            trace["error_y"] = {
                "type": "data",
                "array": rounded(half),
                "color": look.color,
                "thickness": 0.8,
                "width": 0,
            }
        traces.append(trace)
    return {
        "data": traces,
        "layout": {
            "xaxis": {"title": {"text": "training tokens"}, "tickformat": "~s"},
            "yaxis": {
                "title": {"text": f"{built[0].quantity} loss, nats per token"},
                "range": list(curve_limits(built)),
            },
            "showlegend": True,
            "legend": LEGEND_BELOW,
        },
    }


def trade_off_figure(trade: TradeOff, part: Comparable) -> Figure:
    """Loss against one cost, its front's members named by the page."""
    palette = Palette(tuple(point.arm for point in part.points))
    places = np.array([(v, p.loss) for p, v in zip(trade.points, trade.values, strict=True)])
    line = staircase(places, trade.maximise)
    write = bytes_text if trade.cost.is_bytes else count_text
    looks = [palette.look(point.arm) for point in trade.points]
    members = [point.arm.arm_id in trade.on_front for point in trade.points]
    is_log = places[:, 0].min() > 0 and places[:, 0].max() > 10 * places[:, 0].min()
    marks: Figure = {
        "type": "scatter",
        "mode": "markers",
        "x": rounded(places[:, 0]),
        "y": rounded(places[:, 1]),
        "marker": {
            "size": 9,
            "color": [
                "PAPER" if point.n == 1 else look.color
                for point, look in zip(trade.points, looks, strict=True)
            ],
            "symbol": [SYMBOLS[look.mark] for look in looks],
            "opacity": [1.0 if member else 0.5 for member in members],
            "line": {
                "color": [
                    "INK" if member else look.color
                    for member, look in zip(members, looks, strict=True)
                ],
                "width": 1,
            },
        },
        "text": [
            f"<b>{point.arm.label}</b><br>{point.loss:.4f} nats<br>"
            f"{trade.cost.label} {write(value)}"
            for point, value in zip(trade.points, trade.values, strict=True)
        ],
        "hovertemplate": "%{text}<extra></extra>",
    }
    front: Figure = {
        "type": "scatter",
        "mode": "lines",
        "x": rounded(line[:, 0]),
        "y": rounded(line[:, 1]),
        "line": {"color": "INK", "width": 1.4},
        "hoverinfo": "skip",
    }
    better = "more is better" if trade.cost.is_better_large else "less is better"
    axis: Figure = {
        "title": {"text": f"{trade.cost.label} ({better})"},
        "type": "log" if is_log else "linear",
        "tickformat": "~s",
    }
    if trade.cost.is_bytes and not is_log:
        ticks = byte_ticks(float(places[:, 0].min()), float(places[:, 0].max()), most=3)
        axis |= {"tickvals": ticks, "ticktext": [bytes_text(tick) for tick in ticks]}
    return {
        "data": [front, marks],
        "layout": {
            "xaxis": axis,
            "yaxis": {"title": {"text": "final loss, nats"}},
            "margin": {"l": 50, "r": 8, "t": 8, "b": 40},
        },
        "labels": [
            {"x": float(x), "y": float(y), "text": point.arm.label, "rank": 0}
            for point, (x, y), member in zip(trade.points, places, members, strict=True)
            if member
        ],
        "lines": [line.tolist()],
    }


def scaling_figures(families: tuple[Family, ...]) -> list[Figure]:
    """Training time and every other measured quantity against context length."""
    if not families:
        return []
    figures = [
        _length_figure(
            families, "training seconds per sequence", [family.seconds for family in families]
        )
    ]
    for quantity in shown_quantities(families):
        values = [quantity.of(family) for family in families]
        figure = _length_figure(families, quantity.label, values, is_log=quantity.is_log)
        if quantity.is_bytes:
            figure["layout"]["yaxis"] |= _byte_axis(np.concatenate(values))
        figures.append(figure)
    return figures


def _byte_axis(values: Array) -> Figure:
    """Ticks of a logarithmic axis of bytes, at powers of two."""
    finite = values[np.isfinite(values)]
    low, high = np.floor(np.log2(finite.min())), np.ceil(np.log2(finite.max()))
    step = max(1, int((high - low) // 5))
    ticks = [2.0**power for power in range(int(low), int(high) + 1, step)]
    return {"tickvals": ticks, "ticktext": [bytes_text(tick) for tick in ticks]}


def _length_figure(
    families: tuple[Family, ...], label: str, values: list[Array], *, is_log: bool = True
) -> Figure:
    looks = family_looks(families)
    lengths = sorted({float(length) for family in families for length in family.lengths})
    traces = []
    for family, own in zip(families, values, strict=True):
        look = looks[family.label]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": family.label,
                "x": family.lengths.tolist(),
                "y": rounded(own),
                "line": {"color": look.color, "dash": dash(look), "width": 1.8},
                "marker": mark(look, size=8, is_single=len(family.seeds) == 1),
                "hovertemplate": f"{family.label}<br>%{{x:,}} tokens, %{{y:.4g}}<extra></extra>",
            }
        )
    return {
        "data": traces,
        "layout": {
            "xaxis": {
                "type": "log",
                "title": {"text": "context length, tokens"},
                "tickvals": lengths,
                "ticktext": [f"{length:,.0f}" for length in lengths],
            },
            "yaxis": {"type": "log" if is_log else "linear", "title": {"text": label}},
            "showlegend": True,
            "legend": LEGEND_BELOW,
        },
    }
