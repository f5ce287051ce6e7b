"""Loss against throughput: what is given up in speed for quality, and which choices are safe."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.figures.labels import Surroundings, draw_labels
from analysis.figures.pareto_marks import draw_other_rates, draw_point
from analysis.figures.pareto_parts import (
    attainment_band,
    axis_limits,
    diverged_marks,
    front_label,
    pareto_alt,
    pareto_caption,
    seed_cloud,
    split_by_detail,
)
from analysis.figures.style import (
    FAINT,
    INK,
    Drawing,
    Line,
    Palette,
    freeze,
    house_style,
    new_figure,
)
from analysis.front import Point, seed_points
from analysis.naming import shortened
from analysis.pareto import attainment_surface, staircase
from analysis.stats import Array
from analysis.study import Comparable
from analysis.wording import BAR_SEEDS, tick_text

MAX_LABELS = 28
"""Beyond so many arms only the front is labelled; tables name the others."""


ATTAINMENT_LINES: tuple[tuple[float, Line], ...] = ((0.5, (0, (1, 2))), (0.9, (0, (5, 3))))
"""Shares of the seeds, with their line styles."""


BETTER_CORNER = (0.88, 0.0, 1.0, 0.14)
"""Where the arrow towards better stands, in fractions of the axes."""


def draw_pareto(part: Comparable) -> Drawing | None:
    """The front of a comparison; none where no arm has both a loss and a speed."""
    drawn = part.drawn
    if not drawn:
        return None
    with house_style():
        figure = new_figure(8.0, 5.4)
        axes = figure.add_subplot()
        palette = Palette(tuple(point.arm for point in part.points))
        _set_limits(axes, part)
        _draw_band(axes, part)
        detailed, dots = split_by_detail(part)
        draw_other_rates(axes, detailed, palette)
        line = staircase(np.array([(point.speed, point.loss) for point in drawn]))
        axes.plot(line[:, 0], line[:, 1], color=INK, linewidth=1.3, zorder=2.5)
        axes.scatter(
            [point.speed for point in dots],
            [point.loss for point in dots],
            s=10,
            c=[palette.look(point.arm).color for point in dots],
            alpha=0.5,
            linewidth=0,
        )
        for point in detailed:
            draw_point(axes, point, palette)
        _draw_diverged(axes, part, palette)
        _draw_unigram(axes, part)
        _finish(axes, part)
        freeze(figure)
        labelled = drawn if len(drawn) <= MAX_LABELS else part.front[:MAX_LABELS]
        draw_labels(
            axes,
            [front_label(point) for point in labelled],
            [palette.look(point.arm).color for point in labelled],
            np.array([(point.speed, point.loss) for point in labelled]),
            _surroundings(detailed, line),
        )
    return Drawing(
        name="pareto",
        figure=figure,
        caption=pareto_caption(part),
        alt=pareto_alt(part),
    )


def _set_limits(axes: Axes, part: Comparable) -> None:
    x, y, is_log = axis_limits(part.drawn, part.unigram_loss_nats)
    if is_log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(*x)
    axes.set_ylim(*y)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))


def _draw_band(axes: Axes, part: Comparable) -> None:
    """What the seeds' own fronts reach: a band between quarters, lines for half and nine in ten."""
    band = attainment_band(part)
    if band is None:
        return
    xs, low, high = band
    axes.fill_between(xs, low, high, step="pre", color=INK, alpha=0.10, linewidth=0, zorder=1)
    sets = seed_points(part.points, part.front_seeds)
    for level, dashes in ATTAINMENT_LINES:
        surface = attainment_surface(sets, level)
        if len(surface):
            line = staircase(surface)
            axes.plot(*line.T, color=FAINT, linewidth=0.8, linestyle=dashes, zorder=1.6)


def _draw_diverged(axes: Axes, part: Comparable, palette: Palette) -> None:
    transform = axes.get_xaxis_transform()
    low, high = axes.get_xlim()
    unknown = []
    for point, speed, text in diverged_marks(part):
        if not low <= speed <= high:
            unknown.append(text)
            continue
        color = palette.look(point.arm).color
        axes.plot(speed, 0.985, "x", color=color, transform=transform, markersize=6, clip_on=False)
        axes.annotate(
            text,
            (speed, 0.985),
            xycoords=transform,
            xytext=(0, -6),
            textcoords="offset points",
            ha="center",
            va="top",
            fontsize=8,
            color=color,
        )
    if unknown:
        axes.annotate(
            "× off this axis: " + "; ".join(unknown[:4]) + (" …" if len(unknown) > 4 else ""),
            (1, 1),
            xycoords="axes fraction",
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=8,
            color=FAINT,
        )


def _draw_unigram(axes: Axes, part: Comparable) -> None:
    """The data's unigram cross-entropy: a line if it is in sight, else its value in words."""
    value = part.unigram_loss_nats
    if not math.isfinite(value):
        return
    low, high = axes.get_ylim()
    if low <= value <= high:
        axes.axhline(value, color=FAINT, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
        place, text = (1.0, (value - low) / (high - low)), f"unigram {value:.2f}"
        offset, side = (-2, 2), "right"
    else:
        arrow, edge = ("↑ above", 1.0) if value > high else ("↓ below", 0.0)
        place, text = (0.0, edge), f"unigram cross-entropy {value:.2f} nats, {arrow} this axis"
        offset, side = (4, 2), "left"
    axes.annotate(
        text,
        place,
        xycoords="axes fraction",
        xytext=offset,
        textcoords="offset points",
        ha=side,
        va="bottom",
        fontsize=8,
        color=FAINT,
    )


def _finish(axes: Axes, part: Comparable) -> None:
    device = part.points[0].arm.fact("device_name")
    axes.set_xlabel("training throughput, tokens/s" + (f" ({shortened(device)})" if device else ""))
    axes.set_ylabel("final validation loss, nats per token")
    heading = "Final loss against training throughput"
    facts = " · ".join(text for text in (part.name, part.facts) if text)
    axes.set_title(f"{heading}\n{facts}" if facts else heading, loc="left", pad=16)
    axes.annotate(
        "better",
        xy=(0.995, 0.015),
        xytext=(0.93, 0.10),
        xycoords="axes fraction",
        textcoords="axes fraction",
        fontsize=8,
        color=FAINT,
        ha="center",
        arrowprops={"arrowstyle": "->", "color": FAINT},
    )


def _surroundings(drawn: tuple[Point, ...], line: Array) -> Surroundings:
    """Marks, seed dots, bars and the front, which labels keep clear of."""
    bars = []
    for point in drawn:
        for interval, is_speed in ((point.speed_interval, True), (point.loss_interval, False)):
            if interval and interval.n >= BAR_SEEDS:
                ends = [
                    (end, point.loss) if is_speed else (point.speed, end)
                    for end in (interval.low, interval.high)
                ]
                bars.append(np.array(ends))
    return Surroundings(
        marks=np.array([(point.speed, point.loss) for point in drawn]),
        dots=np.concatenate([np.column_stack([*seed_cloud(point)]) for point in drawn]),
        lines=[line, *bars],
        corner=BETTER_CORNER,
    )
