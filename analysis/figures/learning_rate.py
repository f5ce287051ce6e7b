"""Loss against learning rate: where the optimum is, how wide, and whether it is bracketed."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.markers import CARETUP
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from matplotlib.transforms import ScaledTranslation

from analysis.arms import Arm, Cell
from analysis.figures.relative_rate import (
    REL_INCHES,
    RELATIVE_CAPTION,
    draw_relative,
    has_second_row,
    rate_lines,
    rise_limits,
)
from analysis.figures.style import INK, Drawing, Look, Palette, freeze, house_style, new_figure
from analysis.front import Point
from analysis.naming import SEPARATOR, optimizer_name
from analysis.stats import mean_interval
from analysis.study import Comparable
from analysis.wording import BAR_SEEDS, rate_text

MAX_PANELS = 16
MAX_PAGES = 2
NAME_POINTS = 10.0
"""Height of a panel's line of text on one optimizer."""

CLIP_NATS = 1.0
"""Losses more than this above the best are drawn as carets on the top edge."""


def architecture(arm: Arm) -> str:
    """The arm's name without its optimizer: what a panel shows."""
    optimizer = optimizer_name(arm.fact("optimizer"))
    parts = [part for part in arm.label.split(SEPARATOR) if part != optimizer]
    return SEPARATOR.join(parts) or arm.label


def draw_learning_rates(part: Comparable) -> list[Drawing]:
    """Pages of panels, one per architecture; none where nothing has a loss."""
    panels: dict[str, list[Point]] = {}
    for point in part.points:
        if any(cell.num_ended for cell in point.arm.cells):
            panels.setdefault(architecture(point.arm), []).append(point)
    limits = loss_limits(part)
    if not panels or limits is None:
        return []
    names = _front_first(panels)
    pages = [names[i : i + MAX_PANELS] for i in range(0, len(names), MAX_PANELS)]
    palette = Palette(tuple(point.arm for point in part.points))
    return [
        _draw_page(
            number,
            {name: panels[name] for name in page},
            limits,
            palette,
            _caption(part, len(names), len(pages)),
        )
        for number, page in enumerate(pages[:MAX_PAGES], start=1)
    ]


def _front_first(panels: dict[str, list[Point]]) -> list[str]:
    """Names in house order; where pages are too few, architectures on the front come first."""
    if len(panels) <= MAX_PAGES * MAX_PANELS:
        return list(panels)
    return sorted(panels, key=lambda name: not any(point.on_front for point in panels[name]))


def loss_limits(part: Comparable) -> tuple[float, float] | None:
    """Lower and upper end of the loss axis that all panels share; none without a finite loss."""
    losses = [cell.losses for point in part.points for cell in point.arm.cells if cell.is_eligible]
    if not losses:
        return None
    values = np.concatenate(losses)
    low, high = float(values.min()), float(min(values.max(), values.min() + CLIP_NATS))
    pad = 0.06 * (high - low) or 0.01 * abs(low) or 0.1
    # Room above for the marks of what diverged or was clipped, below for the chosen rate's arrow.
    return low - 2.5 * pad, high + 3.5 * pad


def _draw_page(
    number: int,
    panels: dict[str, list[Point]],
    limits: tuple[float, float],
    palette: Palette,
    caption: str,
) -> Drawing:
    columns = _num_columns(len(panels))
    rows = math.ceil(len(panels) / columns)
    with house_style():
        extra = REL_INCHES if has_second_row(panels) else 0.0
        figure = new_figure(max(2.5 * columns, 4.0) + 0.4, (2.4 + extra) * rows + 0.3)
        heights = [2.4, extra] * rows if extra else [2.4] * rows
        grid = figure.subplots(
            len(heights), columns, squeeze=False, sharey="row", height_ratios=heights
        )
        for index in range(rows * columns):
            own = grid[:: 2 if extra else 1].flat[index]
            below = grid[1::2].flat[index] if extra else None
            if index >= len(panels):
                own.set_axis_off()
                if below is not None:
                    below.set_axis_off()
                continue
            name = list(panels)[index]
            _draw_panel(own, name, panels[name], limits, palette)
            if below is not None:
                draw_relative(below, panels[name], palette, rise_limits(panels))
        _name_axes(grid, has_second=extra > 0)
        freeze(figure)
    return Drawing(
        name="learning_rate" if number == 1 else f"learning_rate_{number}",
        figure=figure,
        caption=caption + (f" {RELATIVE_CAPTION}" if extra else ""),
        alt=_alt(panels),
    )


