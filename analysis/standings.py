"""Each arm beside the one with the smallest mean loss, which the same data has picked.

The smallest of many means is small by luck too. Testing every other arm against it as if it had
been named beforehand calls one of ten equal arms worse in 12 % of sweeps, one of eighteen in 19 %,
where 5 % are promised (3 to 5 seeds, normal noise). So each test is corrected for every pair that
might have turned out as this one: all pairs of the arms not yet shown to be worse.
"""

import numpy as np

from analysis.comparison import compare_arms
from analysis.front import Point
from analysis.stats import SIGNIFICANCE, Array

STANDINGS = ("best", "tied", "worse", "not tested")
"""An arm's loss beside the smallest: `tied` where a test against it, corrected over all pairs of
arms, shows no difference; `not tested` where too few seeds are common."""


def standings(
    points: tuple[Point, ...], margin_nats: float, fixed_seeds: frozenset[int] | None = None
) -> dict[str, str]:
    """Arm id to one of `STANDINGS`; arms without a loss have none.

    Args:
        points: every arm.
        margin_nats: difference that is too small to matter; decides nothing here.
        fixed_seeds: seeds that were not added after looking; all by default.
    """
    pairs = [(point.arm, point.choice.cell) for point in points if point.choice]
    if not pairs:
        return {}
    best, _ = min(pairs, key=lambda pair: pair[1].mean_loss)
    comparison = compare_arms(pairs, best, margin_nats, fixed_seeds)
    rows = comparison.rows if comparison else ()
    tested = [(row.arm.arm_id, row.loss.p) for row in rows if row.loss]
    adjusted = beside_smallest(np.array([p for _, p in tested]))
    found = {best.arm_id: "best"} | {row.arm.arm_id: "not tested" for row in rows}
    for (arm_id, _), p in zip(tested, adjusted, strict=True):
        found[arm_id] = "worse" if p < SIGNIFICANCE else "tied"
    return found


def beside_smallest(p_values: Array) -> Array:
    """Adjusted p values of every other mean against the smallest, in the order given.

    Step by step from the smallest p value, each is multiplied by the number of pairs among the
    means that are left, the smallest included.
    """
    m = len(p_values)
    order = np.argsort(p_values, kind="stable")
    left = m + 1 - np.arange(m)
    scaled = np.maximum.accumulate(p_values[order] * left * (left - 1) / 2)
    adjusted = np.empty(m)
    adjusted[order] = np.minimum(scaled, 1.0)
    return adjusted
