"""Loss above an arm's best against its rate over its best rate: whose valley is wider?

Rates of different optimizers are different units; over the best rate of each they share an axis.
"""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from analysis.arms import Arm, Cell
from analysis.choice import TOLERANCE_NATS
from analysis.figures.style import FAINT, Palette
from analysis.front import Point

REL_INCHES = 1.35
MAX_RISE_NATS = 1.0
"""Losses further above the best are left to the panel above, as are rates that diverged."""

RELATIVE_CAPTION = (
    "Second rows: the same over each optimizer's own best rate and loss, so that widths can be "
    f"compared; the dotted line is {TOLERANCE_NATS:g} nats above the best."
)
RATIOS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
CLOSE_RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Ticks of an axis that spans less than a decade."""

DECADES = (0.0001, 0.001, 0.01, 0.1, 1.0, 10.0, 100.0, 1000.0, 10_000.0)
"""Ticks of an axis that spans more than two."""


def rate_lines(arm: Arm) -> list[list[Cell]]:
    """Cells of an arm by ascending rate: one line, or one per Adam rate where these form a grid."""
    cells = [cell for cell in arm.cells if cell.lr > 0]
    if len({cell.lr for cell in cells}) == len(cells):
        return [sorted(cells, key=lambda cell: cell.lr)]
    lines: dict[str, list[Cell]] = {}
    for cell in cells:
        lines.setdefault(f"{cell.adam_lr:g}", []).append(cell)
    return [sorted(line, key=lambda cell: cell.lr) for line in lines.values()]


def relative_line(point: Point) -> list[tuple[float, float, int]]:
    """(rate over best rate, nats above the best loss, seeds) along the line of the chosen rate."""
    choice = point.choice
    if choice is None or choice.cell.lr <= 0:
        return []
    own = next(line for line in rate_lines(point.arm) if choice.cell in line)
    return [
        (cell.lr / choice.cell.lr, cell.mean_loss - choice.cell.mean_loss, cell.n)
        for cell in own
        if cell.is_eligible
    ]


def has_second_row(panels: dict[str, list[Point]]) -> bool:
    """Whether some architecture has two optimizers whose widths could be compared."""
    return any(
        sum(len(relative_line(point)) > 1 for point in points) > 1 for points in panels.values()
    )


def rise_limits(panels: dict[str, list[Point]]) -> tuple[float, float]:
    """Limits of the axis of nats above the best, which all panels share."""
    rises = [rise for points in panels.values() for p in points for _, rise, _ in relative_line(p)]
    shown = [rise for rise in rises if rise <= MAX_RISE_NATS]
    high = max([TOLERANCE_NATS, *shown])
    return min([0.0, *shown]) - 0.08 * high, 1.12 * high


def ratio_ticks(low: float, high: float) -> tuple[float, ...]:
    """Ratios to write at an axis of rates over the best rate; some may lie outside."""
    if high > 100 * low:
        return DECADES
    return RATIOS if high > 10 * low else CLOSE_RATIOS


def draw_relative(
    axes: Axes, points: list[Point], palette: Palette, limits: tuple[float, float]
) -> None:
    """One panel: every optimizer of an architecture, each line with its minimum at (1, 0)."""
    axes.set_ylim(*limits)
    axes.set_xscale("log")
    ratios = [1.0]
    for point in points:
        line = relative_line(point)
        if not line:
            continue
        look = palette.look(point.arm)
        x, rise, seeds = (np.array(values, dtype=float) for values in zip(*line, strict=True))
        ratios += [float(value) for value in x]
        shown = np.where(rise <= MAX_RISE_NATS, rise, math.nan)
        axes.plot(x, shown, color=look.color, linestyle=look.line, linewidth=1.2)
        for is_single in (False, True):
            own = (seeds == 1) == is_single
            axes.plot(
                x[own],
                shown[own],
                look.mark,
                color=look.color,
                markersize=3.5,
                markerfacecolor="white" if is_single else look.color,
            )
    axes.axhline(TOLERANCE_NATS, color=FAINT, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    axes.set_xlim(min(ratios) / 1.4, max(ratios) * 1.4)
    low, high = axes.get_xlim()
    ticks = [ratio for ratio in ratio_ticks(low, high) if low <= ratio <= high]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
