"""A worker process: how it journals what ends a trial, and what retires it."""

import gc
import os
import sys
from dataclasses import asdict

import pytest

from orchestrator import imports, trial, worker
from orchestrator.config import RetriesConfig, TrialConfig, trial_to_dict
from orchestrator.errors import LedgerError
from orchestrator.failures import classify, grants_retry
from orchestrator.job import Job, WorkerRetiredError
from orchestrator.journal import last_event, opening
from orchestrator.worker import run_job


def job(folder):
    return Job(
        lane="loss",
        replicate_id="cabc-s0",
        seed=0,
        config=trial_to_dict(TrialConfig()),
        journal=str(folder / "attempt-0001.jsonl"),
        folder=str(folder),
        data_folder=str(folder / "nowhere"),
        device="cpu",
        precision="fp32",
        threads=1,
        steps=2,
        warmup_steps=1,
        micro_windows=None,
        max_seconds=None,
        stamp={"git_commit": "abc"},
    )


def test_a_trial_that_raises_is_journalled_and_retires_its_worker(tmp_path):
    with pytest.raises(WorkerRetiredError, match="cabc-s0"):
        run_job(job(tmp_path), position=3)
    end = last_event(tmp_path / "attempt-0001.jsonl")
    assert (end["event"], end["status"]) == ("end", "failed")
    assert end["failure_class"] == "data"
    assert "nowhere" in end["error"]
    assert "Traceback" in end["traceback"]
    assert "Traceback" in (tmp_path / "output.log").read_text()
    claim = opening(tmp_path / "attempt-0001.jsonl")
    assert (claim["worker_position"], claim["git_commit"], claim["pid"]) == (3, "abc", os.getpid())


def test_what_a_trial_prints_is_in_its_own_log(tmp_path, monkeypatch):
    def print_and_fail(*arguments, **options):
        sys.stdout.write("hello from the trial\n")
        raise MemoryError("too much")

    monkeypatch.setattr(trial, "run_trial", print_and_fail)
    with pytest.raises(WorkerRetiredError):
        run_job(job(tmp_path), position=0)
    assert "hello from the trial" in (tmp_path / "output.log").read_text()
    assert last_event(tmp_path / "attempt-0001.jsonl")["failure_class"] == "oom_host"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), "oom_host"),
        (type("OutOfMemoryError", (RuntimeError,), {})(), "oom_gpu"),
        (ValueError("bug"), "user_bug"),
        (LedgerError("bug"), "user_bug"),
    ],
    ids=["host", "gpu", "bug", "ours"],
)
def test_an_exception_has_one_class(error, expected):
    assert classify(error) == expected


def test_retries_are_counted_and_a_result_is_never_repeated():
    retries = RetriesConfig(preempted=2, oom_host=1)
    assert [grants_retry(retries, ["preempted"] * n) for n in (1, 2, 3)] == [True, True, False]
    assert grants_retry(retries, ["preempted", "preempted", "oom_host"])
    assert not grants_retry(retries, ["oom_gpu", "oom_host"])
    assert not grants_retry(retries, ["user_bug"])
    assert not grants_retry(retries, ["diverged"])


def test_no_retries_at_all_can_be_asked_for():
    none = RetriesConfig(**dict.fromkeys(asdict(RetriesConfig()), 0))
    assert not any(grants_retry(none, [name]) for name in asdict(none))


def test_what_a_worker_imports_is_frozen_by_its_first_job_alone(monkeypatch):
    calls = []
    monkeypatch.setattr(imports.gc, "freeze", lambda: calls.append("freeze"))
    worker._imported_trainer.cache_clear()
    assert worker._trainer() is worker._trainer()
    assert calls == ["freeze"]
    assert gc.isenabled()


def test_nothing_is_collected_while_importing_and_blocks_may_be_nested(monkeypatch):
    calls = []
    monkeypatch.setattr(imports.gc, "freeze", lambda: calls.append("freeze"))
    with imports.importing():
        with imports.importing():
            assert not gc.isenabled()
        assert not gc.isenabled()
        assert calls == []
    assert gc.isenabled()
    assert calls == ["freeze"]


def test_a_failed_import_leaves_the_collector_on(monkeypatch):
    monkeypatch.setattr(imports.gc, "freeze", lambda: None)
    with pytest.raises(ImportError), imports.importing():
        raise ImportError("no such package")
    assert gc.isenabled()


def test_a_worker_that_grew_is_retired(monkeypatch):
    first = worker.baseline()
    assert worker.drift(first) is None
    monkeypatch.setattr(worker, "HOST_MEMORY_DRIFT_BYTES", -(2**40))
    assert "host memory" in worker.drift(first)


def test_a_worker_keeps_what_its_first_job_left_on_the_device(monkeypatch):
    monkeypatch.setattr(worker, "_device_bytes", lambda: 70 * 2**20)  # two cuBLAS workspaces
    first = worker.baseline()
    assert worker.drift(first) is None
    monkeypatch.setattr(worker, "_device_bytes", lambda: 140 * 2**20)
    assert worker.drift(first) == f"allocated device memory grew by {70 * 2**20} bytes"
