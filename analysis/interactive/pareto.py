"""Loss against throughput with hover, zoom and labels that the page lays out."""

import math

import numpy as np

from analysis.figures.pareto_parts import (
    axis_limits,
    diverged_marks,
    front_label,
    is_faded,
    seed_cloud,
    split_by_detail,
)
from analysis.figures.style import Look, Palette
from analysis.front import Point, measured_seeds, seed_points
from analysis.interactive.marks import SYMBOLS, Figure, rounded
from analysis.pareto import attained_loss, attainment_surface, staircase
from analysis.study import Comparable
from analysis.wording import BAR_SEEDS, arm_rate, count_text, loss_text, rate_text, share_text


def pareto_figure(part: Comparable) -> Figure | None:
    """Loss against throughput; none where no arm has both."""
    drawn = part.drawn
    if not drawn:
        return None
    palette = Palette(tuple(point.arm for point in part.points))
    x_limits, y_limits, is_log = axis_limits(drawn, part.unigram_loss_nats)
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
        "x": rounded([point.speed for point in points]),
        "y": rounded([point.loss for point in points]),
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
        "x": rounded(line[:, 0]),
        "y": rounded(line[:, 1]),
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
        "x": rounded(xs),
        "line": {"width": 0, "shape": "vh"},
        "hoverinfo": "skip",
    }
    low = [attained_loss(quarter, x) for x in xs]
    high = [attained_loss(most, x) for x in xs]
    return [
        base | {"y": rounded(low)},
        base | {"y": rounded(high), "fill": "tonexty", "fillcolor": "rgba(128,128,128,0.18)"},
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
        "x": rounded([cell.mean_speed for _, cell in cells]),
        "y": rounded([cell.mean_loss for _, cell in cells]),
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
        "x": rounded(speeds),
        "y": rounded(losses),
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
