"""Two processes train as one does: same losses, same weights, one journal."""

import multiprocessing
from typing import Any

import pytest
import torch

from orchestrator.config import BatchConfig, EvalConfig, LogConfig
from orchestrator.parallel import check_runtimes, measure_speed_on, run_trial_on
from orchestrator.training.optim.configs import MuonConfig
from orchestrator.training.ranks import ALONE, BUCKET_NUMEL, _buckets
from orchestrator.training.runtime import Runtime
from orchestrator.trial import ListJournal, run_trial

TIMES = ("wall_seconds", "device_seconds", "peak_memory_bytes")
TWO = [Runtime(), Runtime()]


def repeatable(fields: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in TIMES}


OPTIONS = {
    "optimizer": MuonConfig(lr=0.02, adam_lr=0.02),
    "log": LogConfig(every_steps=1),
    "eval": EvalConfig(windows=7),
}


def run_in_passes(tiny_trial, data_folder) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Outcome and steps of one process that reads what two ranks read, one after the other."""
    journal = ListJournal()
    config = tiny_trial(batch=BatchConfig(tokens=64, micro_windows=2), **OPTIONS)
    outcome = run_trial(config, seed=0, data_folder=data_folder, runtime=Runtime(), journal=journal)
    return repeatable(outcome.as_fields()), [repeatable(event) for event in journal.of("step")]


def test_two_ranks_equal_one_that_reads_the_same_windows_in_two_passes(tiny_trial, data_folder):
    """Bit for bit: halves are exact in binary, and a sum of two has one order."""
    expected, expected_steps = run_in_passes(tiny_trial, data_folder)
    journal = ListJournal()
    outcome = run_trial_on(
        TWO, tiny_trial(**OPTIONS), seed=0, data_folder=data_folder, journal=journal
    )
    assert repeatable(outcome.as_fields()) == expected
    assert [repeatable(event) for event in journal.of("step")] == expected_steps
    assert journal.events[0]["ranks"] == 2
    assert outcome.device_seconds == 2 * outcome.wall_seconds


@pytest.mark.slow
def test_two_ranks_continue_from_their_checkpoint(tiny_trial, data_folder, tmp_path):
    expected, expected_steps = run_in_passes(tiny_trial, data_folder)
    journals = ListJournal(), ListJournal()
    asked = iter(range(1, 6))
    for journal, should_stop in zip(
        journals, (lambda: next(asked, None) is None, lambda: False), strict=True
    ):
        outcome = run_trial_on(
            TWO,
            tiny_trial(**OPTIONS),
            seed=0,
            data_folder=data_folder,
            journal=journal,
            checkpoint_folder=tmp_path,
            should_stop=should_stop,
        )
    assert journals[1].events[0]["resumed_from_step"] == 6
    assert repeatable(outcome.as_fields()) == expected
    steps = [repeatable(event) for own in journals for event in own.of("step")]
    assert steps == expected_steps


def test_one_runtime_needs_no_other_process(tiny_trial, data_folder):
    journal = ListJournal()
    outcome = run_trial_on(
        [Runtime()], tiny_trial(), seed=0, data_folder=data_folder, journal=journal
    )
    alone = run_trial(
        tiny_trial(), seed=0, data_folder=data_folder, runtime=Runtime(), journal=ListJournal()
    )
    assert repeatable(outcome.as_fields()) == repeatable(alone.as_fields())
    assert journal.events[0]["ranks"] == 1


class LeavingJournal(ListJournal):
    """Ends the other rank, as the system does when memory runs out, after the third step."""

    def append(self, event: dict[str, Any]) -> None:
        super().append(event)
        if event["event"] == "step" and event["step"] == 3:
            (child,) = multiprocessing.active_children()
            child.kill()


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_trial_by_its_name(tiny_trial, data_folder):
    with pytest.raises(RuntimeError, match="rank 1 ended with exit code -9"):
        run_trial_on(
            TWO,
            tiny_trial(log=LogConfig(every_steps=1)),
            seed=0,
            data_folder=data_folder,
            journal=LeavingJournal(),
        )
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_an_error_of_the_first_rank_ends_the_others(tiny_trial, data_folder):
    class Broken(ListJournal):
        def append(self, event: dict[str, Any]) -> None:
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        run_trial_on(TWO, tiny_trial(), seed=0, data_folder=data_folder, journal=Broken())
    assert multiprocessing.active_children() == []


@pytest.mark.slow
def test_speed_is_measured_on_all_ranks_together(tiny_trial, data_folder):
    outcome = measure_speed_on(
        TWO, tiny_trial(), seed=0, data_folder=data_folder, steps=3, warmup_steps=1
    )
    assert outcome.tokens_per_second == pytest.approx(64 / outcome.step_seconds_median)


@pytest.mark.parametrize(
    ("runtimes", "message"),
    [
        ([], "runtimes is empty"),
        ([Runtime(), Runtime(device="cuda")], "must share kind of device"),
        ([Runtime(), Runtime(precision="bf16")], "must share kind of device, precision"),
        ([Runtime(device="cuda:0")] * 2, "must name each CUDA device once"),
        ([Runtime()] * 3, "4 windows of a step do not divide evenly over 3 devices"),
    ],
)
def test_ranks_that_cannot_train_together_are_refused(tiny_trial, runtimes, message):
    with pytest.raises(ValueError, match=message):
        check_runtimes(runtimes, tiny_trial())


def test_buckets_keep_order_and_type_and_size():
    tensors = [
        torch.empty(BUCKET_NUMEL - 1, device="meta"),
        torch.empty(1, device="meta"),
        torch.empty(1, device="meta"),
        torch.empty(2, device="meta", dtype=torch.bfloat16),
        torch.empty(BUCKET_NUMEL + 5, device="meta", dtype=torch.bfloat16),
    ]
    assert [len(bucket) for bucket in _buckets(tensors)] == [2, 1, 1, 1]
    assert [tensor for bucket in _buckets(tensors) for tensor in bucket] == tensors


def test_a_rank_alone_agrees_with_itself():
    tensor = torch.ones(3)
    ALONE.average([tensor])
    ALONE.total(tensor)
    assert tensor.tolist() == [1.0, 1.0, 1.0]
    assert (ALONE.any(True), ALONE.any(False)) == (True, False)
