"""The figures of the page as plotly data: the same numbers as the static ones, with hover.

Figures are plain dictionaries, so that a page is the same bytes every time. Colours named `INK`,
`FAINT` and `PAPER` are filled in by the page, which follows the reader's light or dark scheme;
`labels` are laid out by the page too, since only it knows its width.
"""

import math
from typing import Any

import numpy as np

from analysis.figures.learning_rate import CLIP_NATS, architecture, loss_limits, rate_lines
from analysis.figures.pareto import (
    axis_limits,
    diverged_marks,
    front_label,
    is_faded,
    seed_cloud,
    split_by_detail,
)
from analysis.figures.rows import drawn_interval, sorted_rows
from analysis.figures.style import Look, Palette
from analysis.naming import optimizer_name
from analysis.pareto import attained_loss, attainment_surface, staircase
from analysis.stats import mean_interval
from analysis.study import Comparable, Point, measured_seeds, seed_points
from analysis.wording import (
    BAR_SEEDS,
    arm_rate,
    count_text,
    loss_text,
    p_text,
    rate_text,
    share_text,
    signed,
)

Figure = dict[str, Any]

SYMBOLS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "h": "hexagon",
    "<": "triangle-left",
    "p": "pentagon",
    ">": "triangle-right",
    "*": "star",
    "8": "octagon",
}
DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}


def _dash(look: Look) -> str:
    return DASHES.get(look.line, "longdashdot") if isinstance(look.line, str) else "longdashdot"


def _rounded(values: Any) -> list[float | None]:
    """Seven digits, enough for any screen; null where not finite."""
    return [
        float(f"{v:.7g}") if math.isfinite(v) else None for v in np.asarray(values, dtype=float)
    ]


def pareto_figure(part: Comparable) -> Figure | None:
    """Loss against throughput; none where no arm has both."""
    drawn = part.drawn
    if not drawn:
        return None
    palette = Palette(tuple(point.arm for point in part.points))
    x_limits, y_limits, is_log = axis_limits(drawn)
    detailed, dots = split_by_detail(part)
    traces = [*_band_traces(part), _other_rates(detailed), _front_trace(drawn)]
    if dots:
        traces.append(_dots(dots, palette))
    for point in detailed:
        traces += _point_traces(point, palette.look(point.arm))
    crosses, texts = _diverged(part, palette, y_limits, x_limits)
    shapes, notes = _unigram(part, y_limits)
    labels = [
        {
            "x": point.speed,
            "y": point.loss,
            "text": front_label(point),
            "rank": 0 if point.on_front else 1,
        }
        for point in sorted(detailed, key=lambda p: (not p.on_front, p.loss))
    ]
    return {
        "data": [*traces, *crosses],
        "layout": {
            "xaxis": {
                "title": {"text": "training throughput, tokens/s"},
                "type": "log" if is_log else "linear",
                "range": [math.log10(x) for x in x_limits] if is_log else list(x_limits),
                "tickformat": "~s",
            },
            "yaxis": {
                "title": {"text": "final validation loss, nats per token"},
                "range": list(y_limits),
            },
            "shapes": shapes,
            "annotations": [*notes, *texts],
        },
        "labels": labels,
        "lines": _lines(drawn, detailed),
    }


def _dots(points: tuple[Point, ...], palette: Palette) -> Figure:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": _rounded([point.speed for point in points]),
        "y": _rounded([point.loss for point in points]),
        "marker": {
            "color": [palette.look(point.arm).color for point in points],
            "size": 5,
            "opacity": 0.5,
        },
        "text": [_hover(point) for point in points],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _lines(drawn: tuple[Point, ...], detailed: tuple[Point, ...]) -> list[list[list[float]]]:
    """The front and the bars, which labels keep clear of."""
    front = staircase(np.array([(point.speed, point.loss) for point in drawn]))
    lines = [[[float(x), float(y)] for x, y in front]]
    for point in detailed:
        speed, loss = point.speed_interval, point.loss_interval
        if speed and speed.n >= BAR_SEEDS:
            lines.append([[speed.low, point.loss], [speed.high, point.loss]])
        if loss and loss.n >= BAR_SEEDS:
            lines.append([[point.speed, loss.low], [point.speed, loss.high]])
    return lines


def _front_trace(drawn: tuple[Point, ...]) -> Figure:
    line = staircase(np.array([(point.speed, point.loss) for point in drawn]))
    return {
        "type": "scatter",
        "mode": "lines",
        "x": _rounded(line[:, 0]),
        "y": _rounded(line[:, 1]),
        "line": {"color": "INK", "width": 1.6},
        "hoverinfo": "skip",
    }