def _name_axes(grid: npt.NDArray[Any], *, has_second: bool) -> None:
    """Titles of the axes, of losses once per row."""
    for number, row in enumerate(grid):
        is_second = has_second and number % 2 == 1
        row[0].set_ylabel("nats above best" if is_second else "final loss, nats", fontsize=8)
        for axes in row:
            if axes.axison:
                axes.set_xlabel("rate over best rate" if is_second else "learning rate", fontsize=8)


def _num_columns(num_panels: int) -> int:
    """Two to four columns, whichever leaves the fewest holes; more columns where that is equal."""
    if num_panels < 4:
        return num_panels
    return min((4, 3, 2), key=lambda columns: -num_panels % columns)


def _draw_panel(
    axes: Axes, name: str, points: list[Point], limits: tuple[float, float], palette: Palette
) -> None:
    rates = sorted({cell.lr for point in points for cell in point.arm.cells if cell.lr > 0})
    axes.set_title(name, loc="left", fontsize=8.5, pad=4 + NAME_POINTS * len(points))
    axes.set_ylim(*limits)
    if not rates:
        axes.annotate("no rate above 0", (0.5, 0.5), xycoords="axes fraction", ha="center")
        return
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / 1.6, rates[-1] * 1.6)
    axes.xaxis.set_major_locator(FixedLocator(_spaced(rates)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: rate_text(value)))
    for index, point in enumerate(points):
        look = palette.look(point.arm)
        for line in rate_lines(point.arm):
            _draw_line(axes, line, look, limits)
        _draw_choice(axes, point, look, limits, index)
    _draw_names(axes, points, palette)


def _spaced(rates: list[float], most: int = 5) -> list[float]:
    """At most `most` of the rates as ticks, always the first and the last."""
    if len(rates) <= most:
        return rates
    picks = np.unique(np.linspace(0, len(rates) - 1, most).round().astype(int))
    return [rates[index] for index in picks]


def _draw_line(axes: Axes, line: list[Cell], look: Look, limits: tuple[float, float]) -> None:
    # A cell without a usable mean breaks the line, as nothing is known between its neighbours.
    rates = np.array([cell.lr for cell in line])
    means = np.array([cell.mean_loss if cell.is_eligible else math.nan for cell in line])
    axes.plot(rates, means, color=look.color, linestyle=look.line, linewidth=1.3, zorder=2)
    halves = np.array([_half_width(cell) for cell in line])
    axes.fill_between(
        rates, means - halves, means + halves, color=look.color, alpha=0.15, linewidth=0
    )
    top = limits[1] - 0.03 * (limits[1] - limits[0])
    seeds = [(cell.lr, loss) for cell in line for loss in cell.losses if loss <= limits[1]]
    # One artist for many marks: laying out and saving cost time for each.
    axes.plot(*_columns(seeds), ".", color=look.color, markersize=3, alpha=0.6)
    eligible = [cell for cell in line if cell.is_eligible]
    high = [(cell.lr, top) for cell in eligible if cell.mean_loss > limits[1]]
    axes.plot(*_columns(high), marker=CARETUP, linestyle="", color=look.color, markersize=5)
    shown = [cell for cell in eligible if cell.mean_loss <= limits[1]]
    for is_single in (False, True):
        places = [(cell.lr, cell.mean_loss) for cell in shown if (cell.n == 1) == is_single]
        axes.plot(
            *_columns(places),
            look.mark,
            color=look.color,
            markersize=4.5,
            markerfacecolor="white" if is_single else look.color,
            zorder=3,
        )
    for cell in line:
        if cell.num_diverged:
            axes.plot(cell.lr, top, "x", color=look.color, markersize=5, zorder=4)
            axes.annotate(
                f"{cell.num_diverged}/{cell.num_ended}",
                (cell.lr, top),
                xytext=(0, -5),
                textcoords="offset points",
                ha="center",
                va="top",
                fontsize=7,
                color=look.color,
            )


