"""Choosing a rate: bias, held-out scores, sensitivity, widths."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import learning_rate as lr
from analysis.resampling import resample_weights

M = np.array([[3.02, 2.98, 3.00], [2.99, 3.03, 2.97], [3.00, 2.96, 3.05]])
G_RATES = np.array([1e-4, 3e-4, 1e-3, 3e-3, 1e-2])
G_LOSSES = np.array([2.10, 1.85, 1.70, 1.75, math.inf])
CEILING = math.log(256)


def test_the_naive_choice_and_the_luckiest_seed():
    means = M.mean(axis=1)
    assert lr.argmin_first(means) == 1
    assert means.min() == pytest.approx(2.996667, abs=1e-6)
    assert M.min() == 2.96


def test_leaving_one_seed_out_scores_what_the_others_choose():
    assert lr.leave_one_seed_out(M) == pytest.approx((3.02 + 3.03 + 3.05) / 3)
    assert lr.leave_one_seed_out(M) == pytest.approx(3.033333, abs=1e-6)


def test_one_seed_has_nothing_to_hold_out():
    assert lr.leave_one_seed_out(M[:, :1]) is None


def test_choice_probabilities_are_exact_and_split_ties():
    weights, probabilities = resample_weights(3)
    shares = lr.choice_probability(weights @ M.T / 3, probabilities)
    assert shares == pytest.approx([1 / 9, 0.629630, 0.259259], abs=1e-6)
    assert shares.sum() == pytest.approx(1)


@pytest.mark.parametrize(
    ("k", "expected"),
    [
        (2, 0.56419),
        (3, 0.84628),
        (4, 1.02938),
        (5, 1.16296),
        (6, 1.26721),
        (7, 1.35218),
        (8, 1.42360),
        (10, 1.53875),
        (12, 1.62923),
        (15, 1.7359),
        (25, 1.9653),
    ],
)
def test_expected_maxima_of_normal_values(k, expected):
    assert lr.expected_maximum(k) == pytest.approx(expected, abs=5e-5)


def test_the_bias_of_the_smallest_of_five_means():
    assert lr.selection_bias(5, 3, 1.0) == pytest.approx(-0.671, abs=5e-4)
    assert lr.selection_bias(15, 1, 1.0) == pytest.approx(-1.7359, abs=5e-5)


def test_held_out_scores_are_unbiased_on_a_flat_curve():
    rng = np.random.default_rng(1)
    samples = rng.normal(size=(1500, 5, 3))
    naive = [sample.mean(axis=1).min() for sample in samples]
    held_out = [lr.leave_one_seed_out(sample) for sample in samples]
    # Standard errors over 1,500 draws: 0.39/38.7 and 0.71/38.7; four of them either way.
    assert np.mean(naive) == pytest.approx(-0.671, abs=0.040)
    assert np.mean(held_out) == pytest.approx(0.0, abs=0.073)


def test_expected_best_of_k():
    values = np.array([1.0, 2.0, 3.0, 4.0])
    assert lr.expected_best(values, 2) == pytest.approx(1.875)
    assert lr.expected_best(values, 1) == pytest.approx(2.5)
    with pytest.raises(ValueError, match="k=0"):
        lr.expected_best(values, 0)


def test_sensitivity_counts_divergence_as_no_training():
    assert lr.sensitivity_grid(G_LOSSES, CEILING) == pytest.approx(0.889035489, abs=1e-9)
    trapezoid = lr.sensitivity_trapezoid(G_RATES, G_LOSSES, CEILING)
    assert trapezoid == pytest.approx(0.600352515, abs=1e-9)
    assert lr.sensitivity_grid(G_LOSSES[:-1], CEILING) == pytest.approx(0.15)


def test_a_grid_of_one_three_ten_counts_as_even():
    assert lr.has_equal_ratios(G_RATES)
    assert not lr.has_equal_ratios(np.array([1e-4, 1e-3, 2e-3]))


@pytest.mark.parametrize(
    ("margin", "low", "high", "width"),
    [(0.05, 10**-3.174293, 10**-2.522879, 0.651414), (0.1, None, None, 0.832596)],
)
def test_tolerance_widths(margin, low, high, width):
    ends = lr.tolerance_interval(G_RATES, G_LOSSES, margin, CEILING)
    assert math.log10(ends[1] / ends[0]) == pytest.approx(width, abs=1e-6)
    if low:
        assert ends == pytest.approx((low, high), rel=1e-6)


def test_without_a_ceiling_a_tolerance_interval_ends_before_what_diverged():
    ends = lr.tolerance_interval(G_RATES, G_LOSSES, 0.1)
    assert ends[1] == pytest.approx(3e-3)


def test_a_tolerance_interval_stays_inside_the_grid():
    ends = lr.tolerance_interval(np.array([1e-3, 1e-2]), np.array([1.0, 1.01]), 0.05)
    assert ends == pytest.approx((1e-3, 1e-2))


def test_the_vertex_of_a_parabola():
    vertex = lr.interpolated_optimum(G_RATES, G_LOSSES)
    assert vertex is not None
    assert vertex.lr == pytest.approx(0.00127286, abs=1e-8)
    assert vertex.loss == pytest.approx(1.695700, abs=1e-6)


@pytest.mark.parametrize(
    "losses", [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0], [math.inf, 1.0, 2.0], [2.0, 1.0, math.nan]]
)
def test_an_edge_or_a_gap_has_no_vertex(losses):
    assert lr.interpolated_optimum(np.array([1e-4, 1e-3, 1e-2]), np.array(losses)) is None


@given(st.integers(0, 4), st.sampled_from([math.nan, math.inf]))
def test_a_blown_up_rate_is_never_best(position, bad):
    losses = np.insert(np.array([3.0, 1.0, 2.0, 4.0]), position, bad)
    assert losses[lr.argmin_first(losses)] == 1.0


def test_nothing_finite_has_no_best():
    with pytest.raises(ValueError, match="no finite value"):
        lr.argmin_first(np.array([math.nan, math.inf]))


def test_adjusted_means_are_plain_where_nothing_is_missing():
    assert lr.adjusted_means(M) == pytest.approx(M.mean(axis=1))


def test_adjusted_means_remove_the_luck_of_the_seeds():
    effects = np.array([0.0, 0.1, -0.1, 0.3])
    cells = np.array([2.0, 2.05, 1.9])
    table = cells[:, None] + effects[None, :]
    table[0, [1, 3]] = math.nan
    table[1, 2] = math.nan
    adjusted = lr.adjusted_means(table)
    assert adjusted == pytest.approx(cells + effects.mean())
    naive = np.nanmean(table, axis=1)
    assert naive[1] - naive[0] > 0.15


def test_a_row_without_values_stays_unknown():
    table = np.array([[1.0, 2.0], [math.nan, math.nan]])
    adjusted = lr.adjusted_means(table)
    assert adjusted[0] == pytest.approx(1.5)
    assert math.isnan(adjusted[1])


def test_cells_at_one_rate_have_no_vertex():
    rates, losses = np.array([1e-3, 1e-3, 3e-3]), np.array([2.1, 2.0, 2.2])
    assert lr.interpolated_optimum(rates, losses) is None
