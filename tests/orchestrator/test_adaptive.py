"""Adaptive seeds against a ledger: pairs are added until a comparison is decided, and no longer."""

import textwrap

import pytest

from orchestrator.adaptive import BETTER, DIVERGED, EQUAL, OUT_OF_SEEDS, WAITING, verdicts
from orchestrator.compose import load_sweep
from orchestrator.errors import ConfigError
from orchestrator.journal import Journal
from orchestrator.plan import make_plan
from orchestrator.rounds import extended, next_round, summary, unreached

PAIR = """
name: pair
base: {size: nano, budget.tokens: 1024, batch.tokens: 512, seq_len: 64}
axes:
  model.mixer: [softmax, deltanet, linear]
seeds: [0, 1, 2]
adaptive:
  effect: 0.01
  max_seeds: 12
  batch: 2
  comparisons:
    - {first: {model.mixer: deltanet}, second: {model.mixer: softmax}}
lanes: {speed: {enabled: false}}
"""
NOISE = [0.004, -0.003, 0.002, -0.004, 0.003, 0.001, -0.002, -0.001, 0.004, -0.003, 0.001, -0.002]


@pytest.fixture
def pair(tmp_path):
    def load(*overrides, text=PAIR):
        (tmp_path / "pair.yaml").write_text(textwrap.dedent(text))
        sweep = load_sweep("pair.yaml", list(overrides), tmp_path)
        return extended(make_plan(sweep, tmp_path / "runs", tmp_path))

    return load


def run(plan, gap, outcomes=None):
    """Rounds as the driver makes them; a deltanet loses `gap` nats less, up to the noise."""
    tried = set()
    while (current := next_round(plan, tried)) is not None:
        for name in current.to_run:
            record = current.desired[name]
            plan.ledger.describe(record)
            seed, is_delta = record.seed, record.mixer == "deltanet"
            loss = 4.0 + 0.2 * seed - (gap + NOISE[seed] if is_delta else 0.0)
            status = (outcomes or {}).get((record.mixer, seed), "completed")
            journal = Journal(plan.ledger.next_attempt(name))
            journal.append({"event": "end", "status": status, "val_loss_nats": loss})
            journal.close()
        tried |= unreached(current, current.refreshed())
        plan = extended(plan, tried)
    return plan


def seeds_of(plan, mixer):
    return sorted(record.seed for record in plan.desired.values() if record.mixer == mixer)


def test_a_clear_difference_is_decided_with_few_seeds(pair):
    plan = run(pair(), gap=0.1)
    (verdict,) = verdicts(plan)
    assert verdict.outcome == BETTER
    assert verdict.interval.high < 0  # the first has the lower loss
    assert seeds_of(plan, "deltanet") == seeds_of(plan, "softmax") == [0, 1, 2]


def test_pairs_are_added_only_to_the_cells_that_are_compared(pair):
    plan = run(pair(), gap=0.008)
    (verdict,) = verdicts(plan)
    assert verdict.outcome == BETTER
    assert 3 < verdict.interval.n < 12
    assert seeds_of(plan, "deltanet") == seeds_of(plan, "softmax") == verdict.seeds
    assert seeds_of(plan, "linear") == [0, 1, 2]


def test_no_difference_is_a_result_once_the_interval_is_narrow(pair):
    plan = run(pair(), gap=0.0)
    (verdict,) = verdicts(plan)
    assert verdict.outcome == EQUAL
    assert verdict.interval.lies_within(0.01)


def test_the_budget_ends_what_stays_undecided_and_the_reach_is_said(pair):
    plan = run(pair("adaptive.effect=1e-4"), gap=0.0)
    (verdict,) = verdicts(plan)
    assert verdict.outcome == OUT_OF_SEEDS
    assert verdict.interval.n == 12
    lines = summary(plan)
    half = (verdict.interval.high - verdict.interval.low) / 2
    assert f"12 seeds could show {half:.4f} nats" in lines[0]
    assert "the smallest difference that they can show is" in lines[-1]


def test_the_looks_are_taken_again_so_a_new_call_asks_for_the_same(pair):
    run(pair(), gap=0.008)
    again = pair()
    assert again.to_run == []
    (before,) = verdicts(again)
    assert verdicts(pair())[0].seeds == before.seeds
    smaller = pair("adaptive.effect=1e-4", "adaptive.max_seeds=16")
    assert verdicts(smaller)[0].outcome == BETTER  # what was shown stays shown


def test_a_larger_budget_goes_on_where_the_smaller_one_ended(pair):
    run(pair("adaptive.max_seeds=5", "adaptive.effect=1e-4"), gap=0.0)
    more = pair("adaptive.max_seeds=8", "adaptive.effect=1e-4")
    assert {more.desired[name].seed for name in more.to_run} == {5, 6}
    assert verdicts(more)[0].outcome == WAITING


def test_a_divergence_ends_a_comparison_by_loss(pair):
    plan = run(pair(), gap=0.0, outcomes={("softmax", 1): "diverged"})
    assert verdicts(plan)[0].outcome == DIVERGED
    assert seeds_of(plan, "softmax") == [0, 1, 2]


def test_a_failure_is_not_run_again_in_the_same_call(pair):
    plan = run(pair(), gap=0.0, outcomes={("softmax", 1): "failed"})
    assert len(plan.to_run) == 1
    assert len(plan.states[plan.to_run[0]].attempts) == 1


def test_several_comparisons_share_the_chance_of_an_error(pair):
    text = PAIR.replace(
        "  comparisons:",
        "  comparisons:\n    - {first: {model.mixer: linear}, second: {model.mixer: softmax}}",
    )
    run(pair(), gap=0.1)
    alone = verdicts(pair())[0].interval
    together = verdicts(pair(text=text))[1].interval
    assert together.high - together.low > alone.high - alone.low


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("first: {model.mixer: deltanet}", "first: {}", "met by exactly one cell, but 3 meet it"),
        ("first: {model.mixer: deltanet}", "first: {model.mixer: lion}", "but 0 meet it"),
        ("first: {model.mixer: deltanet}", "first: {model.mixer: softmax}", "with itself"),
        ("first: {model.mixer: deltanet}", "first: {mixer: deltanet}", "unknown key mixer"),
        ("max_seeds: 12", "max_seeds: 2", "must be at least the 3 seeds"),
        ("effect: 0.01", "effect: 0", "must be a positive number of nats"),
        ("  effect: 0.01\n", "", "effect"),
        ("batch: 2", "batch: 0", "adaptive.batch=0 must be at least 1"),
        ("axes:", "purpose: measure\naxes:", "adaptive needs purpose: compare"),
    ],
)
def test_what_cannot_be_compared_is_refused(pair, before, after, sentence):
    with pytest.raises(ConfigError, match=sentence):
        pair(text=PAIR.replace(before, after))
