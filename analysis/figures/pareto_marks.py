"""The marks of one arm on the front's figure: its mean, seeds, doubt, and what choosing hid."""

import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Polygon

from analysis.arms import Cell
from analysis.figures.pareto_parts import has_ellipse, held_out_shift, is_faded, seed_cloud
from analysis.figures.style import FAINT, INK, Look, Palette
from analysis.front import Point
from analysis.samples import joint_region
from analysis.wording import BAR_SEEDS


def draw_other_rates(axes: Axes, drawn: tuple[Point, ...], palette: Palette) -> None:
    """Ghosts of the rates that were not chosen: the arm's own mark, small and grey."""
    for point in drawn:
        others = other_cells(point)
        if not others:
            continue
        axes.plot(
            [cell.mean_speed for cell in others],
            [cell.mean_loss for cell in others],
            palette.look(point.arm).mark,
            color=FAINT,
            markersize=3.5,
            markeredgewidth=0,
            alpha=0.45,
            zorder=1.5,
        )


def other_cells(point: Point) -> list[Cell]:
    """Cells of the arm beside the chosen one that have a place in the figure."""
    if point.choice is None:
        return []
    chosen = point.choice.cell.cell_id
    return [
        cell
        for cell in point.arm.cells
        if cell.cell_id != chosen and cell.is_eligible and math.isfinite(cell.mean_speed)
    ]


def draw_point(axes: Axes, point: Point, palette: Palette) -> None:
    """Mean, seeds, intervals, joint region and held-out ghost of one arm."""
    look = palette.look(point.arm)
    alpha = 0.4 if is_faded(point) else 1.0
    axes.scatter(*seed_cloud(point), s=11, color=look.color, alpha=0.45 * alpha, linewidth=0)
    _draw_bars(axes, point, look, alpha)
    if has_ellipse(point):
        _draw_region(axes, point, look, alpha)
    shift = held_out_shift(point)
    if shift is not None:
        axes.plot(
            [point.speed, point.speed],
            [point.loss, point.loss + shift],
            color=look.color,
            linestyle=(0, (1, 1.5)),
            linewidth=1.1,
            alpha=alpha,
            zorder=2.6,
        )
        axes.plot(point.speed, point.loss + shift, "_", color=look.color, markersize=8, alpha=alpha)
    axes.plot(
        point.speed,
        point.loss,
        look.mark,
        markersize=7,
        # Hollow says one seed and nothing else.
        markerfacecolor="white" if point.n == 1 else look.color,
        markeredgecolor=look.color if point.n == 1 else INK if point.on_front else "white",
        markeredgewidth=1.4 if point.n == 1 else 0.9,
        alpha=alpha,
        zorder=3,
    )


def _draw_bars(axes: Axes, point: Point, look: Look, alpha: float) -> None:
    bars: dict[str, Any] = {}
    for key, interval, mean in (
        ("xerr", point.speed_interval, point.speed),
        ("yerr", point.loss_interval, point.loss),
    ):
        if interval and interval.n >= BAR_SEEDS:
            # On a logarithmic axis a bar that would reach zero or below ends at the axis.
            low = interval.low
            if key == "xerr" and axes.get_xscale() == "log":
                low = max(low, axes.get_xlim()[0])
            bars[key] = [[mean - low], [interval.high - mean]]
    if bars:
        axes.errorbar(
            point.speed,
            point.loss,
            **bars,
            fmt="none",
            ecolor=look.color,
            elinewidth=0.9,
            alpha=0.75 * alpha,
            zorder=2.8,
        )


def _draw_region(axes: Axes, point: Point, look: Look, alpha: float) -> None:
    outline = joint_region(*seed_cloud(point))
    if axes.get_xscale() == "log":
        outline[:, 0] = np.maximum(outline[:, 0], axes.get_xlim()[0])
    region = Polygon(
        outline,
        closed=True,
        facecolor=look.color,
        edgecolor=look.color,
        linewidth=0.6,
        alpha=0.16 * alpha,
        zorder=1.8,
    )
    axes.add_patch(region)
