"""One trial on several devices of one machine: a process for each, data parallel.

The first rank is the calling process, with the journal; the others are started here and follow it.
Losses, weights and checkpoints are those of a single process that reads the step's windows in as
many passes, up to the order in which gradients are added.
"""

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from orchestrator.config import TrialConfig, trial_from_dict, trial_to_dict
from orchestrator.training.journal import JournalSink, NullJournal
from orchestrator.training.ranks import ALONE, ProcessGroup, Ranks
from orchestrator.training.runtime import Runtime
from orchestrator.training.speed import SpeedOutcome, measure_speed
from orchestrator.trial import TrialOutcome, run_trial

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others: longer than writing the checkpoint of a large model."""

ECHO_SECONDS = 2.0
"""How long a broken connection waits for the process that broke it to be gone."""

Outcome = TypeVar("Outcome")


def run_trial_on(
    runtimes: Sequence[Runtime],
    config: TrialConfig,
    *,
    seed: int,
    data_folder: Path,
    journal: JournalSink,
    checkpoint_folder: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> TrialOutcome:
    """`orchestrator.trial.run_trial` on one device or on several.

    Args:
        runtimes: of each rank; all on CPUs or each on a CUDA device of its own.
        config: of the trial; the windows of a step must divide evenly over the ranks.
        seed: as `run_trial`'s.
        data_folder: as `run_trial`'s.
        journal: as `run_trial`'s.
        checkpoint_folder: as `run_trial`'s.
        should_stop: as `run_trial`'s.

    Raises:
        ValueError: no runtime, devices that don't go together, or what `run_trial` refuses.
        RuntimeError: another rank ended before its time.
    """

    def lead(ranks: Ranks) -> TrialOutcome:
        return run_trial(
            config,
            seed=seed,
            data_folder=data_folder,
            runtime=runtimes[0],
            journal=journal,
            checkpoint_folder=checkpoint_folder,
            should_stop=should_stop,
            ranks=ranks,
        )

    follow = {"seed": seed, "data_folder": data_folder, "checkpoint_folder": checkpoint_folder}
    return _on_ranks(runtimes, config, lead, "trial", follow)


def measure_speed_on(
    runtimes: Sequence[Runtime],
    config: TrialConfig,
    *,
    seed: int,
    data_folder: Path,
    steps: int,
    warmup_steps: int,
) -> SpeedOutcome:
    """`orchestrator.trial.measure_speed` on one device or on several; timed by the first rank.

    Args:
        runtimes: of each rank.
        config: of the trial.
        seed: as `measure_speed`'s.
        data_folder: as `measure_speed`'s.
        steps: as `measure_speed`'s.
        warmup_steps: as `measure_speed`'s.

    Raises:
        ValueError: no runtime, devices that don't go together, or what `measure_speed` refuses.
        RuntimeError: another rank ended before its time.
    """
    follow: dict[str, Any] = {
        "seed": seed,
        "data_folder": data_folder,
        "steps": steps,
        "warmup_steps": warmup_steps,
    }

    def lead(ranks: Ranks) -> SpeedOutcome:
        return measure_speed(config, runtime=runtimes[0], ranks=ranks, **follow)

    return _on_ranks(runtimes, config, lead, "speed", follow)


def check_runtimes(runtimes: Sequence[Runtime], config: TrialConfig) -> None:
    """Refuses ranks that cannot train together.

    Raises:
        ValueError: none at all, different precisions or kinds of device, one CUDA device twice, or
            windows of a step that don't divide evenly over ranks and passes.
    """
    if not runtimes:
        raise ValueError("runtimes is empty: a trial needs at least one device")
    if len({(r.is_cuda, r.precision, r.threads) for r in runtimes}) > 1:
        raise ValueError(f"{runtimes=} must share kind of device, precision and threads")
    devices = [runtime.device for runtime in runtimes]
    if len(runtimes) > 1 and runtimes[0].is_cuda and len(set(devices)) < len(devices):
        raise ValueError(f"{devices=} must name each CUDA device once, as cuda:0, cuda:1, …")
    per_pass = len(runtimes) * (config.batch.micro_windows or 1)
    if config.windows_per_step % per_pass:
        raise ValueError(
            f"the {config.windows_per_step} windows of a step do not divide evenly over "
            f"{len(runtimes)} devices with batch.micro_windows={config.batch.micro_windows}"
        )


def _on_ranks(
    runtimes: Sequence[Runtime],
    config: TrialConfig,
    lead: Callable[[Ranks], Outcome],
    kind: str,
    follow: dict[str, Any],
) -> Outcome:
    check_runtimes(runtimes, config)
    if len(runtimes) == 1:
        return lead(ALONE)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        meeting = Path(folder) / "meeting"
        shared = (meeting, list(runtimes), kind, trial_to_dict(config), follow)
        with _followers(len(runtimes), shared), _joined(meeting, 0, runtimes) as ranks:
            return lead(ranks)


@contextlib.contextmanager
def _followers(world_size: int, shared: tuple[Any, ...]) -> Iterator[None]:
    """Starts the other ranks; ends them with the block, by force if it raises."""
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_follow, args=(rank, *shared), name=f"rank {rank}")
        for rank in range(1, world_size)
    ]
    for process in processes:
        process.start()
    try:
        yield
        for process in processes:
            process.join()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # A broken connection is only the echo of what ended another rank.
        _blame_followers(processes, error)
        raise
    finally:
        for process in processes:
            if process.is_alive():
                process.terminate()
            process.join()


def _blame_followers(processes: Sequence[SpawnProcess], error: RuntimeError) -> None:
    """Raises in the name of the rank that ended by itself, if one has."""
    # The connection breaks before the process has ended.
    wait([process.sentinel for process in processes], timeout=ECHO_SECONDS)
    for process in processes:
        if process.exitcode:
            raise RuntimeError(
                f"{process.name} ended with exit code {process.exitcode}; its traceback is in the "
                "output"
            ) from error


@contextlib.contextmanager
def _joined(meeting: Path, rank: int, runtimes: Sequence[Runtime]) -> Iterator[Ranks]:
    """Membership in the process group of these ranks."""
    runtime = runtimes[rank]
    if runtime.is_cuda:
        torch.cuda.set_device(runtime.torch_device)
    dist.init_process_group(
        "nccl" if runtime.is_cuda else "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=len(runtimes),
        timeout=TIMEOUT,
    )
    try:
        yield ProcessGroup(runtime.torch_device)
    finally:
        dist.destroy_process_group()


def _follow(
    rank: int,
    meeting: Path,
    runtimes: Sequence[Runtime],
    kind: str,
    config: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    """What another rank does: the same as the first, without a journal."""
    trial = trial_from_dict(config)
    with _joined(meeting, rank, runtimes) as ranks:
        if kind == "speed":
            measure_speed(trial, runtime=runtimes[rank], ranks=ranks, **arguments)
        else:
            run_trial(
                trial, runtime=runtimes[rank], journal=NullJournal(), ranks=ranks, **arguments
            )
