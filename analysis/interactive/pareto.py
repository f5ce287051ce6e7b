"""Loss against throughput with hover, zoom and labels that the page lays out."""

import math

import numpy as np

from analysis.figures.pareto import ATTAINMENT_LINES
from analysis.figures.pareto_marks import other_cells
from analysis.figures.pareto_parts import (
    attainment_band,
    axis_limits,
    front_label,
    has_ellipse,
    held_out_shift,
    is_faded,
    seed_cloud,
    split_by_detail,
)
from analysis.figures.style import Look, Palette, readable
from analysis.front import Point, measured_seeds, seed_points
from analysis.interactive.marks import SYMBOLS, Figure, rounded
from analysis.interactive.pareto_notes import diverged_traces, unigram_notes
from analysis.pareto import attainment_surface, staircase
from analysis.run_links import RunLinks
from analysis.samples import joint_region
from analysis.stats import Array
from analysis.study import Comparable
from analysis.wording import BAR_SEEDS, arm_rate, count_text, loss_text, rate_text, share_text


def pareto_figure(part: Comparable, links: RunLinks | None = None) -> Figure | None:
    """Loss against throughput; none where no arm has both.

    Args:
        part: the comparison.
        links: where a click on a mark leads.
    """
    links = links or RunLinks()
    drawn = part.drawn
    if not drawn:
        return None
    palette = Palette(tuple(point.arm for point in part.points))
    x_limits, y_limits, is_log = axis_limits(drawn, part.unigram_loss_nats)
    detailed, dots = split_by_detail(part)
    traces = [*_band_traces(part), _other_rates(detailed, palette), _front_trace(drawn)]
    if dots:
        traces.append(_dots(dots, palette, links))
    for point in detailed:
        look = palette.look(point.arm)
        traces += [*_doubt_traces(point, look), *_point_traces(point, look, links)]
    crosses, texts = diverged_traces(part, palette, y_limits, x_limits)
    shapes, notes = unigram_notes(part, y_limits)
    labels = [
        {
            "x": point.speed,
            "y": point.loss,
            "text": front_label(point),
            "rank": 0 if point.on_front else 1,
            "ink": _inks(palette.look(point.arm)),
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
        "links": links.folders,
    }


DARK_PAPER = "#14171b"


def _inks(look: Look) -> list[str]:
    """The arm's colour as text on light and on dark paper."""
    return [readable(look.color), readable(look.color, DARK_PAPER)]


def _dots(points: tuple[Point, ...], palette: Palette, links: RunLinks) -> Figure:
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
        "text": [_hover(point, links.hint) for point in points],
        "customdata": [_detail(point, links) for point in points],
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
    return _line_trace(line, {"color": "INK", "width": 1.6})


def _band_traces(part: Comparable) -> list[Figure]:
    """The band between quarters of the seeds, and a line for each of `ATTAINMENT_LINES`."""
    band = attainment_band(part)
    if band is None:
        return []
    xs, low, high = band
    # A step that belongs to what lies left of each corner: plotly calls it vh.
    base = {
        "type": "scatter",
        "mode": "lines",
        "x": rounded(xs),
        "line": {"width": 0, "shape": "vh"},
        "hoverinfo": "skip",
    }
    traces = [
        base | {"y": rounded(low)},
        base | {"y": rounded(high), "fill": "tonexty", "fillcolor": "rgba(128,128,128,0.18)"},
    ]
    sets = seed_points(part.points, part.front_seeds)
    for (level, _), kind in zip(ATTAINMENT_LINES, ("dot", "dash"), strict=True):
        surface = attainment_surface(sets, level)
        line = staircase(surface) if len(surface) else surface.reshape(-1, 2)
        traces.append(_line_trace(line, {"color": "FAINT", "width": 1, "dash": kind}))
    return traces


def _line_trace(line: Array, style: Figure) -> Figure:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": rounded(line[:, 0]),
        "y": rounded(line[:, 1]),
        "line": style,
        "hoverinfo": "skip",
    }


def _other_rates(drawn: tuple[Point, ...], palette: Palette) -> Figure:
    cells = [(point, cell) for point in drawn for cell in other_cells(point)]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": rounded([cell.mean_speed for _, cell in cells]),
        "y": rounded([cell.mean_loss for _, cell in cells]),
        "marker": {
            "color": "FAINT",
            "symbol": [SYMBOLS[palette.look(point.arm).mark] for point, _ in cells],
            "size": 5,
            "opacity": 0.45,
        },
        "text": [f"{p.arm.label}<br>other rate {rate_text(c.lr)}, n = {c.n}" for p, c in cells],
        "hovertemplate": "%{text}<br>%{y:.4f} nats, %{x:,.0f} tokens/s<extra></extra>",
    }


def _doubt_traces(point: Point, look: Look) -> list[Figure]:
    """The joint region from five seeds, and the dash at the held-out loss."""
    traces = []
    if has_ellipse(point):
        traces.append(
            _line_trace(joint_region(*seed_cloud(point)), {"color": look.color, "width": 0.8})
            | {"fill": "toself", "opacity": 0.3}
        )
    shift = held_out_shift(point)
    if shift is not None:
        stem = np.array([[point.speed, point.loss], [point.speed, point.loss + shift]])
        traces.append(
            _line_trace(stem, {"color": look.color, "width": 1.2, "dash": "dot"})
            | {
                "mode": "lines+markers",
                "marker": {
                    "symbol": ["circle", "line-ew"],
                    "size": [0, 11],
                    "line": {"color": look.color, "width": 1.5},
                },
            }
        )
    return traces


def _point_traces(point: Point, look: Look, links: RunLinks) -> list[Figure]:
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
        "text": [_hover(point, links.hint)],
        "customdata": [_detail(point, links)],
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


def _detail(point: Point, links: RunLinks) -> Figure:
    """What a click writes: the cell, and seed, replicate and MLflow page of each of its runs."""
    if point.choice is None:
        return {"cell": "", "runs": []}
    cell = point.choice.cell
    pairs = zip(cell.seeds, cell.replicate_ids, strict=True)
    runs = [[str(seed), name, links.pages.get(name, "")] for seed, name in pairs]
    return {"cell": cell.cell_id, "runs": runs}


def _hover(point: Point, hint: str) -> str:
    choice = point.choice
    rows = [f"<b>{point.arm.label}</b>"]
    if choice:
        rows.append(f"learning rate {arm_rate(point.arm, choice)}, seeds {_seed_list(point)}")
        rows.append(f"cell {choice.cell.cell_id}")
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
    return "<br>".join([*rows, hint] if hint else rows)


def _seed_list(point: Point) -> str:
    """The seeds behind a mark, the first eight by name."""
    seeds = point.choice.cell.seeds if point.choice else ()
    more = f" and {len(seeds) - 8} more" if len(seeds) > 8 else ""
    return ", ".join(str(seed) for seed in seeds[:8]) + more
