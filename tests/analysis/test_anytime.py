"""Tests that hold at every look, and where a report uses them."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis.anytime import METHOD, PRIOR_SD, anytime_difference
from analysis.load import load_sweep
from analysis.markdown import markdown_page
from analysis.stats import interval_factor
from analysis.study import Settings, analyse
from orchestrator import sequential

ADAPTIVE = {"effect": 0.01, "max_seeds": 16, "comparisons": [{"first": {}, "second": {}}]}


@pytest.mark.parametrize("n", [3, 4, 7, 16])
def test_intervals_are_those_that_adaptive_seeds_stop_by(n):
    values = np.random.default_rng(n).normal(0.3, 1.0, n)
    test = anytime_difference(values, np.zeros(n))
    for comparisons in (1, 2):
        theirs = sequential.anytime_interval(list(values), 0.05 / comparisons)
        assert test.widened(comparisons) == pytest.approx((theirs.low, theirs.high), rel=1e-12)
    assert (test.low, test.high) == test.widened(1)
    assert PRIOR_SD == sequential.PRIOR_SD


def test_p_reaches_five_percent_where_the_interval_reaches_zero():
    values = np.random.default_rng(0).normal(0.0, 1.0, 6)
    test = anytime_difference(values, np.zeros(6))
    at_edge = anytime_difference(values - test.low, np.zeros(6))
    assert at_edge.low == pytest.approx(0, abs=1e-12)
    assert at_edge.p == pytest.approx(0.05)
    margin = max(abs(test.low), abs(test.high))
    assert test.equivalence_p(margin) == pytest.approx(0.05)
    assert test.equivalence_p(abs(test.mean) / 2) == 1.0


def test_looking_until_it_is_decided_rarely_shows_a_difference_that_is_not_there():
    values = np.random.default_rng(5).normal(size=(4000, 16))
    shown = {"valid at every look": np.zeros(4000, bool), "t": np.zeros(4000, bool)}
    for n in range(3, 17):
        means, sds = values[:, :n].mean(axis=1), values[:, :n].std(axis=1, ddof=1)
        one = anytime_difference(values[0, :n], np.zeros(n))
        shown["valid at every look"] |= np.abs(means) > (one.high - one.mean) / one.sd * sds
        shown["t"] |= np.abs(means) > interval_factor(n) * sds
    assert shown["valid at every look"].mean() < 0.05
    assert shown["t"].mean() > 0.15


@pytest.mark.parametrize(
    "differences", [[], [0.1], [0.1, 0.2], [0.1] * 5], ids=["none", "one", "two", "constant"]
)
def test_what_says_nothing_at_every_look_is_no_test(differences):
    values = np.array(differences, dtype=float)
    assert anytime_difference(values, np.zeros(len(values))) is None


def sweep_with_added_seeds(made, folder, adaptive):
    """Three arms with seeds 0 to 2, the last two of which got seeds 3 and 4 as well."""
    arms = [
        ("softmax", "pure", "adamw"),
        ("deltanet", "pure", "adamw"),
        ("linear", "pure", "adamw"),
    ]
    rows = pd.DataFrame(
        made.make_trials(made.Plan(arms=arms, rates=(3e-3,), seeds=tuple(range(5))))
    )
    rows = rows[(rows["mixer"] != "softmax") | (rows["seed"] < 3)]
    spec = {"name": "grown", "seeds": [0, 1, 2], "adaptive": adaptive}
    return load_sweep(made.write_folder(folder, rows.reset_index(drop=True), None, spec))


def test_arms_with_added_seeds_are_compared_at_every_look_and_the_report_says_so(made, tmp_path):
    sweep = sweep_with_added_seeds(made, tmp_path, ADAPTIVE)
    assert sweep.fixed_seeds == {0, 1, 2}
    study = analyse(sweep)
    rows = {row.arm.fact("mixer"): row for row in study.comparables[0].comparison.rows}
    base = sweep.trials[sweep.trials["mixer"] == "softmax"].set_index("seed")["val_loss_nats"]
    for mixer in ("deltanet", "linear"):
        own = sweep.trials[sweep.trials["mixer"] == mixer].set_index("seed")["val_loss_nats"]
        gaps = (own - base).dropna()
        wanted = sequential.anytime_interval(list(gaps), 0.05)
        test = rows[mixer].loss
        assert (test.method, test.pairs) == (METHOD, 3)
        assert (test.low, test.high) == pytest.approx((wanted.low, wanted.high))
    page = markdown_page(study)
    assert "Seeds were added to 2 cells while comparisons were undecided" in page
    assert METHOD in page


def test_a_sweep_with_equal_seeds_keeps_its_t_tests(made, tmp_path):
    study = analyse(sweep_with_added_seeds(made, tmp_path, None))
    part = study.comparables[0]
    assert study.sweep.fixed_seeds is None
    assert {row.loss.method for row in part.comparison.rows} == {"paired t"}
    assert "Seeds were added" not in markdown_page(study)


def test_a_baseline_with_added_seeds_is_not_pooled(made, tmp_path):
    sweep = sweep_with_added_seeds(made, tmp_path, ADAPTIVE)
    arm_id = sweep.trials.loc[sweep.trials["mixer"] == "linear", "arm_id"].iloc[0]
    comparison = analyse(sweep, Settings(baseline=arm_id)).comparables[0].comparison
    assert comparison.anova is None
    assert "after looking" in comparison.why_not_pooled
    assert math.isnan(comparison.detectable_nats)
    assert {row.loss.method for row in comparison.rows} == {METHOD}
    assert {row.loss.pairs for row in comparison.rows} == {3, 5}
