"""What a worker process does with one job: journal, run, class failures, clean up, check itself.

Knows nothing of Ray: `orchestrator.sweep` calls `run_job` in a worker process, one job after
another while the process stays as it was when new.
"""

import contextlib
import gc
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil
import torch

from orchestrator.config import trial_from_dict
from orchestrator.failures import TrialTerminatedError, classify
from orchestrator.job import Job, WorkerRetiredError
from orchestrator.ledger import Journal, process_facts
from orchestrator.trial import Runtime, measure_speed, run_trial

HOST_MEMORY_DRIFT_BYTES = 2 * 2**30
"""Growth of resident memory over a worker's first finished job that retires it; allocators keep
some memory, so less than this is no sign of a leak."""
DEVICE_MEMORY_DRIFT_BYTES = 64 * 2**20
"""Device memory still allocated after clean-up that retires a worker."""
THREAD_DRIFT = 16
"""Additional threads that retire a worker; libraries start pools on first use."""


@dataclass(frozen=True, slots=True)
class Baseline:
    """What a worker looked like after its first job, for the drift check."""

    host_bytes: int
    threads: int


def run_job(job: Job, position: int) -> str:
    """Run one job and journal how it ended; returns its status.

    Args:
        job: what to do.
        position: jobs that this process ran before; 0 is fresh.

    Raises:
        WorkerRetiredError: the trial failed (the journal says how), so the process is not reused.
    """
    journal = Journal(Path(job.journal))
    facts = process_facts()
    journal.append(
        {
            "event": "claim",
            "lane": job.lane,
            **facts,
            "worker_id": f"{facts['host']}:{facts['pid']}",
            "worker_position": position,
            **job.stamp,
        }
    )
    try:
        with _output_to(Path(job.folder) / "output.log"), _terminable():
            return _run(job, journal)
    except Exception as error:  # noqa: BLE001 - whatever ended the trial is its outcome
        _journal_failure(job, journal, error)
        raise WorkerRetiredError(f"{job.replicate_id} failed; its journal says why") from None
    finally:
        journal.close()
        _release()


def _run(job: Job, journal: Journal) -> str:
    config = trial_from_dict(job.config)
    runtime = Runtime(device=job.device, precision=job.precision, threads=job.threads)
    data_folder = Path(job.data_folder)
    if job.lane == "speed":
        speed = measure_speed(
            config,
            seed=job.seed,
            data_folder=data_folder,
            runtime=runtime,
            steps=job.steps,
            warmup_steps=job.warmup_steps,
        )
        journal.append(
            {"event": "end", "status": "completed", "exclusive": True, **speed.as_fields()}
        )
        return "completed"
    checkpoints = Path(job.folder) / "checkpoints"
    outcome = run_trial(
        config,
        seed=job.seed,
        data_folder=data_folder,
        runtime=runtime,
        journal=journal,
        checkpoint_folder=checkpoints,
        should_stop=lambda: False,
    )
    shutil.rmtree(checkpoints, ignore_errors=True)  # a trial with a result is never continued
    return outcome.status


def _journal_failure(job: Job, journal: Journal, error: Exception) -> None:
    text = traceback.format_exc()
    with (Path(job.folder) / "output.log").open("a", encoding="utf-8") as log:
        log.write(text)
    journal.append(
        {
            "event": "end",
            "status": "failed",
            "failure_class": classify(error),
            "error": f"{type(error).__name__}: {error}"[:2000],
            "traceback": text[-20_000:],
        }
    )


@contextlib.contextmanager
def _output_to(path: Path) -> Iterator[None]:
    """What the trial prints goes to its own log."""
    with (
        path.open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        yield


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the trial as an exception, so that its journal is closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(signum: int, frame: FrameType | None) -> None:
        raise TrialTerminatedError(f"the process got signal {signal.Signals(signum).name}")

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _release() -> None:
    """Drop what a trial left behind, so that the next one starts as in a new process."""
    gc.collect()
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
    return Baseline(process.memory_info().rss, process.num_threads())


def drift(first: Baseline) -> str | None:
    """What has grown since the baseline beyond tolerance, in words; None if nothing has."""
    now = baseline()
    if now.host_bytes - first.host_bytes > HOST_MEMORY_DRIFT_BYTES:
        return f"host memory grew by {now.host_bytes - first.host_bytes} bytes"
    if now.threads - first.threads > THREAD_DRIFT:
        return f"{now.threads - first.threads} more threads"
    if torch.cuda.is_available() and torch.cuda.memory_allocated() > DEVICE_MEMORY_DRIFT_BYTES:
        return f"{torch.cuda.memory_allocated()} bytes of device memory still allocated"
    return None
