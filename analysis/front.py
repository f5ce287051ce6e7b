"""The front of a comparison under resampled seeds: who is on it how often, and its area."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from analysis.arms import Arm
from analysis.choice import Choice
from analysis.pareto import front_probability, hypervolume
from analysis.resampling import MAX_EXACT_SEEDS, resample_weights, sampled_weights
from analysis.stats import Array, Interval, mean_interval

SAMPLED_DRAWS = 2_000
"""Draws where the seeds are too many to enumerate: ±1.1 points on a share of one half."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """An arm at its chosen rate.

    Attributes:
        arm: the arm.
        choice: how it was chosen; none where no cell is eligible.
        loss: mean final loss in nats; NaN without a choice.
        loss_interval: its t interval; none below two seeds.
        speed: mean tokens per second; NaN where not measured.
        speed_interval: its t interval; none below two measured seeds.
        on_front: whether no other arm is as good on both axes and better on one.
        front_probability: share of seed draws, rates chosen anew in each, that put it on the
            front; none where it takes no part or fewer than two seeds are common.
        left_out: why it has no place on the front; empty where it takes part.
    """

    arm: Arm
    choice: Choice | None
    loss: float
    loss_interval: Interval | None
    speed: float
    speed_interval: Interval | None
    on_front: bool
    front_probability: float | None
    left_out: str

    @property
    def n(self) -> int:
        """Seeds of the chosen cell."""
        return self.choice.cell.n if self.choice else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Hypervolume:
    """Area that the front dominates, in nats × tokens per second.

    Attributes:
        reference_loss_nats: loss up to which it counts; the other corner is a throughput of 0.
        of_means: of the arms' means.
        per_seed: mean over seeds of each seed's own area, with t interval; none below two seeds.
    """

    reference_loss_nats: float
    of_means: float
    per_seed: Interval | None


def measured_seeds(choice: Choice) -> tuple[int, ...]:
    """Seeds of the chosen cell that have both a loss and a speed."""
    known = np.isfinite(choice.cell.speeds)
    return tuple(seed for seed, has in zip(choice.cell.seeds, known, strict=True) if has)


def common_seeds(arms: list[Arm], choices: dict[str, Choice | None]) -> tuple[int, ...]:
    """The seeds that most arms have complete; of equally frequent sets the largest."""
    sets = Counter(measured_seeds(c) for arm in arms if (c := choices[arm.arm_id]))
    if not sets:
        return ()
    return max(sets, key=lambda seeds: (sets[seeds], len(seeds), seeds))


def resampled_front(
    arms: list[Arm],
    choices: dict[str, Choice | None],
    seeds: tuple[int, ...],
    rng: np.random.Generator,
) -> dict[str, float]:
    """Share of seed draws with each arm on the front, its rate chosen anew in every draw.

    Arms that lack one of `seeds` take no part: drawn seeds must be the same for all.
    """
    n = len(seeds)
    if n < 2:
        return {}
    exact = n <= MAX_EXACT_SEEDS
    weights, chances = resample_weights(n) if exact else sampled_weights(n, SAMPLED_DRAWS, rng)
    names, losses, speeds = [], [], []
    for arm in arms:
        choice = choices[arm.arm_id]
        if choice is None or not set(seeds) <= set(measured_seeds(choice)):
            continue
        loss, speed = _draw_arm(arm, seeds, weights)
        names.append(arm.arm_id)
        losses.append(loss)
        speeds.append(speed)
    shares = front_probability(np.column_stack(speeds), np.column_stack(losses), chances)
    return dict(zip(names, (float(share) for share in shares), strict=True))


def _draw_arm(arm: Arm, seeds: tuple[int, ...], weights: Array) -> tuple[Array, Array]:
    """Loss and speed of `arm` in every draw, at the rate that is best in that draw."""
    losses, speeds = [], []
    for cell in arm.cells:
        if not cell.is_eligible or not set(seeds) <= set(cell.seeds):
            continue
        speed = cell.at(seeds, cell.speeds)
        if np.isfinite(speed).all():
            losses.append(cell.at(seeds, cell.losses))
            speeds.append(speed)
    loss_means = weights @ np.array(losses).T / len(seeds)
    speed_means = weights @ np.array(speeds).T / len(seeds)
    best = loss_means.argmin(axis=1)
    rows = np.arange(len(weights))
    return loss_means[rows, best], speed_means[rows, best]


def front_area(
    points: tuple[Point, ...], seeds: tuple[int, ...], reference: float | None
) -> Hypervolume | None:
    """The area under the front of `points`; none without a front or a reference loss."""
    drawn = [point for point in points if not point.left_out]
    if reference is None or not drawn:
        return None
    corner = (0.0, reference)
    means = np.array([(point.speed, point.loss) for point in drawn])
    areas = [hypervolume(rows, corner) for rows in seed_points(points, seeds)]
    return Hypervolume(
        reference_loss_nats=reference,
        of_means=hypervolume(means, corner),
        per_seed=mean_interval(np.array(areas)),
    )


def seed_points(points: tuple[Point, ...], seeds: tuple[int, ...]) -> list[Array]:
    """For each seed the (speed, loss) of every arm that has all of `seeds`."""
    cells = [
        point.choice.cell
        for point in points
        if point.choice and not point.left_out and set(seeds) <= set(measured_seeds(point.choice))
    ]
    if not seeds or not cells:
        return []
    speeds = np.array([cell.at(seeds, cell.speeds) for cell in cells])
    losses = np.array([cell.at(seeds, cell.losses) for cell in cells])
    return [np.column_stack([speeds[:, i], losses[:, i]]) for i in range(len(seeds))]
