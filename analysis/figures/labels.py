"""Labels beside their points, laid out by `placement` in the pixels of a drawn axes."""

from dataclasses import dataclass

import numpy as np
from matplotlib import patheffects as path_effects
from matplotlib.axes import Axes

from analysis.figures.placement import is_nearer_to_another, place_labels
from analysis.figures.style import readable
from analysis.stats import Array

FONT_SIZE = 8.0
MARK_POINTS = 9.0
"""Room that a mark takes, its edge included."""

LEADER_HEIGHTS = 0.7
"""A label further than this many heights from its point gets a line to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What labels should not cover, in data coordinates.

    Attributes:
        marks: [k, 2], centres of large marks.
        dots: [k, 2], centres of small ones.
        lines: each [m, 2], corners of a line of horizontal and vertical pieces.
        corner: left, bottom, right and top of a box in fractions of the axes, such as a legend's.
    """

    marks: Array
    dots: Array
    lines: list[Array]
    corner: tuple[float, float, float, float]


def draw_labels(
    axes: Axes, texts: list[str], colors: list[str], places: Array, around: Surroundings
) -> None:
    """Writes each text near its place; the figure's layout must be final.

    Args:
        axes: where to write.
        texts: the labels.
        colors: one per text, those of their marks; darkened until they can be read.
        places: [n, 2], their points in data coordinates.
        around: what labels should not cover.
    """
    if not texts:
        return
    pixel = axes.figure.dpi / 72
    sizes = np.array([_measure(axes, text) for text in texts]) + 3 * pixel
    anchors = axes.transData.transform(places)
    obstacles = [
        _squares(axes, around.dots, 2 * pixel),
        _squares(axes, around.marks, MARK_POINTS * pixel / 2),
        *[_line_boxes(axes.transData.transform(line), pixel) for line in around.lines],
        axes.transAxes.transform(np.reshape(around.corner, (2, 2))).reshape(1, 4),
    ]
    box = axes.get_window_extent()
    boxes = place_labels(
        anchors, sizes, np.concatenate(obstacles), (box.x0, box.y0, box.x1, box.y1)
    )
    to_axes = axes.transAxes.inverted()
    halo = [path_effects.withStroke(linewidth=2.5, foreground="white", alpha=0.85)]
    for index, (text, color, anchor, size, rectangle) in enumerate(
        zip(texts, colors, anchors, sizes, boxes, strict=True)
    ):
        center = np.array([(rectangle[0] + rectangle[2]) / 2, (rectangle[1] + rectangle[3]) / 2])
        nearest = np.clip(anchor, rectangle[:2], rectangle[2:])
        is_far = np.hypot(*(nearest - anchor)) > LEADER_HEIGHTS * size[1]
        if is_far or is_nearer_to_another(rectangle[None], anchors, index)[0]:
            ends = to_axes.transform(np.array([anchor, nearest]))
            axes.plot(
                ends[:, 0],
                ends[:, 1],
                transform=axes.transAxes,
                color=color,
                linewidth=0.7,
                zorder=2,
            )
        x, y = to_axes.transform(center)
        axes.text(
            x,
            y,
            text,
            transform=axes.transAxes,
            ha="center",
            va="center",
            fontsize=FONT_SIZE,
            color=readable(color),
            zorder=4,
            in_layout=False,
            path_effects=halo,
        )


def _measure(axes: Axes, text: str) -> tuple[float, float]:
    artist = axes.text(0, 0, text, fontsize=FONT_SIZE)
    extent = artist.get_window_extent()
    artist.remove()
    return extent.width, extent.height


def _squares(axes: Axes, points: Array, half: float) -> Array:
    pixels = axes.transData.transform(points.reshape(-1, 2))
    return np.column_stack([pixels - half, pixels + half])


def _line_boxes(corners: Array, half: float) -> Array:
    """One thin box per horizontal or vertical piece of a staircase."""
    if len(corners) < 2:
        return np.empty((0, 4))
    low = np.minimum(corners[:-1], corners[1:]) - half
    high = np.maximum(corners[:-1], corners[1:]) + half
    return np.column_stack([low, high])
