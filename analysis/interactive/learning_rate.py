"""Loss against learning rate, one small figure per architecture."""

import math
from typing import Any

from analysis.choice import TOLERANCE_NATS
from analysis.figures.learning_rate import architecture, loss_limits
from analysis.figures.relative_rate import (
    MAX_RISE_NATS,
    has_second_row,
    rate_lines,
    ratio_ticks,
    relative_line,
    rise_limits,
)
from analysis.figures.style import Look, Palette
from analysis.front import Point
from analysis.interactive.marks import SYMBOLS, Figure, dash, mark, rounded
from analysis.naming import optimizer_name
from analysis.stats import mean_interval
from analysis.study import Comparable
from analysis.wording import BAR_SEEDS, rate_text


def rate_figures(part: Comparable, most: int = 24) -> list[tuple[str, Figure, Figure | None]]:
    """One small figure per architecture, with its name, and a second over the best rates.

    The second stands where some architecture has two optimizers whose widths can be compared.
    """
    limits = loss_limits(part)
    if limits is None:
        return []
    palette = Palette(tuple(point.arm for point in part.points))
    panels: dict[str, list[Point]] = {}
    for point in part.points:
        if any(cell.num_ended for cell in point.arm.cells):
            panels.setdefault(architecture(point.arm), []).append(point)
    rises = rise_limits(panels) if has_second_row(panels) else None
    return [
        (
            name,
            _rate_figure(points, limits, palette),
            _relative_figure(points, rises, palette) if rises else None,
        )
        for name, points in list(panels.items())[:most]
    ]


def _relative_figure(
    points: list[Point], limits: tuple[float, float], palette: Palette
) -> Figure | None:
    """Nats above the best against the rate over the best rate; none without two rates."""
    traces, ratios = [], [1.0]
    for point in points:
        line = relative_line(point)
        if len(line) < 2:
            continue
        look = palette.look(point.arm)
        x, rise, seeds = zip(*line, strict=True)
        ratios += x
        trace: Figure = {
            "type": "scatter",
            "mode": "lines+markers",
            "x": rounded(x),
            "y": rounded([value if value <= MAX_RISE_NATS else math.nan for value in rise]),
            "line": {"color": look.color, "dash": dash(look), "width": 1.5},
            "marker": mark(look, size=5, is_single=False)
            | {
                "color": ["PAPER" if n == 1 else look.color for n in seeds],
                "line": {"color": look.color, "width": [1.5 if n == 1 else 0 for n in seeds]},
            },
            "hovertemplate": f"{point.arm.label}<br>%{{x:.3g}}× the best rate, "
            "+%{y:.4f} nats<extra></extra>",
        }
        traces.append(trace)
    if not traces:
        return None
    low, high = min(ratios) / 1.3, max(ratios) * 1.3
    ticks = [ratio for ratio in ratio_ticks(low, high) if low <= ratio <= high]
    tolerance: Figure = {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": TOLERANCE_NATS,
        "y1": TOLERANCE_NATS,
        "line": {"color": "FAINT", "width": 1, "dash": "dot"},
    }
    return {
        "data": traces,
        "layout": {
            "xaxis": {
                "type": "log",
                "range": [math.log10(low), math.log10(high)],
                "tickvals": ticks,
                "ticktext": [f"{ratio:g}×" for ratio in ticks],
                "title": {"text": "rate over best rate"},
            },
            "yaxis": {"range": list(limits), "title": {"text": "nats above"}, "nticks": 4},
            "shapes": [tolerance],
            "margin": {"l": 46, "r": 8, "t": 6, "b": 38},
        },
    }


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
        "y": rounded([cell.mean_loss if cell.is_eligible else math.nan for cell in line]),
        "line": {"color": look.color, "dash": dash(look), "width": 1.8},
        "marker": {
            "symbol": SYMBOLS[look.mark],
            "size": [11 if cell.cell_id == chosen else 6 for cell in line],
            "color": ["PAPER" if cell.n == 1 else look.color for cell in line],
            "line": {
                "width": [2 if cell.cell_id == chosen or cell.n == 1 else 0 for cell in line],
                "color": ["INK" if cell.cell_id == chosen else look.color for cell in line],
            },
        },
        "error_y": {"type": "data", "array": rounded(halves), "color": look.color, "thickness": 1},
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
        "y": rounded([loss for _, loss, _ in dots]),
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
