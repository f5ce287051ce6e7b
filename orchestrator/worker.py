"""What a worker process does with one job: journal, run, class failures, clean up, check itself.

Knows nothing of Ray: `orchestrator.sweep` calls `run_job` in a worker process, one job after
another while the process stays as it was when new.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib.util
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TextIO

import psutil

from orchestrator.config import trial_from_dict
from orchestrator.failures import (
    HANG_GRACE_SECONDS,
    TrialTerminatedError,
    TrialTimeoutError,
    classify,
    traceback_id,
)
from orchestrator.imports import importing
from orchestrator.job import Job, WorkerRetiredError
from orchestrator.journal import Journal
from orchestrator.leases import process_facts

TEST_TRAINER_VARIABLE = "SEEDFRONT_TEST_TRAINER"
"""Environment variable with the path of a Python file whose `run_trial` and `measure_speed` stand
in for ours. For tests of everything around a trial; no configuration can set it."""

HOST_MEMORY_DRIFT_BYTES = 2 * 2**30
"""Growth of resident memory over a worker's first finished job that retires it; allocators keep
some memory, so less than this is no sign of a leak."""
DEVICE_MEMORY_DRIFT_BYTES = 64 * 2**20
"""Growth of allocated device memory since a worker's first finished job that retires it. The first
job leaves some for good: on an H200 the workspaces of cuBLAS alone take 64 MiB."""
THREAD_DRIFT = 16
"""Additional threads that retire a worker; libraries start pools on first use."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a worker looked like after its first job, for the drift check."""

    host_bytes: int
    threads: int
    device_bytes: int


def run_job(job: Job, position: int) -> str:
    """Run one job and journal how it ended; returns its status.

    Args:
        job: what to do.
        position: jobs that this process ran before; 0 is fresh.

    Raises:
        WorkerRetiredError: the trial failed (the journal says how), so the process is not reused.
        OSError: the journal cannot be written, for example because the disk is full.
    """
    journal = Journal(Path(job.journal))
    facts = process_facts()
    try:
        journal.append(
            {
                "event": "claim",
                "lane": job.lane,
                **facts,
                "worker_id": f"{facts['host']}:{facts['pid']}",
                "worker_position": position,
                "micro_windows": job.micro_windows,
                **job.stamp,
            }
        )
        try:
            with _output_to(Path(job.folder) / "output.log", job) as log, _limits(job, log):
                return _run(job, journal)
        except Exception as error:  # noqa: BLE001 - whatever ended the trial is its outcome
            _journal_failure(job, journal, error)
            raise WorkerRetiredError(f"{job.replicate_id} failed; its journal says why") from None
    finally:
        journal.close()
        _release()


def _trainer() -> Any:
    """What trains: `orchestrator.trial`, or what `TEST_TRAINER_VARIABLE` puts in its place."""
    return _imported_trainer(os.environ.get(TEST_TRAINER_VARIABLE))


@functools.cache
def _imported_trainer(path: str | None) -> Any:
    # Once: to freeze what is there before each job would keep garbage of the jobs before.
    with importing():
        if path is not None:
            return _module_at(path)
        # Imported here, since a stand-in needs no torch, whose import takes seconds.
        from orchestrator import trial  # noqa: PLC0415

        return trial


