"""One trial on several devices of one machine: a process for each, data parallel.

The first rank is the calling process, with the journal; the others are started here and follow it.
Losses, weights and checkpoints are those of a single process that reads the step's windows in as
many passes, up to the order in which gradients are added. No rank outlives another: one that loses
the first ends by itself, and the first ends, by force if it is stuck, when it has lost another.
"""

import contextlib
import multiprocessing
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from orchestrator.config import TrialConfig, trial_from_dict, trial_to_dict
from orchestrator.failures import LOST_RANK_MARK, RankLostError, class_of_exit, classify
from orchestrator.training.journal import JournalSink, NullJournal
from orchestrator.training.ranks import ALONE, ProcessGroup, Ranks
from orchestrator.training.runtime import Runtime
from orchestrator.training.speed import SpeedOutcome, measure_speed
from orchestrator.trial import TrialOutcome, run_trial

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for the others: longer than writing the checkpoint of a large model."""

ECHO_SECONDS = 10.0
"""How long a broken connection waits for the process that broke it to say why, or to be gone."""

POLL_SECONDS = 2.0

STUCK_SECONDS = 60.0
"""How long after the end of another rank the first one may take to notice: gloo tells at once, but
NCCL, and a group that is still being made, wait for a peer that never comes."""

Outcome = TypeVar("Outcome")


def runtimes_of(device: str, precision: str, threads: int, ranks: int) -> list[Runtime]:
    """The runtimes of a trial's ranks: CPUs, or the first GPUs that this process sees.

    Args:
        device: `cpu` or `cuda`.
        precision: `fp32` or `bf16`.
        threads: torch threads of each rank.
        ranks: how many.
    """
    names = [f"cuda:{n}" for n in range(ranks)] if device == "cuda" and ranks > 1 else None
    return [
        Runtime(device=name, precision=precision, threads=threads)
        for name in names or [device] * ranks
    ]


def run_trial_on(
    runtimes: Sequence[Runtime],
    config: TrialConfig,
    *,
    seed: int,
    data_folder: Path,
    journal: JournalSink,
    checkpoint_folder: Path | None = None,
    export_folder: Path | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    pause_step: int | None = None,
) -> TrialOutcome:
    """`orchestrator.trial.run_trial` on one device or on several.

    Args:
        runtimes: of each rank; all on CPUs or each on a CUDA device of its own.
        config: of the trial; the windows of a step must divide evenly over the ranks.
        seed: as `run_trial`'s.
        data_folder: as `run_trial`'s.
        journal: as `run_trial`'s.
        checkpoint_folder: as `run_trial`'s.
        export_folder: as `run_trial`'s.
        should_stop: as `run_trial`'s.
        pause_step: as `run_trial`'s.

    Raises:
        ValueError: no runtime, devices that don't go together, or what `run_trial` refuses.
        RankLostError: another rank ended before its time.
    """

    def lead(ranks: Ranks) -> TrialOutcome:
        return run_trial(
            config,
            seed=seed,
            data_folder=data_folder,
            runtime=runtimes[0],
            journal=journal,
            checkpoint_folder=checkpoint_folder,
            export_folder=export_folder,
            should_stop=should_stop,
            pause_step=pause_step,
            ranks=ranks,
        )

    follow = {
        "seed": seed,
        "data_folder": data_folder,
        "checkpoint_folder": checkpoint_folder,
        "export_folder": export_folder,
        "pause_step": pause_step,
    }
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
        RankLostError: another rank ended before its time.
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
    config.check_ranks(len(runtimes))


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


@dataclass(frozen=True, slots=True)
class _Follower:
    """Another rank: its process, and where it says what ended it."""

    process: SpawnProcess
    last_words: Connection

    def lost(self) -> RankLostError | None:
        """What ended it before its time; None while it runs and after a proper end."""
        with contextlib.suppress(EOFError):
            if self.last_words.poll():
                failure_class, error = self.last_words.recv()
                return RankLostError(f"{self.process.name} failed: {error}", failure_class)
        code = self.process.exitcode
        if not code:
            return None
        return RankLostError(
            f"{self.process.name} ended with exit code {code}, for example because memory ran out",
            class_of_exit(code),
        )


@contextlib.contextmanager
def _followers(world_size: int, shared: tuple[Any, ...]) -> Iterator[None]:
    """Starts the other ranks; ends them with the block, by force if it raises."""
    followers = [_started(rank, shared) for rank in range(1, world_size)]
    is_over = threading.Event()
    guard = threading.Thread(target=_end_if_stuck, args=(followers, is_over), daemon=True)
    guard.start()
    try:
        yield
        for follower in followers:
            follower.process.join()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        # A broken connection is only the echo of what ended another rank, and comes before its end.
        said = wait([follower.last_words for follower in followers], timeout=ECHO_SECONDS)
        for follower in followers:
            if follower.last_words in said:  # its last words, or that nobody is left to say any
                follower.process.join(ECHO_SECONDS)
        for lost in filter(None, (follower.lost() for follower in followers)):
            raise lost from error
        raise
    finally:
        is_over.set()
        for follower in followers:
            if follower.process.is_alive():
                follower.process.terminate()
            follower.process.join()
            follower.last_words.close()
        guard.join()


def _started(rank: int, shared: tuple[Any, ...]) -> _Follower:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_follow, args=(rank, there, *shared), name=f"rank {rank}")
    process.start()
    there.close()
    return _Follower(process, here)


def _end_if_stuck(followers: Sequence[_Follower], is_over: threading.Event) -> None:
    """Ends this process if it waits for a rank that is lost, which no exception could reach."""
    while not is_over.wait(POLL_SECONDS):
        if not any(follower.process.exitcode for follower in followers):
            continue
        if is_over.wait(STUCK_SECONDS):
            return
        for lost in filter(None, (follower.lost() for follower in followers)):
            sys.stderr.write(f"{LOST_RANK_MARK}{lost.failure_class}: {lost}\n")
            sys.stderr.flush()
            os._exit(1)


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
    last_words: Connection,
    meeting: Path,
    runtimes: Sequence[Runtime],
    kind: str,
    config: dict[str, Any],
    arguments: dict[str, Any],
) -> None:
    """What another rank does: the same as the first, without a journal."""
    threading.Thread(target=_end_with_the_first, daemon=True).start()
    trial = trial_from_dict(config)
    try:
        with _joined(meeting, rank, runtimes) as ranks:
            if kind == "speed":
                measure_speed(trial, runtime=runtimes[rank], ranks=ranks, **arguments)
            else:
                run_trial(
                    trial, runtime=runtimes[rank], journal=NullJournal(), ranks=ranks, **arguments
                )
    except Exception as error:
        last_words.send((classify(error), f"{type(error).__name__}: {error}"[:2000]))
        raise


def _end_with_the_first() -> None:
    """Ends this rank at once when the first one's process is gone, however it went."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only the first rank starts others"
    wait([parent.sentinel])
    os._exit(1)
