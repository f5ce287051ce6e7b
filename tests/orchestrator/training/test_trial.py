"""Whole trials: their events and outcome, determinism, resumption, divergence, speed."""

import dataclasses
import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from models.configs import MIXER_CONFIGS
from orchestrator.config import (
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    trial_from_dict,
    trial_to_dict,
)
from orchestrator.identity import canonical_json
from orchestrator.records import CURVE_COLUMNS, TRIAL_COLUMNS
from orchestrator.training.checkpoint import TENSORS_FILE, CheckpointMismatchError
from orchestrator.training.optim.configs import AdamWConfig, MuonConfig
from orchestrator.training.runtime import Runtime
from orchestrator.training.schedule import KINDS, ScheduleConfig
from orchestrator.training.session import named_generator, open_session
from orchestrator.trial import ListJournal, NullJournal, TrialOutcome, measure_speed, run_trial

# Neither repeats from run to run.
TIMES = ("wall_seconds", "device_seconds", "peak_memory_bytes")

RUINOUS = {
    "optimizer": AdamWConfig(lr=3e38),
    "schedule": ScheduleConfig(kind="constant", warmup_fraction=0.0),
}


def run(config, data_folder, *, seed: int = 0, journal=None, **changes: Any) -> TrialOutcome:
    return run_trial(
        config,
        seed=seed,
        data_folder=data_folder,
        runtime=Runtime(),
        journal=journal or NullJournal(),
        **changes,
    )


def repeatable(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in TIMES}


def stop_after(num_steps: int):
    """A `should_stop` that becomes true when it is asked for the n-th time."""
    asked = iter(range(1, num_steps))
    return lambda: next(asked, None) is None


def test_the_events_of_a_trial_are_start_steps_and_end(tiny_trial, data_folder):
    journal = ListJournal()
    outcome = run(tiny_trial(), data_folder, journal=journal)
    kinds = [event["event"] for event in journal.events]
    assert kinds == ["start", *["step"] * 4, "end"]
    assert [event["step"] for event in journal.of("step")] == [1, 5, 10, 12]
    assert journal.events[-1] == {"event": "end", **outcome.as_fields()}
    for event in journal.events:
        json.dumps(event, allow_nan=False)


def test_events_use_the_columns_of_the_records(tiny_trial, data_folder):
    journal = ListJournal()
    run(tiny_trial(mixer="gated_deltanet", stack="hybrid"), data_folder, journal=journal)
    measured = set(journal.events[0]) | set(journal.events[-1])
    assert {
        "status",
        "steps",
        "tokens",
        "init_loss_nats",
        "val_loss_nats",
        "val_loss_se",
        "val_bits_per_byte",
        "train_loss_nats",
        "applied_lr_peak",
        "unigram_loss_nats",
        "eval_id",
        "data_id",
        "data_seed",
        "params_total",
        "params_non_embedding",
        "flops_per_token",
        "state_bytes",
        "kv_bytes_per_token",
        "kernel_impl",
        "peak_memory_bytes",
        "wall_seconds",
        "device_seconds",
        "device_name",
        "precision",
        "threads",
        "torch_version",
    } <= measured & set(TRIAL_COLUMNS)
    own = {"sweep", "replicate_id", "attempt"}
    assert set(CURVE_COLUMNS) - own <= set(journal.of("step")[0])
    start = journal.events[0]
    assert start["resumed_from_step"] == 0
    assert list(start["decay_quantiles"]) == ["blocks.0.mixer.decay"]
    assert start["schedule_quartiles"]["adam"] == pytest.approx([0.0, 0.02, 0.02, 0.02, 0.002])
    assert [row["name"] for row in start["parameter_rows"]] == [
        line.split()[0] for line in start["parameter_table"].splitlines()[1:]
    ]


def test_a_trial_learns_and_says_so(tiny_trial, data_folder):
    journal = ListJournal()
    outcome = run(tiny_trial(steps=60), data_folder, journal=journal)
    assert outcome.status == "completed"
    assert outcome.failure_class is None
    assert (outcome.steps, outcome.tokens) == (60, 3840)
    assert outcome.init_loss_nats == pytest.approx(math.log(300), abs=0.1)
    assert outcome.val_loss_nats < outcome.init_loss_nats - 1.5
    assert outcome.train_loss_nats < outcome.init_loss_nats - 1.5
    assert outcome.val_loss_nats == journal.of("step")[-1]["val_loss_nats"]
    assert outcome.val_loss_se > 0
    assert outcome.applied_lr_peak == 0.02
    assert outcome.peak_memory_bytes > 1e7