def _columns(places: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in places], [y for _, y in places]


def _half_width(cell: Cell) -> float:
    interval = mean_interval(cell.losses)
    return interval.half_width if interval and interval.n >= BAR_SEEDS else math.nan


def _draw_choice(
    axes: Axes, point: Point, look: Look, limits: tuple[float, float], index: int
) -> None:
    choice = point.choice
    if choice is None or choice.cell.lr <= 0:
        return
    axes.annotate(
        "",
        (choice.cell.lr, choice.cell.mean_loss),
        xytext=(0, -13),
        textcoords="offset points",
        arrowprops={"arrowstyle": "-|>", "color": look.color, "linewidth": 1.2},
        zorder=5,
    )
    if choice.tolerance:
        height = limits[0] + (0.02 + 0.025 * index) * (limits[1] - limits[0])
        axes.plot(choice.tolerance, [height, height], color=look.color, linewidth=2.5, alpha=0.8)


def _draw_names(axes: Axes, points: list[Point], palette: Palette) -> None:
    """One line of text per optimizer above the panel: its line, W, S and a flag."""
    figure = axes.get_figure()
    assert figure is not None
    for index, point in enumerate(points):
        look = palette.look(point.arm)
        text = optimizer_name(point.arm.fact("optimizer")) or point.arm.label
        choice = point.choice
        if choice and choice.tolerance:
            low, high = choice.tolerance
            text += f"  W {math.log10(high / low):.1f}"
        if choice and choice.sensitivity:
            text += f"  S {choice.sensitivity.mean:.2f}"
        if choice and choice.edge:
            text += "  edge"
        rise = (0.5 + len(points) - 1 - index) * NAME_POINTS / 72
        place = axes.transAxes + ScaledTranslation(0, rise, figure.dpi_scale_trans)
        axes.plot(
            [0.0, 0.055, 0.11],
            [1.0, 1.0, 1.0],
            transform=place,
            color=look.color,
            linestyle=look.line,
            marker=look.mark,
            markevery=[1],
            markersize=3.5,
            linewidth=1.3,
            clip_on=False,
        )
        axes.text(0.14, 1.0, text, transform=place, fontsize=7, va="center_baseline", color=INK)


def _caption(part: Comparable, panels: int, pages: int) -> str:
    text = (
        "Mean over seeds with its 95 % t band (from 3 seeds), each seed a dot; an arrow marks the "
        "chosen rate, the bar at the bottom the rates within 0.05 nats of it (W, in decades). "
        "S: mean loss over the rates, capped at the loss at initialisation, minus the smallest. "
        "× with k/n: seeds diverged. ‘edge’: the best rate is not bracketed by tried ones. "
        "The loss axis does not start at 0."
    )
    zero = sum(cell.lr == 0 for point in part.points for cell in point.arm.cells)
    if zero:
        noun = "cell at a rate of 0 has" if zero == 1 else "cells at a rate of 0 have"
        text += f" {zero} {noun} no place on this axis."
    if pages > MAX_PAGES:
        text += f" {MAX_PAGES * MAX_PANELS} of {panels} architectures are drawn; tables have all."
    return text


def _alt(panels: dict[str, list[Point]]) -> str:
    parts = [
        f"{point.arm.label}: best at {rate_text(point.choice.cell.lr)}"
        for points in panels.values()
        for point in points
        if point.choice
    ]
    return f"Loss against learning rate, one panel per architecture. {'; '.join(parts)}."