def _band_traces(part: Comparable) -> list[Figure]:
    if len(part.front_seeds) < BAR_SEEDS:
        return []
    sets = seed_points(part.points, part.front_seeds)
    quarter, most = (attainment_surface(sets, level) for level in (0.25, 0.75))
    if not len(quarter) or not len(most):
        return []
    xs = np.unique(np.concatenate([quarter[:, 0], most[:, 0]]))
    xs = xs[xs <= most[:, 0].max()]
    # A step that belongs to what lies left of each corner: plotly calls it vh.
    base = {
        "type": "scatter",
        "mode": "lines",
        "x": _rounded(xs),
        "line": {"width": 0, "shape": "vh"},
        "hoverinfo": "skip",
    }
    low = [attained_loss(quarter, x) for x in xs]
    high = [attained_loss(most, x) for x in xs]
    return [
        base | {"y": _rounded(low)},
        base | {"y": _rounded(high), "fill": "tonexty", "fillcolor": "rgba(128,128,128,0.18)"},
    ]


def _other_rates(drawn: tuple[Point, ...]) -> Figure:
    cells = [
        (point, cell)
        for point in drawn
        for cell in point.arm.cells
        if point.choice
        and cell.cell_id != point.choice.cell.cell_id
        and cell.is_eligible
        and math.isfinite(cell.mean_speed)
    ]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": _rounded([cell.mean_speed for _, cell in cells]),
        "y": _rounded([cell.mean_loss for _, cell in cells]),
        "marker": {"color": "FAINT", "size": 4, "opacity": 0.4},
        "text": [f"{p.arm.label}<br>other rate {rate_text(c.lr)}, n = {c.n}" for p, c in cells],
        "hovertemplate": "%{text}<br>%{y:.4f} nats, %{x:,.0f} tokens/s<extra></extra>",
    }


def _point_traces(point: Point, look: Look) -> list[Figure]:
    fade = 0.45 if is_faded(point) else 1.0
    speeds, losses = seed_cloud(point)
    known = measured_seeds(point.choice) if point.choice else ()
    cloud: Figure = {
        "type": "scatter",
        "mode": "markers",
        "x": _rounded(speeds),
        "y": _rounded(losses),
        "marker": {"color": look.color, "size": 5, "opacity": 0.5 * fade},
        "text": [f"{point.arm.label}<br>seed {seed}" for seed in known],
        "hovertemplate": "%{text}<br>%{y:.4f} nats, %{x:,.0f} tokens/s<extra></extra>",
    }
    is_single = point.n == 1
    mean: Figure = {
        "type": "scatter",
        "mode": "markers",
        "x": [point.speed],
        "y": [point.loss],
        "marker": {
            "color": "PAPER" if is_single else look.color,
            "symbol": SYMBOLS[look.mark],
            "size": 11,
            "opacity": fade,
            "line": {
                "color": look.color if is_single else "INK" if point.on_front else "PAPER",
                "width": 2 if is_single else 1.2,
            },
        },
        "text": [_hover(point)],
        "hovertemplate": "%{text}<extra></extra>",
    }
    for axis, interval in (("error_x", point.speed_interval), ("error_y", point.loss_interval)):
        if interval and interval.n >= BAR_SEEDS:
            mean[axis] = {
                "type": "constant",
                "value": interval.half_width,
                "color": look.color,
                "thickness": 1,
                "width": 0,
            }
    return [cloud, mean]


def _hover(point: Point) -> str:
    choice = point.choice
    rows = [f"<b>{point.arm.label}</b>"]
    if choice:
        rows.append(f"learning rate {arm_rate(point.arm, choice)}, n = {point.n}")
        if choice.edge:
            rows.append(choice.edge)
    rows += [
        f"{loss_text(point.loss, point.loss_interval)} nats",
        f"{count_text(point.speed)} tokens/s",
        f"on the front: {'yes' if point.on_front else 'no'}, "
        f"{share_text(point.front_probability)} of the draws",
    ]
    if point.arm.num_diverged:
        rows.append(f"{point.arm.num_diverged}/{point.arm.num_ended} diverged over all rates")
    return "<br>".join(rows)


def _diverged(
    part: Comparable,
    palette: Palette,
    y_limits: tuple[float, float],
    x_limits: tuple[float, float],
) -> tuple[list[Figure], list[Figure]]:
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


def _unigram(part: Comparable, y_limits: tuple[float, float]) -> tuple[list[Figure], list[Figure]]:
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


