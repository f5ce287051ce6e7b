"""Arms beside the smallest mean, which the same data has picked."""

import numpy as np
import pytest

from analysis.standings import beside_smallest
from analysis.stats import blocked_anova, blocked_difference, holm


def test_each_step_counts_the_pairs_that_are_left():
    # Four means: six pairs at first, three among the three that are left, then one.
    p_values = np.array([0.02, 0.001, 0.3])
    assert beside_smallest(p_values) == pytest.approx([0.06, 0.006, 0.3])
    assert beside_smallest(np.array([0.02])) == pytest.approx([0.02])
    assert beside_smallest(np.array([0.01, 0.0101, 0.9])) == pytest.approx([0.06, 0.06, 0.9])
    assert len(beside_smallest(np.array([]))) == 0


@pytest.mark.parametrize("worse", [0, 5], ids=["all equal", "half are far worse"])
def test_equal_arms_are_rarely_called_worse_than_the_luckiest(worse):
    rng = np.random.default_rng(3)
    arms, seeds, sweeps = 10, 3, 1000
    wrong, wrong_by_holm = 0, 0
    for _ in range(sweeps):
        losses = rng.normal(size=(arms, seeds))
        losses[arms - worse :] += 50.0
        anova = blocked_anova(losses)
        means = losses.mean(axis=1)
        others = np.delete(np.arange(arms), means.argmin())
        p = np.array([blocked_difference(anova, means[i] - means.min()).p for i in others])
        equal = others < arms - worse
        wrong += (beside_smallest(p)[equal] < 0.05).any()
        wrong_by_holm += (holm(p)[equal] < 0.05).any()
    assert wrong / sweeps < 0.05
    # As if the smallest had been named beforehand.
    assert wrong_by_holm / sweeps > 0.06