@pytest.mark.parametrize("kind", KINDS)
def test_a_trial_runs_under_every_schedule(tiny_trial, data_folder, kind):
    decay = 3.0 if kind == "collapsed" else 0.5
    schedule = ScheduleConfig(kind=kind, warmup_fraction=0.25, decay_fraction=decay)
    optimizer = MuonConfig(lr=0.02, adam_lr=0.01, adam_schedule="constant")
    config = tiny_trial(steps=4, schedule=schedule, optimizer=optimizer)
    journal = ListJournal()
    run_trial(config, seed=0, data_folder=data_folder, runtime=Runtime(), journal=journal)
    assert journal.events[-1]["status"] == "completed"
    assert journal.events[0]["schedule_quartiles"]["adam"] == [0.0, 0.01, 0.01, 0.01, 0.01]


def test_the_training_loss_is_the_mean_of_the_last_tenth(tiny_trial, data_folder):
    journal = ListJournal()
    config = tiny_trial(steps=25, log=LogConfig(every_steps=1))
    outcome = run(config, data_folder, journal=journal)
    losses = [event["train_loss_nats"] for event in journal.of("step")]
    assert outcome.train_loss_nats == pytest.approx(np.mean(losses[-3:]), rel=1e-12)


@pytest.mark.parametrize("mixer", MIXER_CONFIGS)
def test_two_runs_with_one_seed_are_equal_bit_for_bit(tiny_trial, data_folder, mixer):
    journals = ListJournal(), ListJournal()
    outcomes = [run(tiny_trial(mixer=mixer), data_folder, journal=own) for own in journals]
    assert repeatable(outcomes[0].as_fields()) == repeatable(outcomes[1].as_fields())
    steps = [[repeatable(event) for event in own.of("step")] for own in journals]
    assert steps[0] == steps[1]


def test_a_cell_built_again_from_its_record_is_the_same_to_the_bit(tiny_trial, data_folder):
    config = tiny_trial(mixer="gated_deltanet", stack="hybrid", optimizer=MuonConfig())
    recorded = trial_from_dict(json.loads(canonical_json(trial_to_dict(config))))
    sessions = [
        open_session(each, seed=5, data_folder=data_folder, runtime=Runtime())
        for each in (config, recorded)
    ]
    first, second = ({**session.facts(), "loss": session.evaluate()} for session in sessions)
    assert first == second
    pairs = zip(*(session.model.state_dict().items() for session in sessions), strict=True)
    for (name, tensor), (other_name, other) in pairs:
        assert name == other_name
        assert torch.equal(tensor, other), name


