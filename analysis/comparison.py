"""Every arm against a baseline, each at its own best learning rate: one family of comparisons."""

import math
from dataclasses import dataclass

import numpy as np

from analysis.anytime import AnytimeDifference, anytime_difference
from analysis.arms import Arm, Cell
from analysis.samples import seeds_needed, smallest_detectable_difference
from analysis.stats import (
    CONSTANT_SD,
    SIGNIFICANCE,
    Array,
    BlockedAnova,
    Difference,
    Interval,
    benjamini_hochberg,
    blocked_anova,
    blocked_difference,
    equivalence_p,
    f_tail,
    holm,
    log_ratio,
    paired_difference,
    welch_difference,
)

VERDICTS = ("better", "worse", "equivalent", "undecided")
"""What a row may say; each word is bound to a test, see `_verdict`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmDifference:
    """One arm against the baseline.

    Attributes:
        arm: the arm.
        loss: its loss minus the baseline's, tested; none where one side has one seed only.
        loss_gap: difference of the means over the common seeds, or of all where none is common.
        pairs: common seeds.
        is_single: whether one side has one seed only.
        simultaneous: ends of its interval with the family's correction (Bonferroni); none where not
            tested, or without a finite one.
        p_holm: Holm-adjusted p over the family; NaN where not tested.
        p_bh: Benjamini-Hochberg-adjusted p; NaN where not tested.
        p_equivalence: Holm-adjusted p of two one-sided tests against the margin; NaN if not tested.
        verdict: one of `VERDICTS`.
        speed_ratio: its speed over the baseline's; none below two common measured seeds.
    """

    arm: Arm
    loss: Difference | None
    loss_gap: float
    simultaneous: tuple[float, float] | None
    pairs: int
    is_single: bool
    p_holm: float
    p_bh: float
    p_equivalence: float
    verdict: str
    speed_ratio: Interval | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The family "each arm against the baseline".

    Attributes:
        baseline: the arm compared with.
        margin_nats: difference that is too small to matter.
        rows: one per other arm with a result.
        anova: the pooled test; none where it was not used.
        why_not_pooled: why there is none; empty where there is one.
        detectable_nats: true difference that these seeds see with power 80 %; NaN without `anova`.
        seeds_for_margin: seeds per arm to see the margin; none without `anova` or beyond reach.
    """

    baseline: Arm
    margin_nats: float
    rows: tuple[ArmDifference, ...]
    anova: BlockedAnova | None
    why_not_pooled: str
    detectable_nats: float
    seeds_for_margin: int | None


def compare_arms(
    pairs: list[tuple[Arm, Cell]],
    baseline: Arm,
    margin_nats: float,
    fixed_seeds: frozenset[int] | None = None,
) -> Comparison | None:
    """Differences of every arm to `baseline`; none where the baseline has no result.

    Args:
        pairs: each arm with its chosen cell.
        baseline: one of them.
        margin_nats: difference that is too small to matter, stated beforehand.
        fixed_seeds: seeds that were not added after looking; all by default.
    """
    chosen = {arm.arm_id: cell for arm, cell in pairs}
    if baseline.arm_id not in chosen:
        return None
    base = chosen[baseline.arm_id]
    others = [(arm, cell, base) for arm, cell in pairs if arm.arm_id != baseline.arm_id]
    rows, anova, why_not = compare_cells(others, margin_nats, fixed_seeds)
    sd = math.sqrt(2 * anova.mse) if anova else math.nan
    return Comparison(
        baseline=baseline,
        margin_nats=margin_nats,
        rows=rows,
        anova=anova,
        why_not_pooled=why_not,
        detectable_nats=(
            smallest_detectable_difference(sd, anova.num_seeds, anova.df_error)
            if anova
            else math.nan
        ),
        seeds_for_margin=seeds_needed(sd, margin_nats, is_paired=True) if anova else None,
    )


def compare_cells(
    triples: list[tuple[Arm, Cell, Cell]],
    margin_nats: float,
    fixed_seeds: frozenset[int] | None = None,
) -> tuple[tuple[ArmDifference, ...], BlockedAnova | None, str]:
    """A family of differences, each an arm's cell minus another cell.

    Args:
        triples: the arm, its cell, and the cell that it is compared with.
        margin_nats: difference that is too small to matter, stated beforehand.
        fixed_seeds: seeds that were not added after looking; all by default. Cells with others are
            compared by tests that hold at every look.

    Returns:
        A row for each triple; the pooled test of the cells that share the first comparison's
        seeds, none where it may not be used; why not.
    """
    if not triples:
        return (), None, "no other arm has a result"
    cells = {cell.cell_id: cell for _, *two in triples for cell in two}
    grown = {name for name, cell in cells.items() if _has_added_seeds(cell, fixed_seeds)}
    first = triples[0][2]
    pooled = [cell for cell in cells.values() if cell.seeds == first.seeds]
    anova, why_not = _pool(pooled) if first.cell_id not in grown else (None, ADDED_SEEDS)
    shared = {cell.cell_id for cell in pooled} if anova else set()
    tests: list[Difference | None] = []
    for _, cell, base in triples:
        ids = {cell.cell_id, base.cell_id}
        if ids & grown:
            tests.append(_anytime_test(cell, base))
        else:
            tests.append(_test(cell, base, anova if ids <= shared else None))
    adjusted = _adjust(tests, margin_nats)
    num_tests = sum(test is not None for test in tests)
    rows = tuple(
        _row(arm, cell, base, test, p_values, num_tests)
        for (arm, cell, base), test, p_values in zip(triples, tests, adjusted, strict=True)
    )
    return rows, anova, why_not


