"""A sweep's answer as numbers: the one computation that tables, figures, claims and pages share."""

import math
from dataclasses import dataclass

import numpy as np

from analysis.arms import Arm, build_arms
from analysis.choice import Choice, choose
from analysis.comparison import Comparison, compare_arms
from analysis.front import Hypervolume, Point, common_seeds, front_area, resampled_front
from analysis.load import Sweep
from analysis.naming import describe_arms, shared_facts
from analysis.pareto import front_mask
from analysis.routing import RoutingDelta, routing_deltas
from analysis.standings import standings
from analysis.stats import Array, mean_interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What the analysis was told beforehand; stored with its claims.

    Attributes:
        baseline: `arm_id` that others are compared with; a softmax arm by default, else the first.
        margin_nats: difference in loss that is too small to matter in practice.
        reference_loss_nats: loss that the hypervolume is measured up to; by default the unigram
            cross-entropy, else the loss at initialisation: facts of the data, not of the results.
        published: `PATH#TABLE` of published numbers to stand beside the arms.
        title: title of the report; made from the sweep's name by default.
        context: further rows of the provenance table.
    """

    baseline: str | None = None
    margin_nats: float = 0.01
    reference_loss_nats: float | None = None
    published: str | None = None
    title: str | None = None
    context: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.margin_nats) and self.margin_nats > 0):
            raise ValueError(f"margin_nats={self.margin_nats} must be a positive number of nats")


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparable:
    """One comparison: arms that share budget, data and device.

    Attributes:
        name: what sets it apart, such as `seq_len=4096`; empty for the only one.
        facts: what all its arms share, for a subtitle.
        points: every arm, in house order.
        baseline: the arm that the others are compared with; none without any result.
        comparison: differences to the baseline.
        hypervolume: none without a front or a reference.
        front_seeds: seeds behind the front's probabilities and per-seed fronts.
        against_best: arm id to one of `standings.STANDINGS`: its loss beside the smallest of all.
        routing: arms with cross-layer routing beside their twins without.
        unigram_loss_nats: cross-entropy of the data under unigrams; NaN where unknown.
    """

    name: str
    facts: str
    points: tuple[Point, ...]
    baseline: Arm | None
    comparison: Comparison | None
    hypervolume: Hypervolume | None
    front_seeds: tuple[int, ...]
    against_best: dict[str, str]
    routing: tuple[RoutingDelta, ...]
    unigram_loss_nats: float

    @property
    def front(self) -> tuple[Point, ...]:
        """Members of the front, fastest first."""
        return tuple(sorted((p for p in self.points if p.on_front), key=lambda p: -p.speed))

    @property
    def has_losses(self) -> bool:
        """Whether any replicate trained to an end, finite or not."""
        return any(point.arm.num_ended for point in self.points)

    @property
    def drawn(self) -> tuple[Point, ...]:
        """Points that take part in the front."""
        return tuple(point for point in self.points if not point.left_out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """Everything a report says, as numbers.

    Attributes:
        sweep: the records.
        settings: what was decided beforehand.
        comparables: one per group of the sweep.
    """

    sweep: Sweep
    settings: Settings
    comparables: tuple[Comparable, ...]

    @property
    def title(self) -> str:
        """Title of the report."""
        return " ".join((self.settings.title or f"Sweep {self.sweep.name}").split())

    @property
    def points(self) -> tuple[Point, ...]:
        """Every arm of every comparison."""
        return tuple(point for part in self.comparables for point in part.points)


def analyse(
    sweep: Sweep, settings: Settings | None = None, rng: np.random.Generator | None = None
) -> Study:
    """Computes the study of a sweep.

    Args:
        sweep: checked records.
        settings: what was decided beforehand.
        rng: draws seeds where more than `MAX_EXACT_SEEDS` are common, a fixed Philox stream by
            default, so that a report is the same every time; otherwise unused.

    Raises:
        ValueError: `settings.baseline` is no arm of the sweep.
    """
    settings = settings or Settings()
    rng = rng or np.random.Generator(np.random.Philox(key=0))
    known = set(sweep.trials["arm_id"])
    if settings.baseline is not None and settings.baseline not in known:
        raise ValueError(
            f"baseline={settings.baseline!r} is no arm of this sweep; its arms are "
            f"{', '.join(sorted(known))}"
        )
    parts = tuple(_comparable(sweep, group, settings, rng) for group in sweep.groups)
    return Study(sweep=sweep, settings=settings, comparables=parts)


def _comparable(
    sweep: Sweep, group: str, settings: Settings, rng: np.random.Generator
) -> Comparable:
    trials = sweep.trials[sweep.trials["group"] == group]
    arms = build_arms(trials)
    choices = {arm.arm_id: choose(arm) for arm in arms}
    reasons = {arm.arm_id: _left_out(arm, choices[arm.arm_id]) for arm in arms}
    taking_part = [arm for arm in arms if not reasons[arm.arm_id]]
    cells = [c.cell for arm in taking_part if (c := choices[arm.arm_id])]
    members = front_mask(np.array([(cell.mean_speed, cell.mean_loss) for cell in cells]))
    on_front = {cell.arm_id: bool(member) for cell, member in zip(cells, members, strict=True)}
    seeds = common_seeds(taking_part, choices)
    shares = resampled_front(taking_part, choices, seeds, rng)
    points = tuple(
        _point(
            arm,
            choices[arm.arm_id],
            reasons[arm.arm_id],
            on_front=on_front.get(arm.arm_id, False),
            probability=shares.get(arm.arm_id),
        )
        for arm in arms
    )
    baseline = _baseline(arms, choices, settings.baseline)
    pairs = [(arm, choice.cell) for arm in arms if (choice := choices[arm.arm_id])]
    fixed = sweep.fixed_seeds
    margin = settings.margin_nats
    unigram = _only_value(trials["unigram_loss_nats"].to_numpy(dtype=float))
    return Comparable(
        name=group,
        facts=shared_facts(describe_arms(trials)),
        points=points,
        baseline=baseline,
        comparison=compare_arms(pairs, baseline, margin, fixed) if baseline else None,
        hypervolume=front_area(points, seeds, _reference(settings, unigram, trials)),
        front_seeds=seeds,
        against_best=standings(points, margin, fixed),
        routing=routing_deltas(points, margin, fixed),
        unigram_loss_nats=unigram,
    )


def _only_value(values: Array) -> float:
    finite = np.unique(values[np.isfinite(values)])
    return float(finite[0]) if len(finite) == 1 else math.nan


def _left_out(arm: Arm, choice: Choice | None) -> str:
    if choice is None:
        if arm.num_diverged:
            return f"{arm.num_diverged} of {arm.num_ended} replicates diverged, in every cell some"
        return "no replicate has a final loss yet"
    if math.isnan(choice.cell.mean_speed):
        return "speed not measured yet at the chosen rate"
    return ""


def _point(
    arm: Arm, choice: Choice | None, left_out: str, *, on_front: bool, probability: float | None
) -> Point:
    empty = np.empty(0)
    losses = choice.cell.losses if choice else empty
    speeds = choice.cell.speeds if choice else empty
    return Point(
        arm=arm,
        choice=choice,
        loss=choice.cell.mean_loss if choice else math.nan,
        loss_interval=mean_interval(losses),
        speed=choice.cell.mean_speed if choice else math.nan,
        speed_interval=mean_interval(speeds[np.isfinite(speeds)]),
        on_front=on_front,
        front_probability=probability,
        left_out=left_out,
    )


def _baseline(
    arms: tuple[Arm, ...], choices: dict[str, Choice | None], wanted: str | None
) -> Arm | None:
    """The arm asked for; else the first softmax arm with a result, else the first with one."""
    named = [arm for arm in arms if arm.arm_id == wanted and choices[arm.arm_id]]
    usable = [arm for arm in arms if choices[arm.arm_id]]
    softmax = [arm for arm in usable if arm.fact("mixer") == "softmax"]
    return next(iter([*named, *softmax, *usable]), None)


def _reference(settings: Settings, unigram: float, trials: object) -> float | None:
    if settings.reference_loss_nats is not None:
        return settings.reference_loss_nats
    return unigram if math.isfinite(unigram) else None