@pytest.mark.slow
def test_a_compiled_and_recomputing_trial_ends_near_the_plain_one(tiny_trial, data_folder):
    config = tiny_trial(mixer="deltanet", steps=6)
    modes = {"recompute": True, "compile": True}
    compiled = dataclasses.replace(config, model=dataclasses.replace(config.model, **modes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        found = run(compiled, data_folder).val_loss_nats
    assert found == pytest.approx(run(config, data_folder).val_loss_nats, rel=1e-4)


def test_another_seed_is_another_trial(tiny_trial, data_folder):
    first, second = (run(tiny_trial(), data_folder, seed=seed) for seed in (0, 1))
    assert first.val_loss_nats != second.val_loss_nats
    assert first.init_loss_nats != second.init_loss_nats


def test_the_data_seed_fixes_the_order_for_every_seed(tiny_trial, data_folder):
    orders = []
    for seed, data_seed in [(0, None), (1, None), (0, 1), (5, 0)]:
        config = tiny_trial(data_seed=data_seed)
        session = open_session(config, seed=seed, data_folder=data_folder, runtime=Runtime())
        orders.append(session.batches.window_ids(0).tolist())
    assert orders[1] == orders[2]
    assert orders[0] == orders[3]
    assert orders[0] != orders[1]


def test_the_global_generators_are_neither_read_nor_advanced(tiny_trial, data_folder):
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    first = run(tiny_trial(), data_folder)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002
    torch.manual_seed(2)
    assert run(tiny_trial(), data_folder).val_loss_nats == first.val_loss_nats


def test_generators_differ_by_purpose_and_seed():
    draws = {
        (purpose, seed): torch.rand(2, generator=named_generator(seed, purpose)).tolist()
        for purpose in ("init", "other")
        for seed in (0, 1)
    }
    assert len({tuple(values) for values in draws.values()}) == 4
    assert torch.rand(2, generator=named_generator(0, "init")).tolist() == draws["init", 0]


OPTIMIZERS = pytest.mark.parametrize(
    "optimizer",
    [AdamWConfig(lr=0.02), MuonConfig(lr=0.02, adam_lr=0.02)],
    ids=["adamw", "muon"],
)


@OPTIMIZERS
@pytest.mark.parametrize("cut", [1, 4, 7, 11])
def test_stopped_and_continued_equals_uninterrupted(
    tiny_trial, data_folder, tmp_path, optimizer, cut
):
    config = tiny_trial(optimizer=optimizer, mixer="deltanet", log=LogConfig(every_steps=1))
    straight = ListJournal()
    expected = run(config, data_folder, journal=straight)
    first, second = ListJournal(), ListJournal()
    stopped = run(
        config,
        data_folder,
        journal=first,
        checkpoint_folder=tmp_path,
        should_stop=stop_after(cut),
    )
    assert (stopped.status, stopped.steps) == ("stopped", cut)
    assert stopped.val_loss_nats is None
    assert [event["event"] for event in first.events[-2:]] == ["checkpoint", "stop"]
    outcome = run(config, data_folder, journal=second, checkpoint_folder=tmp_path)
    assert second.events[0]["resumed_from_step"] == cut
    assert repeatable(outcome.as_fields()) == repeatable(expected.as_fields())
    steps = [repeatable(event) for event in first.of("step") + second.of("step")]
    assert steps == [repeatable(event) for event in straight.of("step")]


def test_a_trial_that_is_killed_twice_continues_from_its_checkpoints(
    tiny_trial, data_folder, tmp_path
):
    """Killed between checkpoints, so that steps are trained again, with the same numbers."""

    class KilledAt(ListJournal):
        def __init__(self, step: int) -> None:
            super().__init__()
            self.step = step

        def append(self, event: dict[str, Any]) -> None:
            super().append(event)
            if event["event"] == "step" and event["step"] == self.step:
                raise InterruptedError

    config = tiny_trial(
        checkpoint=CheckpointConfig(every_steps=3),
        log=LogConfig(every_steps=1),
        eval=EvalConfig(windows=4, every_steps=4),
    )
    expected = ListJournal()
    run(config, data_folder, journal=expected)
    attempts = [KilledAt(5), KilledAt(11), ListJournal()]
    for journal in attempts[:2]:
        with pytest.raises(InterruptedError):
            run(config, data_folder, journal=journal, checkpoint_folder=tmp_path)
    run(config, data_folder, journal=attempts[2], checkpoint_folder=tmp_path)
    assert [journal.events[0]["resumed_from_step"] for journal in attempts] == [0, 3, 9]
    steps = {
        event["step"]: repeatable(event) for journal in attempts for event in journal.of("step")
    }
    assert list(steps.values()) == [repeatable(event) for event in expected.of("step")]
    end, wanted = attempts[2].events[-1], expected.events[-1]
    assert repeatable(end) == repeatable(wanted)
    assert end["wall_seconds"] > attempts[2].of("step")[-1]["wall_seconds"]


def test_a_damaged_checkpoint_costs_steps_but_no_result(tiny_trial, data_folder, tmp_path):
    config = tiny_trial(checkpoint=CheckpointConfig(every_steps=3))
    expected = run(config, data_folder)
    run(config, data_folder, checkpoint_folder=tmp_path, should_stop=stop_after(6))
    newest = tmp_path / "step-00000006" / TENSORS_FILE
    newest.write_bytes(newest.read_bytes()[:-100])
    journal = ListJournal()
    outcome = run(config, data_folder, journal=journal, checkpoint_folder=tmp_path)
    assert journal.events[0]["resumed_from_step"] == 3
    assert "step-00000006" in journal.events[0]["checkpoint_notes"][0]
    assert repeatable(outcome.as_fields()) == repeatable(expected.as_fields())


def test_checkpoints_come_at_their_cadence_and_not_after_the_last_step(
    tiny_trial, data_folder, tmp_path
):
    journal = ListJournal()
    config = tiny_trial(checkpoint=CheckpointConfig(every_steps=4))
    run(config, data_folder, journal=journal, checkpoint_folder=tmp_path)
    assert [event["step"] for event in journal.of("checkpoint")] == [4, 8]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000008"]


def test_a_checkpoint_of_another_trial_is_refused(tiny_trial, data_folder, tmp_path):
    run(tiny_trial(), data_folder, checkpoint_folder=tmp_path, should_stop=stop_after(2))
    other = tiny_trial(optimizer=AdamWConfig(lr=0.01))
    with pytest.raises(CheckpointMismatchError, match=r"optimizer\.lr is 0\.02 there and 0\.01"):
        run(other, data_folder, checkpoint_folder=tmp_path)
    with pytest.raises(CheckpointMismatchError, match="seed is 0 there and 1 here"):
        run(tiny_trial(), data_folder, seed=1, checkpoint_folder=tmp_path)


@pytest.mark.parametrize(
    ("changes", "step"), [(RUINOUS, 2), ({"diverged_above_nats": 2.0}, 1)], ids=["nan", "cap"]
)
def test_a_diverged_trial_is_an_outcome(tiny_trial, data_folder, tmp_path, changes, step):
    journal = ListJournal()
    config = tiny_trial(steps=200, checkpoint=CheckpointConfig(every_steps=1), **changes)
    outcome = run(config, data_folder, journal=journal, checkpoint_folder=tmp_path)
    assert (outcome.status, outcome.failure_class) == ("diverged", "diverged")
    assert outcome.steps == step
    assert outcome.diverged_because
    assert outcome.val_loss_nats is outcome.val_bits_per_byte is outcome.train_loss_nats is None
    assert journal.of("step")[-1]["step"] == step
    json.dumps(journal.events[-1], allow_nan=False)
    # Of the sound steps only: weights that have diverged are no state to continue from.
    assert len(list(tmp_path.iterdir())) == step - 1


def test_a_programming_error_propagates(tiny_trial, data_folder):
    class Broken:
        def append(self, event: dict[str, Any]) -> None:
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        run(tiny_trial(), data_folder, journal=Broken())


def test_the_number_of_threads_is_applied_and_put_back(tiny_trial, data_folder):
    before = torch.get_num_threads()
    seen = []

    class Watching(NullJournal):
        def append(self, event: dict[str, Any]) -> None:
            seen.append(torch.get_num_threads())

    run_trial(
        tiny_trial(steps=1),
        seed=0,
        data_folder=data_folder,
        runtime=Runtime(threads=2),
        journal=Watching(),
    )
    assert set(seen) == {2}
    assert torch.get_num_threads() == before


def test_speed_is_that_of_whole_steps(tiny_trial, data_folder):
    outcome = measure_speed(
        tiny_trial(), seed=0, data_folder=data_folder, runtime=Runtime(), steps=15, warmup_steps=3
    )
    assert (outcome.steps, outcome.warmup_steps) == (15, 3)
    assert outcome.tokens_per_second == pytest.approx(64 / outcome.step_seconds_median)
    assert 0 < outcome.step_seconds_lower <= outcome.step_seconds_median
    assert outcome.step_seconds_median <= outcome.step_seconds_upper
    assert 0 < outcome.optimizer_seconds_median < outcome.step_seconds_median
    assert outcome.device_name
    assert {"tokens_per_second", "step_seconds_median", "device_name", "kernel_impl"} <= set(
        outcome.as_fields()
    ) & set(TRIAL_COLUMNS)


@pytest.mark.parametrize(("steps", "warmup_steps"), [(0, 1), (1, -1)])
def test_speed_without_a_timed_step_is_refused(tiny_trial, data_folder, steps, warmup_steps):
    with pytest.raises(ValueError, match="must be at least 1 and"):
        measure_speed(
            tiny_trial(),
            seed=0,
            data_folder=data_folder,
            runtime=Runtime(),
            steps=steps,
            warmup_steps=warmup_steps,
        )


@pytest.mark.parametrize(
    ("field", "value"),
    [("device", "gpu"), ("device", "cuda:x"), ("precision", "fp16"), ("threads", 0)],
)
def test_an_impossible_runtime_is_refused(field, value):
    with pytest.raises(ValueError, match=f"{field}="):
        Runtime(**{field: value})


def test_a_negative_seed_is_refused(tiny_trial, data_folder):
    with pytest.raises(ValueError, match="seed=-1 must be at least 0"):
        run(tiny_trial(), data_folder, seed=-1)


def test_bf16_products_leave_weights_and_state_in_fp32(tiny_trial, data_folder):
    runtime = Runtime(precision="bf16")
    session = open_session(tiny_trial(), seed=0, data_folder=data_folder, runtime=runtime)
    exact = open_session(tiny_trial(), seed=0, data_folder=data_folder, runtime=Runtime())
    scored, wanted = session.evaluate().loss_nats, exact.evaluate().loss_nats
    assert scored != wanted
    assert scored == pytest.approx(wanted, rel=2e-3)
    assert {p.dtype for p in session.model.parameters()} == {torch.float32}
    assert {t.dtype for t in session.optimizer.state_dict().values()} == {torch.float32}
