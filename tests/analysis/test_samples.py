"""Rates, resampled means, trimmed means and sizes of samples."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from analysis import samples


@pytest.mark.parametrize(
    ("k", "n", "wilson", "exact"),
    [
        (0, 3, (0, 0.5615), (0, 0.7076)),
        (1, 3, (0.0615, 0.7923), (0.0084, 0.9057)),
        (0, 5, (0, 0.4345), (0, 0.5218)),
        (1, 5, (0.0362, 0.6245), (0.0051, 0.7164)),
        (3, 3, (0.4385, 1), (0.2924, 1)),
    ],
)
def test_rate_intervals_are_the_tabled_ones_and_scipys(k, n, wilson, exact):
    assert samples.rate_interval(k, n) == pytest.approx(wilson, abs=5e-5)
    assert samples.rate_interval(k, n, "exact") == pytest.approx(exact, abs=5e-5)
    for method in ("wilson", "exact"):
        truth = scipy_stats.binomtest(k, n).proportion_ci(0.95, method=method)
        assert samples.rate_interval(k, n, method) == pytest.approx((truth.low, truth.high))


def test_rates_outside_their_range_are_refused():
    with pytest.raises(ValueError, match="k=4 of n=3 is no rate"):
        samples.rate_interval(4, 3)


def test_the_exact_bootstrap_of_three_values():
    x = np.array([3.41, 3.40, 3.45])
    assert samples.bootstrap_standard_error(x, is_corrected=False) == pytest.approx(
        0.0124722, abs=1e-7
    )
    assert samples.bootstrap_standard_error(x) == pytest.approx(x.std(ddof=1) / math.sqrt(3))
    # Each extreme has a chance of 1/27, more than a tail of 2.5 %.
    assert samples.percentile_interval(x) == pytest.approx((3.40, 3.45))


def test_percentile_intervals_are_too_narrow_at_three_seeds():
    rng = np.random.default_rng(3)
    hits = [
        low <= 0 <= high
        for low, high in map(samples.percentile_interval, rng.normal(size=(2000, 3)))
    ]
    # At n = 3 the interval is the range; it covers with probability 0.69 to 0.75 on normal noise.
    assert 0.65 < np.mean(hits) < 0.79


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 1, 4, 9], 2.5),
        ([0, 1, 4, 9, 16], 4.6667),
        ([i**2 for i in range(10)], 23.1667),
        ([3, 1, 2], 2.0),
        ([[1, 2], [2, 2], [1, 1], [2, 1]], 1.5),
        ([[1, 1], [2, 2], [3, 3]], 2.0),
    ],
)
def test_interquartile_means(values, expected):
    array = np.array(values, dtype=float)
    assert samples.interquartile_mean(array) == pytest.approx(expected, abs=5e-5)
    assert samples.interquartile_mean(array) == pytest.approx(
        scipy_stats.trim_mean(array, 0.25, axis=None)
    )


def test_probability_of_improvement_and_optimality_gap():
    x = np.array([[1, 2], [2, 2], [1, 1], [2, 1]], dtype=float)
    y = np.array([[1, 1], [2, 2], [3, 3]], dtype=float)
    assert samples.probability_of_improvement(x, y) == pytest.approx(1 / 3)
    assert samples.optimality_gap(np.array([0.5, 2.0])) == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("n", "radius"), [(3, 16.31), (4, 3.775), (5, 2.257), (6, 1.701), (8, 1.225), (10, 1.002)]
)
def test_joint_regions_are_useless_below_five_seeds(n, radius):
    assert samples.hotelling_radius(n) == pytest.approx(radius, rel=5e-4)


def test_divergence_costs_as_much_as_not_training():
    values = np.array([2.0, math.nan, math.inf, 9.0])
    ceiling = math.log(256)
    assert samples.clipped_total(values, ceiling) == pytest.approx([2.0, *[5.545177] * 3])


def test_seeds_needed_by_both_approximations():
    assert samples.seeds_needed_normal(1.0, 1.0, is_paired=True) == pytest.approx(7.84888, abs=1e-5)
    needed = samples.seeds_needed_normal(0.0013, 0.003, is_paired=False)
    assert needed == pytest.approx(2.95, abs=0.005)
    n = samples.seeds_needed(0.0013, 0.003, is_paired=False)
    assert n is not None
    assert n > 3
    assert samples.power_of_t(0.0013, 0.003, n, is_paired=False) >= 0.8
    assert samples.power_of_t(0.0013, 0.003, n - 1, is_paired=False) < 0.8


def test_power_is_what_simulation_shows():
    rng = np.random.default_rng(11)
    differences = rng.normal(0.8, 1.0, size=(4000, 10))
    t = differences.mean(axis=1) / differences.std(axis=1, ddof=1) * math.sqrt(10)
    seen = np.mean(t > scipy_stats.t.ppf(0.975, 9))
    # Four standard errors of a share of 0.6 over 4,000 draws are 0.031.
    assert samples.power_of_t(1.0, 0.8, 10, is_paired=True) == pytest.approx(seen, abs=0.031)


def test_the_smallest_detectable_difference_has_power_80_percent():
    difference = samples.smallest_detectable_difference(0.02, 4)
    assert samples.power_of_t(0.02, difference, 4, is_paired=True) == pytest.approx(0.8, abs=1e-6)
    pooled = samples.smallest_detectable_difference(0.02, 4, df=12)
    assert pooled < difference


def test_seeds_beyond_reach_are_none():
    assert samples.seeds_needed(1.0, 0.001, is_paired=True) is None
