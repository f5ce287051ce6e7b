"""Whole searches and adaptive sweeps as a user runs them, on scripted trials with real Ray."""

import json
import signal

import pytest

from orchestrator.journal import read_events

pytestmark = pytest.mark.ray

SEARCH = """
name: fake
purpose: search
base:
  size: nano
  data: files
  data.sources: [text.jsonl]
  data.vocab_size: 300
  budget.tokens: 25600
  batch.tokens: 1280
  seq_len: 64
  eval.windows: 4
search:
  trials: 4
  batch: 4
  startup_trials: 3
  space:
    optimizer.lr: {low: 1e-4, high: 1e-2, log: true}
  asha: {min_tokens: 12800, reduction: 2}
seeds: [0, 1]
lanes: {speed: {enabled: false}}
"""


def write(fake, **script):
    fake.write([1e-3], [0], **script)
    (fake.folder / "fake.yaml").write_text(SEARCH)


def points(fake):
    return read_events(fake.sweep / "search.jsonl")[0]


def assert_halved(fake):
    """Every point was asked for once, the best ones are finished, the others wait at a rung."""
    events = points(fake)
    assert [e["number"] for e in events if e["event"] == "asked"] == list(range(4))
    trials, curves = fake.trials(), fake.curves()
    assert len(trials) == 8
    finished, waiting = (trials[trials["status"] == s] for s in ("completed", "pending"))
    promoted = {e["number"] for e in events if e["event"] == "promoted" and e["tokens"] == 25600}
    assert len(finished) == 2 * len(promoted) > 0
    assert finished["desired"].all()
    assert not waiting["desired"].any()
    # The scripted loss is lowest at the largest rate.
    assert finished["lr"].max() == trials["lr"].max()
    stopped = curves[curves["replicate_id"].isin(waiting.index)]
    assert set(stopped.groupby("replicate_id")["step"].max()) == {10}
    assert not curves.duplicated(["replicate_id", "step"]).any()


def test_a_search_beyond_its_limit_runs_when_overruled_and_then_has_nothing_to_do(fake):
    write(fake)
    beyond = ("price.max_gpu_hours=1e-5", "--yes")
    assert fake.call(*beyond) == 0, fake.said
    assert "measuring a few steps of 1 shapes" in fake.said
    assert_halved(fake)
    assert "points were trained to the end" in fake.said
    events = points(fake)
    assert fake.call(*beyond) == 0
    assert "nothing to do" in fake.said
    assert points(fake) == events


@pytest.mark.slow
def test_a_search_whose_driver_was_killed_goes_on_to_the_same_end(fake):
    write(fake, step_seconds=0.02)
    call = fake.start()
    fake.wait_for(fake.begun, call)
    call.send_signal(signal.SIGKILL)
    call.wait()
    assert fake.call() == 0, fake.said
    assert_halved(fake)


@pytest.mark.slow
def test_adaptive_seeds_are_added_by_the_same_call(fake):
    fake.write([1e-3, 2e-3], [0, 1])
    adaptive = {
        "effect": 0.001,
        "max_seeds": 4,
        "comparisons": [{"first": {"optimizer.lr": 1e-3}, "second": {"optimizer.lr": 2e-3}}],
    }
    with (fake.folder / "fake.yaml").open("a") as file:
        file.write(f"adaptive: {json.dumps(adaptive)}\n")
    assert fake.call() == 0, fake.said
    # The scripted losses differ by one constant, so two seeds show nothing and three show it.
    assert sorted(fake.trials()["seed"]) == [0, 0, 1, 1, 2, 2]
    assert "{optimizer.lr: 0.001} - {optimizer.lr: 0.002}: decided" in fake.said
    fake.assert_consistent(6)
