"""Fronts in two dimensions: dominance, staircases, hypervolume, attainment.

Points are rows (x, y); `maximise` says for each axis whether more is better, (True, False) for
throughput and loss. i dominates j when it is at least as good on both axes and better on one.
Exact duplicates do not dominate each other: all are kept. A point with a NaN or infinite
coordinate is on no front and removes nothing. Values that agree within `TIE` count as equal, since
means of the same numbers in another order differ in the last bit.

Attainment functions: Grunert da Fonseca, Fonseca and Hall, "Inferential performance assessment of
stochastic optimisers and the attainment function" (EMO 2001).
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from analysis.stats import Array

Mask = npt.NDArray[np.bool_]
Directions = tuple[bool, bool]

SPEED_LOSS: Directions = (True, False)
"""x is throughput, y is loss."""

TIE = 1e-9
"""Relative distance within which two values are one."""


def _as_costs(points: Array, maximise: Directions) -> Array:
    """Points with both axes turned so that less is better."""
    points = np.asarray(points, dtype=float).reshape(-1, 2)
    return points * np.where(np.array(maximise), -1.0, 1.0)


def tie_ranks(values: Array) -> npt.NDArray[np.int64]:
    """Rank of each finite value from 0; values that follow each other within `TIE` share one."""
    order = np.argsort(values, kind="stable")
    ascending = values[order]
    gaps = np.diff(ascending)
    scale = np.maximum(np.abs(ascending[:-1]), np.abs(ascending[1:]))
    ranks = np.empty(len(values), dtype=np.int64)
    ranks[order] = np.concatenate([[0], np.cumsum(gaps > TIE * scale)])[: len(values)]
    return ranks


def front_mask(points: Array, maximise: Directions = SPEED_LOSS) -> Mask:
    """Which of `points` [n, 2] no other point dominates."""
    costs = _as_costs(points, maximise)
    finite = np.isfinite(costs).all(axis=1)
    mask = np.zeros(len(costs), dtype=bool)
    if not finite.any():
        return mask
    first, second = tie_ranks(costs[finite, 0]), tie_ranks(costs[finite, 1])
    order = np.lexsort((second, first))
    kept = np.zeros(len(order), dtype=bool)
    best = np.iinfo(np.int64).max
    start = 0
    while start < len(order):
        # All points with the same first cost are judged together: only the best of them in the
        # second cost can stay, and only if it beats every point that is better in the first.
        stop = start
        while stop < len(order) and first[order[stop]] == first[order[start]]:
            stop += 1
        group = order[start:stop]
        lowest = second[group[0]]
        if lowest < best:
            kept[group[second[group] == lowest]] = True
            best = lowest
        start = stop
    mask[finite] = kept
    return mask


def front_ranks(points: Array, maximise: Directions = SPEED_LOSS) -> npt.NDArray[np.int64]:
    """0 for the front, 1 for the front without it, and so on; -1 for non-finite points."""
    points = np.asarray(points, dtype=float).reshape(-1, 2)
    ranks = np.full(len(points), -1, dtype=np.int64)
    left: Mask = np.asarray(np.isfinite(points).all(axis=1))
    rank = 0
    while left.any():
        indices = np.flatnonzero(left)
        front = indices[front_mask(points[indices], maximise)]
        ranks[front] = rank
        left[front] = False
        rank += 1
    return ranks


def near_front_mask(
    points: Array, tolerance: tuple[float, float], maximise: Directions = SPEED_LOSS
) -> Mask:
    """Points that none beats by more than `tolerance` on both axes; contains the front."""
    costs = _as_costs(points, maximise)
    finite = np.isfinite(costs).all(axis=1)
    others = costs[finite]
    mask = np.zeros(len(costs), dtype=bool)
    for index in np.flatnonzero(finite):
        beaten = (others < costs[index] - np.array(tolerance)).all(axis=1)
        mask[index] = not beaten.any()
    return mask


def staircase(points: Array, maximise: Directions = SPEED_LOSS) -> Array:
    """Corners [m, 2] of the front as a line that promises nothing nobody reached.

    It runs by ascending x, ends at the extreme members, and every corner is weakly dominated by a
    member of the front.
    """
    points = np.asarray(points, dtype=float).reshape(-1, 2)
    members = np.unique(points[front_mask(points, maximise)], axis=0)
    if len(members) == 0:
        return np.empty((0, 2))
    corners = [members[0]]
    for before, after in pairwise(members):
        # Of the two ways round the corner, the one that is worse on both axes.
        x = before[0] if maximise[0] else after[0]
        y = min(before[1], after[1]) if maximise[1] else max(before[1], after[1])
        corners += [np.array([x, y]), after]
    return np.array(corners)


def attained_loss(points: Array, throughput: float) -> float | None:
    """Smallest loss reached at `throughput` or faster; none if nothing is that fast."""
    points = np.asarray(points, dtype=float).reshape(-1, 2)
    fast = points[np.isfinite(points).all(axis=1) & (points[:, 0] >= throughput)]
    return float(fast[:, 1].min()) if len(fast) else None


def hypervolume(
    points: Array, reference: tuple[float, float], maximise: Directions = SPEED_LOSS
) -> float:
    """Area that `points` dominate up to `reference`; points on or beyond it add nothing."""
    costs = _as_costs(points, maximise)
    limit = _as_costs(np.array(reference), maximise)[0]
    if not np.isfinite(limit).all():
        raise ValueError(f"{reference=} must be finite")
    costs = costs[np.isfinite(costs).all(axis=1) & (costs < limit).all(axis=1)]
    area, ceiling = 0.0, float(limit[1])
    for first, second in costs[np.lexsort((costs[:, 1], costs[:, 0]))]:
        if second < ceiling:
            area += (float(limit[0]) - first) * (ceiling - second)
            ceiling = float(second)
    return float(area)


def hypervolume_contributions(
    points: Array, reference: tuple[float, float], maximise: Directions = SPEED_LOSS
) -> Array:
    """What the front's area would lose without each of its members; 0 for the other points.

    Dominated points don't step in for the member that is taken away.
    """
    points = np.asarray(points, dtype=float).reshape(-1, 2)
    contributions = np.zeros(len(points))
    members = np.flatnonzero(front_mask(points, maximise))
    whole = hypervolume(points, reference, maximise)
    for index in members:
        rest = points[members[members != index]]
        contributions[index] = whole - hypervolume(rest, reference, maximise)
    return contributions


def front_probability(
    x_means: Array, y_means: Array, probabilities: Array, maximise: Directions = SPEED_LOSS
) -> Array:
    """Share of seed draws in which each configuration is on the front.

    Args:
        x_means: [draws, configurations], each draw's mean over the seeds it drew, the same seeds
            for every configuration.
        y_means: the same for y.
        probabilities: [draws], adding up to 1.
        maximise: whether more is better, for x and y.

    Returns:
        [configurations], a stability frequency and not a posterior probability.
    """
    total = np.zeros(x_means.shape[1])
    for x, y, weight in zip(x_means, y_means, probabilities, strict=True):
        total += weight * front_mask(np.column_stack([x, y]), maximise)
    return np.clip(total, 0.0, 1.0)


def attainment(
    sets: Sequence[Array], point: tuple[float, float], maximise: Directions = SPEED_LOSS
) -> float:
    """Share of the seeds whose set of points reaches `point` or better on both axes."""
    if not sets:
        raise ValueError("an attainment function needs the points of at least one seed")
    target = _as_costs(np.array(point), maximise)[0]
    slack = TIE * np.abs(target)
    reached = [
        bool((_as_costs(points, maximise) <= target + slack).all(axis=1).any()) for points in sets
    ]
    return float(np.mean(reached))


def attainment_surface(
    sets: Sequence[Array], level: float, maximise: Directions = SPEED_LOSS
) -> Array:
    """Best points [m, 2], by ascending x, that at least a share `level` of the seeds reach.

    They mix coordinates of several seeds: a boundary, not runs.
    """
    if not 0 < level <= 1:
        raise ValueError(f"{level=} must lie in (0, 1]")
    needed = int(np.ceil(level * len(sets) - TIE))
    fronts = []
    for points in sets:
        costs = _as_costs(points, maximise)
        costs = costs[np.isfinite(costs).all(axis=1)]
        fronts.append(costs[np.lexsort((costs[:, 1], costs[:, 0]))])
    if needed > sum(len(front) > 0 for front in fronts):
        return np.empty((0, 2))
    firsts = np.unique(np.concatenate([front[:, 0] for front in fronts]))
    corners = []
    for limit in firsts:
        # Per seed the smallest second cost within this first cost; the needed-th smallest of
        # those is what so many seeds reach.
        reached = sorted(
            front[front[:, 0] <= limit, 1].min() if (front[:, 0] <= limit).any() else np.inf
            for front in fronts
        )
        if np.isfinite(reached[needed - 1]):
            corners.append((limit, reached[needed - 1]))
    surface = np.array(corners)
    surface = surface[front_mask(surface, (False, False))]
    surface = surface * np.where(np.array(maximise), -1.0, 1.0)
    return surface[np.argsort(surface[:, 0], kind="stable")]


def attainment_difference(
    first: Sequence[Array], second: Sequence[Array], maximise: Directions = SPEED_LOSS
) -> Array:
    """Rows (x, y, difference) at every corner: attainment of `first` minus that of `second`."""
    corners = np.unique(np.concatenate([*first, *second]), axis=0)
    rows = [
        (x, y, attainment(first, (x, y), maximise) - attainment(second, (x, y), maximise))
        for x, y in corners
    ]
    return np.array(rows)


def mean_front_level(
    sets: Sequence[Array], reference: tuple[float, float], maximise: Directions = SPEED_LOSS
) -> tuple[float, Array]:
    """Vorob'ev's mean front: the level whose surface has the average hypervolume, and the surface.

    Found by bisection over the level, since the area under a surface falls as the level rises.
    """
    target = float(np.mean([hypervolume(points, reference, maximise) for points in sets]))
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        area = hypervolume(attainment_surface(sets, middle, maximise), reference, maximise)
        if area > target:
            low = middle
        else:
            high = middle
    return high, attainment_surface(sets, high, maximise)
