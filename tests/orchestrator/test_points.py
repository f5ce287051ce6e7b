"""A search against its ledger, round by round: what is asked for, goes on, or is done again."""

import json
import math
import textwrap
from dataclasses import asdict

import pytest

from orchestrator.compose import load_sweep
from orchestrator.errors import ConfigError
from orchestrator.journal import Journal
from orchestrator.plan import make_plan
from orchestrator.points import read_search, record_asks, told
from orchestrator.rounds import extended, next_round, summary, unreached
from orchestrator.search_view import search_json

SEARCH = """
name: found
purpose: search
base:
  size: nano
  budget.tokens: 16384
  batch.tokens: 512
search:
  trials: 9
  batch: 3
  startup_trials: 3
  sampler: qmc
  space:
    model.mixer: [softmax, deltanet]
    optimizer.lr: {low: 1e-3, high: 1e-1, log: true}
  asha: {min_tokens: 1024, reduction: 3}
seeds: [0, 1]
lanes: {speed: {enabled: false}}
"""


@pytest.fixture
def search(tmp_path):
    """A function that gives the extended plan as a new call would."""

    def load(*overrides, text=SEARCH):
        (tmp_path / "found.yaml").write_text(textwrap.dedent(text))
        sweep = load_sweep("found.yaml", list(overrides), tmp_path)
        return extended(make_plan(sweep, tmp_path / "runs", tmp_path))

    return load


def loss_of(record, step):
    return 6 - abs(math.log10(record.lr)) - 0.01 * step + 0.1 * record.seed


def train(plan, name, outcome=None):
    """Journals what a worker would for one replicate of a round."""
    record = plan.desired[name]
    plan.ledger.describe(record)
    journal = Journal(plan.ledger.next_attempt(name))
    journal.append({"event": "start", "init_loss_nats": 6.0})
    pause = plan.pause_steps.get(name)
    if outcome is not None:
        journal.append({"event": "end", "status": outcome, "failure_class": "user_bug"})
    elif pause is not None:
        facts = {
            "tokens": 512 * pause,
            "wall_seconds": 1.0,
            "val_loss_nats": loss_of(record, pause),
        }
        journal.append({"event": "step", "step": pause, **facts})
        journal.append({"event": "stop", "step": pause})
    else:
        loss = loss_of(record, record.steps)
        journal.append({"event": "end", "status": "completed", "val_loss_nats": loss})
    journal.close()


def remember(plan):
    spec = asdict(plan.spec)
    facts = {"device": plan.device, "precision": plan.precision, "threads": plan.threads}
    plan.ledger.write_spec({**spec, **facts})


def run(plan, outcomes=None, tried=None):
    """Rounds until nothing is left, as the driver makes them; the plan and each round's names."""
    tried, rounds = set(tried or ()), []
    while (current := next_round(plan, tried)) is not None:
        record_asks(current)
        remember(plan)
        for name in current.to_run:
            train(current, name, (outcomes or {}).get(name))
        rounds.append(current.to_run)
        tried |= unreached(current, current.refreshed())
        plan = extended(plan, tried)
    return plan, rounds


def losses_by_point(plan, rung):
    return read_search(plan).losses[rung]


def test_all_seeds_of_a_batch_are_asked_for_up_to_the_first_rung(search):
    plan = search()
    assert len(plan.to_run) == 6
    assert set(plan.pause_steps.values()) == {2}
    assert [event["event"] for event in plan.asks] == ["asked"] * 3
    assert not plan.ledger.folder.exists()  # a plan writes nothing


def test_one_point_in_three_goes_on_by_its_mean_over_seeds(search):
    plan, rounds = run(search())
    found = read_search(plan)
    assert [len(losses) for losses in found.losses] == [9, 3, 1, 1]
    for rung in range(2):
        losses, on = found.losses[rung], set(found.losses[rung + 1])
        best = sorted(losses, key=losses.get)[: len(on)]
        assert set(best) == on
    assert sum(len(names) for names in rounds) == 2 * (9 + 3 + 1 + 1)


def test_a_search_that_has_ended_has_nothing_to_do(search):
    run(search())
    plan = search()
    assert plan.to_run == []
    assert plan.asks == []
    assert "1 of 9 points were trained to the end, 8 stopped before" in summary(plan)[0]
    assert summary(plan)[1].startswith("best: loss ")


def test_results_of_stopped_points_stay_and_are_no_longer_asked_for(search):
    plan, _ = run(search())
    assert len(plan.desired) == 2
    assert len(plan.undesired) == 16


def test_an_interrupted_search_is_continued_to_the_same_points(search, tmp_path):
    whole, _ = run(search())
    wanted = [(p.number, p.assignment, p.target) for p in read_search(whole).points]
    folder = whole.ledger.folder
    folder.rename(tmp_path / "whole")
    plan = search()
    while (current := next_round(plan, set())) is not None:
        record_asks(current)
        for name in current.to_run[:5]:  # and then the driver dies
            train(current, name)
        plan = search()
    found = [(p.number, p.assignment, p.target) for p in read_search(plan).points]
    assert found == wanted