def rate_figures(part: Comparable, most: int = 24) -> list[tuple[str, Figure]]:
    """One small figure per architecture, with its name."""
    limits = loss_limits(part)
    if limits is None:
        return []
    palette = Palette(tuple(point.arm for point in part.points))
    panels: dict[str, list[Point]] = {}
    for point in part.points:
        if any(cell.num_ended for cell in point.arm.cells):
            panels.setdefault(architecture(point.arm), []).append(point)
    return [
        (name, _rate_figure(points, limits, palette))
        for name, points in list(panels.items())[:most]
    ]


def _rate_figure(points: list[Point], limits: tuple[float, float], palette: Palette) -> Figure:
    traces = [
        trace
        for point in points
        for line in rate_lines(point.arm)
        for trace in _rate_traces(point, line, limits, palette.look(point.arm))
    ]
    rates = sorted({cell.lr for point in points for cell in point.arm.cells if cell.lr > 0})
    shown = rates if len(rates) <= 5 else [rates[0], rates[len(rates) // 2], rates[-1]]
    return {
        "data": traces,
        "layout": {
            "xaxis": {
                "type": "log",
                "tickvals": shown,
                "ticktext": [rate_text(rate) for rate in shown],
                "title": {"text": "learning rate"},
            },
            "yaxis": {"range": list(limits)},
            "showlegend": len(points) > 1,
            "margin": {"l": 46, "r": 8, "t": 8, "b": 40},
        },
    }


def _rate_traces(
    point: Point, line: list[Any], limits: tuple[float, float], look: Look
) -> list[Figure]:
    name = optimizer_name(point.arm.fact("optimizer")) or point.arm.label
    intervals = [mean_interval(cell.losses) for cell in line]
    halves = [i.half_width if i and i.n >= BAR_SEEDS else 0.0 for i in intervals]
    chosen = point.choice.cell.cell_id if point.choice else ""
    mean: Figure = {
        "type": "scatter",
        "mode": "lines+markers",
        "name": name,
        "x": [cell.lr for cell in line],
        "y": _rounded([cell.mean_loss if cell.is_eligible else math.nan for cell in line]),
        "line": {"color": look.color, "dash": _dash(look), "width": 1.8},
        "marker": {
            "symbol": SYMBOLS[look.mark],
            "size": [11 if cell.cell_id == chosen else 6 for cell in line],
            "color": ["PAPER" if cell.n == 1 else look.color for cell in line],
            "line": {
                "width": [2 if cell.cell_id == chosen or cell.n == 1 else 0 for cell in line],
                "color": ["INK" if cell.cell_id == chosen else look.color for cell in line],
            },
        },
        "error_y": {"type": "data", "array": _rounded(halves), "color": look.color, "thickness": 1},
        "text": [
            f"{point.arm.label}<br>rate {rate_text(cell.lr)}, n = {cell.n}"
            + ("<br>chosen" if cell.cell_id == chosen else "")
            for cell in line
        ],
        "hovertemplate": "%{text}<br>%{y:.4f} nats<extra></extra>",
    }
    dots = [
        (cell.lr, loss, seed)
        for cell in line
        for loss, seed in zip(cell.losses, cell.seeds, strict=True)
    ]
    cloud: Figure = {
        "type": "scatter",
        "mode": "markers",
        "x": [rate for rate, _, _ in dots],
        "y": _rounded([loss for _, loss, _ in dots]),
        "marker": {"color": look.color, "size": 4, "opacity": 0.55},
        "text": [f"{point.arm.label}<br>rate {rate_text(r)}, seed {s}" for r, _, s in dots],
        "hovertemplate": "%{text}<br>%{y:.4f} nats<extra></extra>",
        "showlegend": False,
    }
    blown = [cell for cell in line if cell.num_diverged]
    top = limits[1] - 0.04 * (limits[1] - limits[0])
    crosses: Figure = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [cell.lr for cell in blown],
        "y": [top] * len(blown),
        "text": [f"{cell.num_diverged}/{cell.num_ended}" for cell in blown],
        "textposition": "bottom center",
        "marker": {"symbol": "x-thin", "size": 8, "line": {"color": look.color, "width": 2}},
        "hovertext": [f"{cell.num_diverged} of {cell.num_ended} diverged" for cell in blown],
        "hoverinfo": "text",
        "showlegend": False,
    }
    return [mean, cloud, crosses] if blown else [mean, cloud]


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
                "color": look.color if row.pairs > 1 else "PAPER",
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


__all__ = ["CLIP_NATS", "difference_figure", "pareto_figure", "rate_figures"]
