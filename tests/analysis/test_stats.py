"""Intervals, paired tests, pooled tests and corrections against known values and scipy."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from analysis import permutation, resampling, stats

A_PRIME = np.array([3.412, 3.405, 3.421, 3.409, 3.415])
B_PRIME = np.array([3.398, 3.394, 3.404, 3.399, 3.400])


def test_paired_difference_of_b_and_a(fixture_f):
    loss, _ = fixture_f
    result = stats.paired_difference(loss[1], loss[0])
    assert result.mean == pytest.approx(-0.015, abs=1e-12)
    assert result.t == pytest.approx(-5.196152, abs=1e-6)
    assert result.p == pytest.approx(0.013847, abs=1e-6)
    assert (result.low, result.high) == pytest.approx((-0.024187, -0.005813), abs=1e-6)


def test_paired_difference_of_e_and_a(fixture_f):
    loss, _ = fixture_f
    result = stats.paired_difference(loss[4], loss[0])
    assert result.mean == pytest.approx(0.0025, abs=1e-12)
    assert result.p == pytest.approx(0.760820, abs=1e-6)
    assert (result.low, result.high) == pytest.approx((-0.021368, 0.026368), abs=1e-6)


def test_a_constant_difference_is_named_and_has_no_astronomical_t(fixture_f):
    loss, _ = fixture_f
    result = stats.paired_difference(loss[3], loss[1])
    assert result.method == "constant difference"
    assert result.mean == pytest.approx(0.01)
    assert (result.t, result.p, result.low, result.high) == (
        math.inf,
        0.0,
        result.mean,
        result.mean,
    )


def test_equal_values_differ_by_nothing():
    result = stats.paired_difference(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
    assert (result.mean, result.t, result.p) == (0.0, 0.0, 1.0)


def test_pairing_halves_the_interval_that_welch_gives():
    paired = stats.paired_difference(A_PRIME, B_PRIME)
    welch = stats.welch_difference(A_PRIME, B_PRIME)
    assert paired.t == pytest.approx(10.4004, abs=1e-4)
    assert paired.p == pytest.approx(0.00048266, abs=1e-8)
    assert (paired.low, paired.high) == pytest.approx((0.0098228, 0.0169772), abs=1e-7)
    assert paired.effect_size == pytest.approx(4.6512, abs=1e-4)
    assert (welch.low, welch.high) == pytest.approx((0.0058226, 0.0209774), abs=1e-7)
    assert (welch.high - welch.low) / (paired.high - paired.low) == pytest.approx(2.1, abs=0.05)


def test_sign_flips_of_five_equal_signs_reach_their_smallest_p():
    assert permutation.sign_flip_p(A_PRIME - B_PRIME) == 0.0625
    assert permutation.sign_flip_p(np.array([1.0, -1.0, 2.0])) == 1.0 - 2 / 8


@pytest.mark.parametrize(
    ("n", "expected"),
    [(3, 0.25), (4, 0.125), (5, 0.0625), (6, 0.03125), (7, 0.015625), (8, 0.0078125)],
)
def test_smallest_p_of_paired_permutations(n, expected):
    assert permutation.smallest_paired_p(n) == expected


def test_smallest_p_of_unpaired_ranks():
    values = [permutation.smallest_unpaired_p(n) for n in (3, 4, 5)]
    assert values == pytest.approx([0.1, 0.0286, 0.0079], abs=5e-5)


def test_blocked_anova_of_the_fixture(fixture_f):
    anova = stats.blocked_anova(fixture_f[0])
    assert anova.ss_config == pytest.approx(0.00702)
    assert anova.ss_seed == pytest.approx(0.001575)
    assert anova.ss_error == pytest.approx(0.0009)
    assert anova.df_error == 12
    assert anova.mse == pytest.approx(7.5e-5)
    assert anova.f == pytest.approx(23.4)
    assert anova.p == pytest.approx(1.3605e-5, rel=1e-4)
    assert anova.half_width() == pytest.approx(0.013342, abs=1e-6)
    assert anova.unblocked_variance == pytest.approx(1.65e-4)
    assert anova.unblocked_half_width() == pytest.approx(0.019360, abs=1e-6)


def test_friedman_agrees_with_scipy_with_and_without_ties(fixture_f):
    loss, speed = fixture_f
    chi2, p, w = permutation.friedman(loss)
    assert (chi2, p, w) == pytest.approx((12.102564, 0.016605, 0.756410), abs=1e-6)
    for values in (loss, speed, np.round(loss, 2)):
        truth = scipy_stats.friedmanchisquare(*values)
        assert permutation.friedman(values)[:2] == pytest.approx((truth.statistic, truth.pvalue))


def test_no_shown_difference_is_not_shown_equivalence(fixture_f):
    loss, _ = fixture_f
    difference = stats.paired_difference(loss[4], loss[0])
    assert stats.equivalence_p(difference, 0.01) == pytest.approx(0.195501, abs=1e-6)


def test_equivalence_needs_a_margin():
    difference = stats.paired_difference(A_PRIME, B_PRIME)
    with pytest.raises(ValueError, match="margin=0 must be positive"):
        stats.equivalence_p(difference, 0)


def test_corrections_of_the_fixture(fixture_f):
    loss, _ = fixture_f
    raw = np.array([stats.paired_difference(loss[i], loss[0]).p for i in range(1, 5)])
    assert raw == pytest.approx([0.013847, 0.002260, 0.181690, 0.760820], abs=1e-6)
    assert stats.holm(raw) == pytest.approx([0.041541, 0.009038, 0.363380, 0.760820], abs=2e-6)
    adjusted = stats.benjamini_hochberg(raw)
    assert adjusted == pytest.approx([0.027694, 0.009038, 0.242253, 0.760820], abs=2e-6)


def test_corrections_of_a_textbook_family():
    raw = np.array([0.01, 0.04, 0.03, 0.005])
    assert stats.holm(raw) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.benjamini_hochberg(raw) == pytest.approx([0.02, 0.04, 0.04, 0.02])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_corrections_agree_with_scipy_and_keep_the_order(raw):
    values = np.array(raw)
    adjusted = stats.benjamini_hochberg(values)
    assert adjusted == pytest.approx(scipy_stats.false_discovery_control(values))
    stepped = stats.holm(values)
    assert (stepped >= adjusted - 1e-12).all()
    assert (stepped <= np.minimum(values * len(values), 1) + 1e-12).all()
    order = np.argsort(values)
    assert (np.diff(stepped[order]) >= 0).all()


@pytest.mark.parametrize(
    ("n", "factor"),
    [(2, 8.9846), (3, 2.4841), (4, 1.5912), (5, 1.2417), (6, 1.0494), (8, 0.8360), (10, 0.7154)],
)
def test_interval_factors(n, factor):
    assert stats.interval_factor(n) == pytest.approx(factor, abs=5e-5)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=9))
def test_the_interval_of_a_mean_is_scipys(values):
    x = np.array(values)
    interval = stats.mean_interval(x)
    assert interval is not None
    se = np.std(x, ddof=1) / math.sqrt(len(x))
    low, high = scipy_stats.t.interval(0.95, len(x) - 1, loc=x.mean(), scale=max(se, 1e-300))
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-9)


def test_one_value_has_no_interval():
    assert stats.mean_interval(np.array([1.0])) is None
    with pytest.raises(ValueError, match="at least 2"):
        stats.interval_factor(1)


def test_t_intervals_cover_where_percentiles_do_not():
    rng = np.random.default_rng(7)
    hits = 0
    repetitions = 3000
    for sample in rng.normal(size=(repetitions, 3)):
        interval = stats.mean_interval(sample)
        assert interval is not None
        hits += interval.low <= 0 <= interval.high
    # Four standard errors of a share of 0.95 over 3,000 draws are 0.016.
    assert hits / repetitions == pytest.approx(0.95, abs=0.016)


@pytest.mark.parametrize(
    ("n", "ordered", "distinct"),
    [(2, 4, 3), (3, 27, 10), (4, 256, 35), (5, 3125, 126), (6, 46656, 462)],
)
def test_draws_are_enumerated_with_their_probabilities(n, ordered, distinct):
    weights, probabilities = resampling.resample_weights(n)
    assert weights.shape == (distinct, n)
    assert (weights.sum(axis=1) == n).all()
    assert probabilities.sum() == pytest.approx(1)
    assert probabilities.min() == pytest.approx(1 / ordered)
    assert weights.T @ probabilities == pytest.approx(np.ones(n))


def test_too_many_seeds_are_not_enumerated():
    with pytest.raises(ValueError, match="1 to 8 seeds, got 9"):
        resampling.resample_weights(9)


def test_sampled_draws_follow_their_generator_and_leave_the_global_one_alone():
    np.random.seed(5)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = resampling.sampled_weights(9, 50, np.random.default_rng(1))[0]
    second = resampling.sampled_weights(9, 50, np.random.default_rng(1))[0]
    other = resampling.sampled_weights(9, 50, np.random.default_rng(2))[0]
    assert (first == second).all()
    assert (first != other).any()
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_speed_ratios_are_taken_on_logs(fixture_f):
    _, speed = fixture_f
    ratio = stats.log_ratio(speed[2], speed[0])
    assert ratio is not None
    expected = (1.201028, 1.196885, 1.205186)
    assert (ratio.mean, ratio.low, ratio.high) == pytest.approx(expected, abs=1e-6)


def test_records_against_a_target():
    first = np.array([3.2772, 3.2781, 3.2780, 3.2784, 3.2773, 3.2806, 3.2799, 3.2765])
    assert stats.mean_below_p(first, 3.28) == pytest.approx(0.004519, abs=1e-6)
    assert (3.28 - first.mean()) * math.sqrt(8) == pytest.approx(0.004950, abs=1e-6)
    second = np.array([3.27676, 3.27770, 3.27869, 3.27831, 3.27789, 3.27830, 3.27757, 3.27857])
    assert second.mean() == pytest.approx(3.27797375)
    statistic = (3.28 - second.mean()) * math.sqrt(8)
    assert statistic == pytest.approx(0.0057311, abs=1e-7)
    assert statistic / 0.0013 == pytest.approx(4.4085, abs=1e-4)


@pytest.mark.parametrize(
    "values", [np.ones((1, 4)), np.ones((3, 1)), np.array([[1.0, np.nan], [1.0, 2.0]])]
)
def test_a_blocked_anova_refuses_what_it_cannot_use(values):
    with pytest.raises(ValueError, match="a blocked ANOVA needs"):
        stats.blocked_anova(values)


def test_an_anova_without_error_is_not_used_for_intervals():
    anova = stats.blocked_anova(np.array([[1.0, 2.0], [2.0, 3.0]]))
    with pytest.raises(ValueError, match="no error left"):
        stats.blocked_difference(anova, 1.0)


def test_a_pooled_difference_uses_the_pooled_error(fixture_f):
    anova = stats.blocked_anova(fixture_f[0])
    result = stats.blocked_difference(anova, -0.015)
    assert result.high - result.mean == pytest.approx(0.013342, abs=1e-6)
    assert result.standard_error == pytest.approx(math.sqrt(2 * 7.5e-5 / 4))
    assert (result.df, result.pairs) == (12, 4)