def test_a_failed_replicate_is_left_alone_in_this_call_and_tried_again_in_the_next(search):
    first = search()
    bad = first.to_run[0]
    plan, rounds = run(first, {bad: "failed"})
    assert sum(bad in names for names in rounds) == 1
    assert plan.states[bad].status == "failed"
    again = search()
    assert again.to_run == [bad]
    assert again.asks == []
    _, rounds = run(again)
    assert bad in rounds[0]


def test_a_diverged_seed_counts_with_the_loss_before_the_first_step(search):
    plan = search()
    names = plan.to_run
    point = read_search(run(plan, {names[0]: "diverged"})[0]).points[0]
    found = read_search(search())
    seeds = found.by_seed
    assert seeds[names[0]] == [6.0] * 4
    other = seeds[f"{point.cell.cell_id}-s1"][0]
    assert found.losses[0][0] == pytest.approx((6.0 + other) / 2)


def test_a_point_whose_seeds_all_diverged_never_goes_on(search):
    plan, _ = run(search(), dict.fromkeys(search().to_run, "diverged"))
    found = read_search(plan)
    assert all(found.points[number].target == 0 for number in range(3))
    assert {t.values[0] for t in told(found)[:3]} == {6.0}


def test_more_seeds_extend_every_point_that_is_still_in_the_race(search):
    run(search())
    plan = search("seeds=range(3)")
    assert {plan.desired[name].seed for name in plan.to_run} == {2}
    assert len(plan.to_run) == 9
    plan, _ = run(plan)
    found = read_search(plan)
    assert [len(losses) for losses in found.losses] == [9, 3, 1, 1]
    (best,) = found.losses[-1]
    assert [len(found.by_seed[name]) for name in found.names(found.points[best])] == [4, 4, 4]


def test_more_trials_ask_for_more_points_under_the_same_name(search):
    run(search())
    plan, _ = run(search("search.trials=12"))
    assert len(read_search(plan).points) == 12


def test_a_narrowed_space_forgets_the_points_outside_it(search):
    run(search("search.asha=null"))
    found = read_search(search("search.asha=null", "model.mixer=softmax,linear"))
    assert {p.assignment["model.mixer"] for p in found.points} >= {"softmax"}
    assert "deltanet" not in {p.assignment["model.mixer"] for p in found.points}


def test_without_halving_every_point_is_trained_to_the_end(search):
    plan, rounds = run(search("search.asha=null"))
    assert [len(names) for names in rounds] == [6, 6, 6]
    assert len(plan.desired) == 18
    assert plan.pause_steps == {}
    assert all(item.stopped_at is None for item in told(read_search(plan)))


def test_other_rungs_under_the_same_name_are_refused(search):
    run(search())
    with pytest.raises(ConfigError, match=r"judged with asha=.*use the same, or another name"):
        search("search.asha.reduction=2")


def test_another_base_under_the_same_name_is_refused(search):
    run(search())
    with pytest.raises(ConfigError, match=r"clip_norm: the default → 0\.5"):
        search("clip_norm=0.5")


def test_what_plan_says_is_json_with_the_points(search):
    fresh = search_json(search())
    assert json.loads(json.dumps(fresh)) == fresh
    assert (fresh["trials"], fresh["asked"], len(fresh["next"])) == (9, 0, 3)
    assert fresh["rungs_tokens"] == [1024, 3072, 9216, 16384]
    plan, _ = run(search())
    ended = search_json(plan)
    assert len(ended["points"]) == 9
    assert sum(point["is_finished"] for point in ended["points"]) == 1


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["purpose=compare"], "without a sampler or early stopping; remove search"),
        (["search.asha.min_tokens=16384"], "must be less than budget.tokens=16384"),
        (["search.asha.min_tokens=100"], "rungs need a step each"),
        (["search.asha.reduction=1"], "search.asha.reduction=1 must be at least 2"),
        (["search.sampler=gp"], "learns from finished ones only"),
        (["search.objectives=[loss,speed]"], "could stop the fastest points"),
        (["search.objectives=[loss,speed]", "search.asha=null"], "lanes.speed.enabled is false"),
        (["search.trials=0"], "search.trials=0 must be at least 1"),
        (["search.space.optimizer.lr=3"], "name the path itself"),
        (["clip_norm=0.5,1.0"], "a search has no axes"),
    ],
)
def test_a_search_that_cannot_mean_what_it_says_is_refused(search, overrides, sentence):
    with pytest.raises(ConfigError, match=sentence):
        search(*overrides)


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("search:", "axes: {optimizer: [adamw]}\nsearch:", "axes belongs to a grid"),
        ("model.mixer: [", "model.mixr: [", "unknown key model.mixr; nearest: model.mixer"),
        ("optimizer.lr:", "budget.tokens:", "compare losses across budget.tokens"),
        ("low: 1e-3", "low: -1", "low=-1 must be positive with log: true"),
        ("[softmax, deltanet]", "[softmax, dltanet]", "dltanet"),
        ("[softmax, deltanet]", "[]", "at least one choice"),
        ("purpose: search", "purpose: measure", "remove search, or say purpose: search"),
    ],
)
def test_a_search_file_with_a_mistake_is_refused(search, before, after, sentence):
    with pytest.raises(ConfigError, match=sentence):
        search(text=SEARCH.replace(before, after))