ADDED_SEEDS = "seeds were added after looking at the results"


def _has_added_seeds(cell: Cell, fixed_seeds: frozenset[int] | None) -> bool:
    return fixed_seeds is not None and not fixed_seeds.issuperset(cell.seeds)


def _anytime_test(cell: Cell, base: Cell) -> Difference | None:
    seeds = _common(cell, base)
    return anytime_difference(cell.at(seeds, cell.losses), base.at(seeds, base.losses))


def _pool(cells: list[Cell]) -> tuple[BlockedAnova | None, str]:
    """The blocked ANOVA over cells with the same seeds, or why it may not be used."""
    if len(cells) < 2:
        return None, "no other arm has the baseline's seeds"
    if cells[0].n < 2:
        return None, "one seed has no spread"
    table = np.array([cell.losses for cell in cells])
    anova = blocked_anova(table)
    if math.sqrt(anova.mse) < CONSTANT_SD:
        return None, "the arms differ by constants"
    p = equal_spread_p(table - table.mean(axis=0))
    if p < SIGNIFICANCE:
        return None, f"the arms' spreads differ (Brown-Forsythe p = {p:.2g}), so pairs stand alone"
    return anova, ""


def equal_spread_p(values: Array) -> float:
    """The p value of "all rows of `values` [arms, seeds] spread alike" (Brown and Forsythe 1974).

    1 for two seeds, where each row's distances to its median are equal and show nothing.
    """
    a, n = values.shape
    if n < 3 or a < 2:
        return 1.0
    distances = np.abs(values - np.median(values, axis=1, keepdims=True))
    means = distances.mean(axis=1, keepdims=True)
    within = float(np.sum((distances - means) ** 2)) / (a * (n - 1))
    between = n * float(np.sum((means - distances.mean()) ** 2)) / (a - 1)
    if within < CONSTANT_SD**2:
        return 1.0 if between < CONSTANT_SD**2 else 0.0
    return f_tail(between / within, a - 1, a * (n - 1))


def _common(first: Cell, second: Cell) -> tuple[int, ...]:
    return tuple(seed for seed in first.seeds if seed in second.seeds)


def _test(cell: Cell, base: Cell, anova: BlockedAnova | None) -> Difference | None:
    if anova is not None:
        return blocked_difference(anova, cell.mean_loss - base.mean_loss)
    seeds = _common(cell, base)
    if len(seeds) >= 2:
        return paired_difference(cell.at(seeds, cell.losses), base.at(seeds, base.losses))
    has_spread = any(np.ptp(c.losses) > 0 for c in (cell, base) if c.n)
    if not seeds and min(cell.n, base.n) >= 2 and has_spread:
        return welch_difference(cell.losses, base.losses)
    return None


def _adjust(tests: list[Difference | None], margin: float) -> list[tuple[float, float, float]]:
    """Holm, Benjamini-Hochberg and equivalence p of each test; NaN where there is none."""
    tested = [index for index, test in enumerate(tests) if test]
    raw = np.array([test.p for test in tests if test])
    equal = np.array([_equivalence_p(test, margin) for test in tests if test])
    result = [(math.nan, math.nan, math.nan)] * len(tests)
    for index, *p_values in zip(
        tested, holm(raw), benjamini_hochberg(raw), holm(equal), strict=True
    ):
        result[index] = (float(p_values[0]), float(p_values[1]), float(p_values[2]))
    return result


def _equivalence_p(test: Difference, margin: float) -> float:
    if isinstance(test, AnytimeDifference):
        return test.equivalence_p(margin)
    return equivalence_p(test, margin)


def _simultaneous(test: Difference | None, num_tests: int) -> tuple[float, float] | None:
    ends = test.widened(num_tests) if test else None
    return ends if ends and all(math.isfinite(end) for end in ends) else None


def _row(
    arm: Arm,
    cell: Cell,
    base: Cell,
    test: Difference | None,
    p_values: tuple[float, float, float],
    num_tests: int,
) -> ArmDifference:
    seeds = _common(cell, base)
    gap = cell.mean_loss - base.mean_loss
    if seeds:
        gap = float(np.mean(cell.at(seeds, cell.losses) - base.at(seeds, base.losses)))
    return ArmDifference(
        arm=arm,
        loss=test,
        loss_gap=gap,
        simultaneous=_simultaneous(test, num_tests),
        pairs=len(seeds),
        is_single=min(cell.n, base.n) == 1,
        p_holm=p_values[0],
        p_bh=p_values[1],
        p_equivalence=p_values[2],
        verdict=_verdict(gap, p_values[0], p_values[2]),
        speed_ratio=_speed_ratio(cell, base, seeds),
    )


def _verdict(gap: float, p_different: float, p_equivalent: float) -> str:
    """The word that the tests allow: a difference first, then equivalence, else neither."""
    if p_different < SIGNIFICANCE:
        return "better" if gap < 0 else "worse"
    if p_equivalent < SIGNIFICANCE:
        return "equivalent"
    return "undecided"


def _speed_ratio(cell: Cell, base: Cell, seeds: tuple[int, ...]) -> Interval | None:
    first, second = cell.at(seeds, cell.speeds), base.at(seeds, base.speeds)
    known = np.isfinite(first) & np.isfinite(second)
    return log_ratio(first[known], second[known])
