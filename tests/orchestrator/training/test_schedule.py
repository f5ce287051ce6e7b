"""Schedules at their end points, against published rates, and what they refuse."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.training.schedule import (
    ScheduleConfig,
    decay_steps,
    lr_ratio,
    quartiles,
    warmup_ratio,
    warmup_steps,
)


def test_wsd_end_points_are_exact():
    config = ScheduleConfig(warmup_fraction=0.1, decay_fraction=0.2, min_ratio=0.1)
    rates = [lr_ratio(config, step, 100) for step in range(100)]
    assert rates[0] == 0.0
    assert rates[5] == 0.5
    assert rates[10:80] == [1.0] * 70
    assert rates[80] == pytest.approx(0.1 + 0.9 * (1 - (1 / 20) ** 0.5), rel=1e-15)
    assert rates[99] == 0.1


def test_cosine_falls_from_the_peak_after_warm_up_to_the_last_step():
    config = ScheduleConfig(kind="cosine", warmup_fraction=0.1, min_ratio=0.2)
    rates = [lr_ratio(config, step, 101) for step in range(101)]
    assert rates[0] == 0.0
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.2 + 0.8 / 2)
    assert rates[100] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))


def test_constant_stays_at_the_peak_after_warm_up():
    config = ScheduleConfig(kind="constant", warmup_fraction=0.5)
    assert [lr_ratio(config, step, 4) for step in range(4)] == [0.0, 0.5, 1.0, 1.0]


@pytest.mark.parametrize(
    ("step", "matrix", "adam"), [(0, 0.0, 0.0), (5, 0.5, 0.5), (50, 1.0, 1.0), (99, 0.1, 1.0)]
)
def test_a_constant_group_shares_the_warm_up_and_nothing_else(step, matrix, adam):
    config = ScheduleConfig(warmup_fraction=0.1, decay_fraction=0.2, min_ratio=0.1)
    assert lr_ratio(config, step, 100) == matrix
    assert warmup_ratio(config, step, 100) == adam


COLLAPSED = {"kind": "collapsed", "warmup_fraction": 200 / 1907, "decay_fraction": 3.0}
"""A published run of 244,140 samples, 128 a step, whose decay was 732,422 samples long."""


@pytest.mark.parametrize("peak", [3e-4, 3.6e-4], ids=["adamw", "muon"])
@pytest.mark.parametrize(
    ("step", "rate"),
    [(100, 1.5e-4), (200, 3.00e-4), (201, 7.38e-5), (500, 6.55e-5), (1000, 5.23e-5)],
)
def test_the_collapsed_schedule_has_the_published_rates(step, rate, peak):
    got = peak * lr_ratio(ScheduleConfig(**COLLAPSED), step, 1907)
    assert got == pytest.approx(rate * peak / 3e-4, rel=1e-3)
    if (step, peak) == (201, 3.6e-4):
        assert got == pytest.approx(8.86e-5, rel=1e-3)


def test_the_collapsed_schedule_ends_at_its_minimum():
    assert lr_ratio(ScheduleConfig(**COLLAPSED), 1906, 1907) == pytest.approx(0.1)


def test_a_constant_group_has_its_own_quartiles_under_every_schedule():
    for kind, decay in (("wsd", 0.2), ("cosine", 0.2), ("constant", 0.2), ("collapsed", 3.0)):
        config = ScheduleConfig(kind=kind, warmup_fraction=0.1, decay_fraction=decay)
        assert quartiles(config, 101, 2.0, is_decayed=False) == (0.0, 2.0, 2.0, 2.0, 2.0)


def test_the_collapsed_schedule_is_had_by_its_name_only():
    with pytest.raises(ValueError, match=r"decay_fraction=3.0 must lie in \[0, 1\]"):
        ScheduleConfig(**(COLLAPSED | {"kind": "wsd"}))
    with pytest.raises(ValueError, match=r"nothing collapses: schedule.kind must be 'wsd'"):
        ScheduleConfig(kind="collapsed", warmup_fraction=0.1, decay_fraction=0.2)


def test_a_long_run_has_the_published_phases():
    """15B tokens: 28,610 steps, 200 of them warm-up, the last fifth decay, 3e-4 down to 3e-5."""
    config = ScheduleConfig(warmup_fraction=200 / 28_610, decay_fraction=0.2, min_ratio=0.1)
    assert warmup_steps(config, 28_610) == 200
    assert decay_steps(config, 28_610) == 5_722
    assert quartiles(config, 28_610, peak=3e-4) == pytest.approx((0.0, 3e-4, 3e-4, 3e-4, 3e-5))


def test_a_decay_that_outlasts_the_run_is_refused():
    with pytest.raises(ValueError, match=r"warmup_fraction=0.3 and .*decay_fraction=0.8 together"):
        ScheduleConfig(warmup_fraction=0.3, decay_fraction=0.8)


@pytest.mark.parametrize("name", ["warmup_fraction", "decay_fraction", "min_ratio"])
@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
def test_shares_outside_zero_and_one_are_refused(name, value):
    with pytest.raises(ValueError, match=rf"schedule.{name}=.* must lie in \[0, 1\]"):
        ScheduleConfig(**{name: value})


def test_an_unknown_kind_is_refused_with_the_known_ones():
    with pytest.raises(
        ValueError, match="'linear' must be one of wsd, cosine, constant, collapsed"
    ):
        ScheduleConfig(kind="linear")


@pytest.mark.parametrize("step", [-1, 10])
def test_a_step_outside_the_run_is_refused(step):
    with pytest.raises(ValueError, match="must be from 0 to 9"):
        lr_ratio(ScheduleConfig(), step, 10)


@given(
    kind=st.sampled_from(["wsd", "cosine", "constant"]),
    warmup=st.floats(0, 1),
    decay_share=st.floats(0, 1),
    min_ratio=st.floats(0, 1),
    num_steps=st.integers(1, 300),
)
def test_every_schedule_rises_then_falls_within_its_bounds(
    kind, warmup, decay_share, min_ratio, num_steps
):
    config = ScheduleConfig(
        kind=kind,
        warmup_fraction=warmup,
        decay_fraction=decay_share * (1 - warmup),
        min_ratio=min_ratio,
    )
    rates = [lr_ratio(config, step, num_steps) for step in range(num_steps)]
    assert all(0 <= rate <= 1 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    if warmup_steps(config, num_steps):
        assert rates[0] == 0.0
    if decay_steps(config, num_steps):
        assert rates[-1] == pytest.approx(min_ratio)
