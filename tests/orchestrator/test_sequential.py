"""Intervals under repeated looks: their formula, and the error rate that they promise."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from orchestrator.sequential import PRIOR_SD, anytime_interval, half_width_sds


def likelihood_ratio(n, t):
    """The mixture by its definition: noncentral t densities over the prior of the effect."""

    def weighted(effect):
        density = stats.nct.pdf(t, n - 1, effect * math.sqrt(n))
        return density * stats.norm.pdf(effect, scale=PRIOR_SD)

    mixed, _ = integrate.quad(weighted, -30, 30, limit=400, points=[t / math.sqrt(n)])
    return mixed / stats.t.pdf(t, n - 1)


@pytest.mark.parametrize("n", [4, 6, 10])
def test_at_the_end_of_the_interval_the_mixture_reaches_one_over_alpha(n):
    t = half_width_sds(n, 0.05) * math.sqrt(n)
    assert likelihood_ratio(n, t) == pytest.approx(20, rel=1e-4)


def missed(noise, alpha, first=2):
    """Share of sequences whose interval misses zero at some look."""
    n = np.arange(1, noise.shape[1] + 1)
    mean = np.cumsum(noise, axis=1) / n
    squares = np.cumsum(noise**2, axis=1) - n * mean**2
    sd = np.sqrt(squares[:, 1:] / (n[1:] - 1))
    widths = np.array([half_width_sds(int(k), alpha) for k in n[1:]])
    with np.errstate(invalid="ignore"):
        outside = np.abs(mean[:, 1:]) > widths * sd
    return outside[:, first - 2 :].any(axis=1).mean()


def test_the_truth_is_missed_at_any_of_many_looks_no_more_often_than_promised():
    noise = np.random.Generator(np.random.PCG64(1)).standard_normal((20_000, 64))
    for alpha in (0.05, 0.2):
        # Three standard errors of the simulation above the promise would be a fault.
        assert missed(noise, alpha) < alpha + 3 * math.sqrt(alpha / 20_000)
    assert missed(noise, 0.05) > 0.01  # nor is it so wide that it says nothing


def test_heavy_tails_do_not_break_the_promise():
    noise = np.random.Generator(np.random.PCG64(2)).standard_t(5, (20_000, 32))
    assert missed(noise, 0.05) < 0.05


def test_a_t_interval_would_break_it():
    """What this is for: the usual interval, looked at from 3 to 16 pairs."""
    noise = np.random.Generator(np.random.PCG64(3)).standard_normal((5000, 16))
    n = np.arange(1, 17)
    mean = np.cumsum(noise, axis=1) / n
    sd = np.sqrt((np.cumsum(noise**2, axis=1) - n * mean**2)[:, 1:] / (n[1:] - 1))
    width = special.stdtrit(n[1:] - 1, 0.975) / np.sqrt(n[1:])
    assert (np.abs(mean[:, 1:]) > width * sd)[:, 1:].any(axis=1).mean() > 0.15


def test_more_values_narrow_the_interval_and_few_say_nothing():
    widths = [half_width_sds(n, 0.05) for n in range(1, 40)]
    assert widths[:2] == [math.inf, math.inf]
    assert all(a > b for a, b in itertools.pairwise(widths[2:]))
    assert half_width_sds(16, 0.05) == pytest.approx(0.97, abs=0.01)


def test_an_interval_stands_round_its_mean():
    values = [0.01, 0.03, 0.02, 0.02, 0.04]
    found = anytime_interval(values, 0.05)
    assert found.mean == pytest.approx(0.024)
    assert found.sd == pytest.approx(np.std(values, ddof=1))
    assert found.high - found.mean == pytest.approx(half_width_sds(5, 0.05) * found.sd)
    assert not found.excludes_zero
    assert found.lies_within(0.06)
    assert not found.lies_within(0.04)
    assert anytime_interval([0.0, 0.0, 0.0], 0.05).lies_within(1e-9)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_values_that_have_no_mean_are_refused(values):
    with pytest.raises(ValueError, match="finite values"):
        anytime_interval(values, 0.05)
