"""Differences to a baseline: which test, which verdict."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from analysis.arms import Arm, Cell
from analysis.comparison import compare_arms, equal_spread_p
from analysis.stats import holm

BASE = np.array([3.40, 3.42, 3.41, 3.39])


def pair(name, losses, seeds=None, speeds=None):
    values = np.array(losses, dtype=float)
    seeds = tuple(range(len(values))) if seeds is None else seeds
    cell = Cell(
        cell_id=f"{name}-cell",
        arm_id=name,
        lr=1e-3,
        adam_lr=math.nan,
        seeds=seeds,
        losses=values,
        speeds=np.full(len(values), math.nan) if speeds is None else np.array(speeds),
        replicate_ids=tuple(f"{name}-{seed}" for seed in seeds),
        measures={},
        num_desired=len(values),
        num_diverged=0,
        num_failed=0,
        diverged_ids=(),
        diverged_speeds=math.nan,
    )
    return Arm(arm_id=name, label=name, facts={}, cells=(cell,)), cell


def compare(*pairs, margin=0.01):
    result = compare_arms(list(pairs), pairs[0][0], margin)
    assert result is not None
    return result


def test_the_fixture_is_pooled(fixture_f):
    loss, _ = fixture_f
    result = compare(*(pair(name, loss[i]) for i, name in enumerate("ABCDE")))
    assert result.anova is not None
    rows = {row.arm.arm_id: row for row in result.rows}
    assert set(rows) == set("BCDE")
    assert rows["B"].loss.method == "blocked ANOVA"
    assert rows["B"].loss_gap == pytest.approx(-0.015)
    assert rows["B"].loss.high - rows["B"].loss.mean == pytest.approx(0.013342, abs=1e-6)
    assert rows["C"].verdict == "worse"
    assert rows["E"].verdict == "undecided"
    assert result.seeds_for_margin is not None
    assert result.detectable_nats > 0.013


def test_better_needs_the_corrected_p():
    rng = np.random.default_rng(4)
    base = 3.4 + 0.02 * rng.normal(size=4)
    gaps = np.linspace(0.0, 0.012, 13)
    crowd = [pair(f"N{i}", base - gap + 0.004 * rng.normal(size=4)) for i, gap in enumerate(gaps)]
    rows = compare(pair("A", base), *crowd, margin=1e-4).rows
    raw = np.array([row.loss.p for row in rows])
    assert [row.p_holm for row in rows] == pytest.approx(holm(raw))
    for row in rows:
        assert (row.verdict == "better") == (row.p_holm < 0.05 and row.loss_gap < 0)
    assert any(row.loss.p < 0.05 <= row.p_holm and row.verdict == "undecided" for row in rows)


def test_equivalence_is_shown_and_not_assumed():
    noise = np.array([1e-4, -1e-4, 2e-4, -2e-4])
    assert compare(pair("A", BASE), pair("B", BASE + noise)).rows[0].verdict == "equivalent"
    wide = np.array([0.02, -0.02, 0.01, -0.012])
    assert compare(pair("A", BASE), pair("B", BASE + wide)).rows[0].verdict == "undecided"


def test_one_seed_is_undecided_and_untested():
    row = compare(pair("A", [3.4]), pair("B", [3.1])).rows[0]
    assert row.loss is None
    assert row.verdict == "undecided"
    assert row.loss_gap == pytest.approx(-0.3)
    assert math.isnan(row.p_holm)


def test_other_seeds_are_paired_on_what_is_common():
    result = compare(pair("A", BASE), pair("B", BASE[:3] - [0.01, 0.02, 0.015], seeds=(0, 1, 2)))
    row = result.rows[0]
    assert (row.pairs, row.loss.method) == (3, "paired t")
    assert result.why_not_pooled == "no other arm has the baseline's seeds"


def test_no_common_seed_is_compared_after_welch():
    result = compare(pair("A", BASE), pair("B", BASE - 0.5, seeds=(7, 8, 9, 10)))
    row = result.rows[0]
    assert (row.pairs, row.loss.method, row.verdict) == (0, "Welch", "better")


def test_arms_that_differ_by_a_constant_are_said_to():
    row = compare(pair("A", BASE), pair("B", BASE + 0.01)).rows[0]
    assert row.loss.method == "constant difference"
    assert row.verdict == "worse"


def test_unequal_spreads_are_not_pooled():
    rng = np.random.default_rng(0)
    quiet = [pair(f"Q{i}", 3.4 + 1e-3 * rng.normal(size=8)) for i in range(5)]
    loud = pair("L", 3.4 + 0.3 * rng.normal(size=8))
    result = compare(*quiet, loud)
    assert result.anova is None
    assert "spreads differ" in result.why_not_pooled
    assert {row.loss.method for row in result.rows} == {"paired t"}


def test_the_spread_test_is_scipys():
    values = np.random.default_rng(2).normal(size=(4, 6))
    truth = scipy_stats.levene(*values, center="median").pvalue
    assert equal_spread_p(values) == pytest.approx(truth)
    assert equal_spread_p(values[:, :2]) == 1.0


def test_speed_ratios_need_two_measured_pairs():
    fast = pair("B", BASE, speeds=[220.0, 200.0, math.nan, math.nan])
    slow = pair("A", BASE, speeds=[110.0, 100.0, 100.0, 100.0])
    ratio = compare(slow, fast).rows[0].speed_ratio
    assert ratio.mean == pytest.approx(2.0)
    assert ratio.n == 2
    lone = pair("B", BASE, speeds=[220.0, math.nan, math.nan, math.nan])
    assert compare(slow, lone).rows[0].speed_ratio is None


def test_a_baseline_without_a_result_compares_nothing():
    (arm, _), other = pair("A", BASE), pair("B", BASE)
    assert compare_arms([other], arm, 0.01) is None