def _module_at(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location("seedfront_test_trainer", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{TEST_TRAINER_VARIABLE}={path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _on_devices(job: Job) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`run_trial` and `measure_speed`, given the devices that a job has."""
    where: dict[str, Any] = {
        "device": job.device,
        "precision": job.precision,
        "threads": job.threads,
    }
    if job.ranks == 1:
        trainer = _trainer()
        runtime = trainer.Runtime(**where)
        return (
            functools.partial(trainer.run_trial, runtime=runtime),
            functools.partial(trainer.measure_speed, runtime=runtime),
        )
    from orchestrator import parallel  # noqa: PLC0415 - imports torch, as `trial` does

    runtimes = parallel.runtimes_of(**where, ranks=job.ranks)
    return (
        functools.partial(parallel.run_trial_on, runtimes),
        functools.partial(parallel.measure_speed_on, runtimes),
    )


def _run(job: Job, journal: Journal) -> str:
    config = trial_from_dict(job.config)
    if job.micro_windows is not None:
        config.batch.micro_windows = job.micro_windows
    train, measure_speed = _on_devices(job)
    data_folder = Path(job.data_folder)
    if job.lane == "speed":
        speed = measure_speed(
            config,
            seed=job.seed,
            data_folder=data_folder,
            steps=job.steps,
            warmup_steps=job.warmup_steps,
        )
        journal.append(
            {"event": "end", "status": "completed", "exclusive": True, **speed.as_fields()}
        )
        return "completed"
    checkpoints = Path(job.folder) / "checkpoints"
    outcome = train(
        config,
        seed=job.seed,
        data_folder=data_folder,
        journal=journal,
        checkpoint_folder=checkpoints,
        should_stop=lambda: False,
        pause_step=job.pause_step,
    )
    if outcome.status != "stopped":  # a trial with a result is never continued
        shutil.rmtree(checkpoints, ignore_errors=True)
    return str(outcome.status)


def _journal_failure(job: Job, journal: Journal, error: Exception) -> None:
    text = traceback.format_exc()
    # The journal is what counts: a log that cannot be written must not keep the end from it.
    with contextlib.suppress(OSError), (Path(job.folder) / "output.log").open("a") as log:
        log.write(text)
    journal.append(
        {
            "event": "end",
            "status": "failed",
            "failure_class": classify(error),
            "error": f"{type(error).__name__}: {error}"[:2000],
            "traceback": text[-20_000:],
            "traceback_id": traceback_id(error),
        }
    )


@contextlib.contextmanager
def _output_to(path: Path, job: Job) -> Iterator[TextIO]:
    """What the trial prints goes to its own log, also what C and CUDA code prints."""
    with path.open("a", encoding="utf-8") as log:
        log.write(f"{Path(job.journal).stem}: process {os.getpid()}\n")
        log.flush()
        saved = [(number, os.dup(number)) for number in (1, 2)]
        try:
            for number, _ in saved:
                os.dup2(log.fileno(), number)
            with contextlib.redirect_stdout(log), contextlib.redirect_stderr(log):
                yield log
        finally:
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)


@contextlib.contextmanager
def _limits(job: Job, log: TextIO) -> Iterator[None]:
    """SIGTERM and the trial's time limit end it as exceptions, so that its journal is closed.

    A trial that is stuck where Python code cannot be interrupted is ended `HANG_GRACE_SECONDS`
    later with its process; its log then says in which line.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(signum: int, frame: FrameType | None) -> None:
        raise TrialTerminatedError(f"the process got signal {signal.Signals(signum).name}")

    def time_out(signum: int, frame: FrameType | None) -> None:
        raise TrialTimeoutError(f"the attempt took longer than {job.max_seconds:g} s")

    before = [(n, signal.signal(n, handler)) for n, handler in ((signal.SIGTERM, terminate),)]
    if job.max_seconds is not None:
        before.append((signal.SIGALRM, signal.signal(signal.SIGALRM, time_out)))
        signal.setitimer(signal.ITIMER_REAL, job.max_seconds)
        hard_seconds = job.max_seconds + HANG_GRACE_SECONDS
        faulthandler.dump_traceback_later(hard_seconds, exit=True, file=log)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        for number, handler in before:
            signal.signal(number, handler)


def _release() -> None:
    """Drop what a trial left behind, so that the next one starts as in a new process."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is None:
        return
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if "torch._dynamo" in sys.modules:  # importing it to reset nothing takes seconds
        torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def baseline() -> Baseline:
    """This process as it is now."""
    process = psutil.Process()
    return Baseline(process.memory_info().rss, process.num_threads(), _device_bytes())


def drift(first: Baseline) -> str | None:
    """What has grown since the baseline beyond tolerance, in words; None if nothing has."""
    now = baseline()
    if now.host_bytes - first.host_bytes > HOST_MEMORY_DRIFT_BYTES:
        return f"host memory grew by {now.host_bytes - first.host_bytes} bytes"
    if now.threads - first.threads > THREAD_DRIFT:
        return f"{now.threads - first.threads} more threads"
    if now.device_bytes - first.device_bytes > DEVICE_MEMORY_DRIFT_BYTES:
        return f"allocated device memory grew by {now.device_bytes - first.device_bytes} bytes"
    return None


def _device_bytes() -> int:
    """Memory that torch holds on the current GPU; 0 without one, or before torch is imported."""
    torch = sys.modules.get("torch")
    return torch.cuda.memory_allocated() if torch and torch.cuda.is_available() else 0
