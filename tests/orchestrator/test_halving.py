"""Successive halving: where the rungs are, and who goes on."""

import pytest

from orchestrator.config import AshaConfig, TrialConfig
from orchestrator.halving import promotable, rung_steps, rung_tokens


def test_rungs_grow_by_the_reduction_up_to_the_budget():
    asha = AshaConfig(min_tokens=1000, reduction=3)
    assert rung_tokens(asha, 20_000) == [1000, 3000, 9000, 20_000]
    assert rung_tokens(asha, 9000) == [1000, 3000, 9000]
    assert rung_tokens(None, 20_000) == [20_000]


def test_a_first_rung_at_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"min_tokens=1000 must be less than budget\.tokens=1000"):
        rung_tokens(AshaConfig(min_tokens=1000), 1000)


def test_rungs_fall_on_whole_steps_of_a_trial():
    config = TrialConfig()
    config.batch.tokens, config.budget.tokens = 512, 20_000
    assert rung_steps([1000, 3000, 9000, 20_000], config) == [1, 5, 17, 39]
    with pytest.raises(ValueError, match="rungs need a step each"):
        rung_steps([100, 20_000], config)
    with pytest.raises(ValueError, match="rungs need a step each"):
        rung_steps([600, 700, 20_000], config)


def test_the_best_third_of_a_rung_goes_on_once():
    losses = [{0: 3.0, 1: 2.0, 2: 4.0, 3: 1.0, 4: 5.0, 5: 6.0}, {}, {}]
    targets = dict.fromkeys(range(6), 0)
    assert promotable(losses, targets, 3, is_last=False) == {3: 1, 1: 1}
    assert promotable(losses, targets | {3: 1}, 3, is_last=False) == {1: 1}


def test_too_few_points_wait_for_more_unless_none_will_come():
    losses = [{0: 3.0, 1: 2.0}, {}]
    targets = {0: 0, 1: 0}
    assert promotable(losses, targets, 3, is_last=False) == {}
    assert promotable(losses, targets, 3, is_last=True) == {1: 1}


def test_of_equal_losses_the_first_goes_on():
    losses = [{0: 2.0, 1: 2.0, 2: 2.0}, {}]
    assert promotable(losses, dict.fromkeys(range(3), 0), 3, is_last=False) == {0: 1}


def test_nothing_goes_on_from_the_last_rung():
    losses = [{0: 2.0}, {0: 1.0}]
    assert promotable(losses, {0: 1}, 2, is_last=True) == {}
