"""Where labels go, so that none covers another, a mark or the frame.

Greedy with repair: each label tries places on rings round its point, the most crowded label first,
and takes the cheapest; then each may move again with the others in place. Coordinates are pixels,
boxes are rows (left, bottom, right, top).
"""

import math

import numpy as np
import numpy.typing as npt

from analysis.stats import Array

RINGS = (0.35, 1.0, 1.8, 2.8, 4.0, 5.5, 7.5, 10.0)
"""Distances from the point to the label's box, in label heights."""

DIRECTIONS = 16
REPAIRS = 3

COST_LABEL = 50.0
COST_OBSTACLE = 8.0
COST_OUTSIDE = 100.0
"""Per share of the label's area that is covered; a ring further out costs 1 per label height."""

COST_STRANGER = 3.0
"""For a place that is nearer to another label's point than to its own."""


def place_labels(
    anchors: Array, sizes: Array, obstacles: Array, bounds: tuple[float, float, float, float]
) -> Array:
    """Boxes [n, 4] for the labels.

    Args:
        anchors: [n, 2], the points that are labelled.
        sizes: [n, 2], width and height of each label.
        obstacles: [m, 4], boxes that labels should not cover.
        bounds: the box that labels must stay in.
    """
    n = len(anchors)
    if n == 0:
        return np.empty((0, 4))
    candidates = []
    for i in range(n):
        boxes, costs = _candidates(anchors[i], sizes[i])
        candidates.append((_moved_inside(boxes, bounds), costs))
    fixed = [
        _fixed_cost(boxes, costs, obstacles, bounds)
        + COST_STRANGER * is_nearer_to_another(boxes, anchors, i)
        for i, (boxes, costs) in enumerate(candidates)
    ]
    placed = np.full((n, 4), np.nan)
    order = _by_crowding(anchors, sizes)
    for _ in range(1 + REPAIRS):
        before = placed.copy()
        for index in order:
            boxes, _ = candidates[index]
            others = np.delete(placed, index, axis=0)
            others = others[np.isfinite(others).all(axis=1)]
            cost = fixed[index] + COST_LABEL * _covered(boxes, others)
            placed[index] = boxes[int(np.argmin(cost))]
        if np.array_equal(before, placed):
            break
    return placed


def distance_to_boxes(boxes: Array, points: Array) -> Array:
    """[boxes, points], the distance from each box's nearest edge; 0 inside."""
    low, high = boxes[:, None, :2], boxes[:, None, 2:]
    gap = np.maximum(np.maximum(low - points[None], points[None] - high), 0)
    return np.asarray(np.hypot(gap[..., 0], gap[..., 1]))


def is_nearer_to_another(boxes: Array, anchors: Array, own: int) -> npt.NDArray[np.bool_]:
    """For each box whether some other anchor is as near to it as anchor `own` is."""
    if len(anchors) < 2:
        return np.zeros(len(boxes), dtype=bool)
    distances = distance_to_boxes(boxes, anchors)
    return np.asarray(np.delete(distances, own, axis=1).min(axis=1) <= distances[:, own])


def _by_crowding(anchors: Array, sizes: Array) -> list[int]:
    """Indices, those with the most neighbours within a label's reach first."""
    reach = sizes.mean(axis=0) * np.array([1.0, 2.0])
    gaps = np.abs(anchors[:, None, :] - anchors[None, :, :])
    neighbours = (gaps < reach).all(axis=2).sum(axis=1)
    return [int(index) for index in np.argsort(-neighbours, kind="stable")]


def _candidates(anchor: Array, size: Array) -> tuple[Array, Array]:
    """Boxes round a point and what their distance costs."""
    boxes, costs = [], []
    height = size[1]
    for ring in RINGS:
        for step in range(DIRECTIONS):
            angle = 2 * math.pi * step / DIRECTIONS
            cosine, sine = math.cos(angle), math.sin(angle)
            # The box touches the ring with the side that faces the point, so that a label to the
            # right begins there and one above is centred.
            x = anchor[0] + ring * height * cosine + cosine * size[0] / 2
            y = anchor[1] + ring * height * sine + sine * size[1] / 2
            boxes.append((x - size[0] / 2, y - height / 2, x + size[0] / 2, y + height / 2))
            # To the right is where a reader looks first, then above and below, then left.
            costs.append(ring + 0.15 * (1 - cosine))
    return np.array(boxes), np.array(costs)


def _moved_inside(boxes: Array, bounds: tuple[float, float, float, float]) -> Array:
    """The boxes, those that reach over an edge moved back by as much; for boxes that fit at all."""
    frame = np.array(bounds)
    low = np.maximum(frame[:2] - boxes[:, :2], 0)
    high = np.maximum(boxes[:, 2:] - frame[2:], 0)
    return np.asarray(boxes + np.tile(low - high, 2))


def _fixed_cost(
    boxes: Array, costs: Array, obstacles: Array, bounds: tuple[float, float, float, float]
) -> Array:
    frame = np.array([bounds])
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    inside = _overlap(boxes, frame).sum(axis=1) / area
    return np.asarray(
        costs + COST_OBSTACLE * _covered(boxes, obstacles) + COST_OUTSIDE * (1 - inside)
    )


def _covered(boxes: Array, others: Array) -> Array:
    """For each box the number of others it touches plus the share of its area they cover."""
    if len(others) == 0:
        return np.zeros(len(boxes))
    area = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    overlap = _overlap(boxes, others)
    return np.asarray((overlap > 0).sum(axis=1) * 0.2 + overlap.sum(axis=1) / area)


def _overlap(boxes: Array, others: Array) -> Array:
    """Shared area of each box with each of the others."""
    width = np.minimum(boxes[:, None, 2], others[None, :, 2]) - np.maximum(
        boxes[:, None, 0], others[None, :, 0]
    )
    height = np.minimum(boxes[:, None, 3], others[None, :, 3]) - np.maximum(
        boxes[:, None, 1], others[None, :, 1]
    )
    return np.asarray(np.clip(width, 0, None) * np.clip(height, 0, None))
