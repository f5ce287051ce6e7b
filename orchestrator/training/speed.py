"""Throughput of training: whole optimizer steps on real batches, each timed by itself.

A step is loading its windows, forward, backward, clipping and the optimizer. The device is
synchronised before and after each, warm-up steps are left out (kernels are compiled and allocators
filled there), and the figure that counts is the median. Whether the device was shared is the
caller's to know.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.config import TrialConfig
from orchestrator.training.loop import load_micro_batches, set_rates, train_step
from orchestrator.training.ranks import ALONE, Ranks
from orchestrator.training.runtime import Runtime
from orchestrator.training.session import Session, open_session

OPTIMIZER_STEPS = 5
"""Most repetitions of the optimizer's step alone; it varies little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedOutcome:
    """How fast a configuration trains on a device.

    Attributes:
        tokens_per_second: tokens of a step over its median time.
        tokens_per_second_total: all timed tokens over all timed seconds.
        step_seconds_median: median time of a step.
        step_seconds_lower: its first quartile.
        step_seconds_upper: its third quartile.
        optimizer_seconds_median: median time of the optimizer's part of a step, timed by itself
            after the whole steps, so that no wait is put into them.
        steps: timed steps.
        warmup_steps: untimed steps before them.
        peak_memory_bytes: largest device memory; on CPU the process's largest resident memory.
        device_name: GPU or processor.
        kernel_impl: implementation of the recurrences.
        precision: `fp32` or `bf16`.
        threads: torch threads.
    """

    tokens_per_second: float
    tokens_per_second_total: float
    step_seconds_median: float
    step_seconds_lower: float
    step_seconds_upper: float
    optimizer_seconds_median: float
    steps: int
    warmup_steps: int
    peak_memory_bytes: int
    device_name: str
    kernel_impl: str
    precision: str
    threads: int

    def as_fields(self) -> dict[str, Any]:
        """Plain values by name."""
        return asdict(self)


def measure_speed(
    config: TrialConfig,
    *,
    seed: int,
    data_folder: Path,
    runtime: Runtime,
    steps: int,
    warmup_steps: int,
    ranks: Ranks = ALONE,
) -> SpeedOutcome:
    """Times the first steps of a trial after a warm-up.

    Args:
        config: of the trial.
        seed: as the trial's.
        data_folder: a prepared data set.
        runtime: device and arithmetic.
        steps: timed steps, at least 1.
        warmup_steps: untimed steps before them.
        ranks: that train together; each times its own steps.

    Raises:
        ValueError: no timed step, or what `open_session` refuses.
    """
    if steps < 1 or warmup_steps < 0:
        raise ValueError(f"{steps=} must be at least 1 and {warmup_steps=} at least 0")
    with runtime.applied():
        runtime.reset_peak_memory()
        session = open_session(
            config, seed=seed, data_folder=data_folder, runtime=runtime, ranks=ranks
        )
        seconds = [_timed_step(session, index) for index in range(warmup_steps + steps)]
        lower, median, upper = np.quantile(seconds[warmup_steps:], (0.25, 0.5, 0.75)).tolist()
        return SpeedOutcome(
            tokens_per_second=config.batch.tokens / median,
            tokens_per_second_total=config.batch.tokens * steps / sum(seconds[warmup_steps:]),
            step_seconds_median=median,
            step_seconds_lower=lower,
            step_seconds_upper=upper,
            optimizer_seconds_median=statistics.median(
                _timed(runtime, session.optimizer.step) for _ in range(min(steps, OPTIMIZER_STEPS))
            ),
            steps=steps,
            warmup_steps=warmup_steps,
            peak_memory_bytes=runtime.peak_memory_bytes(),
            device_name=runtime.device_name(),
            kernel_impl=session.model.kernel_impl,
            precision=runtime.precision,
            threads=runtime.threads,
        )


def _timed_step(session: Session, index: int) -> float:
    """Seconds of one step; past the end of the budget the last rates stay."""
    config = session.config

    def step() -> None:
        set_rates(session.optimizer, config, min(index, config.num_steps - 1))
        train_step(
            session.model,
            session.optimizer,
            load_micro_batches(session.batches, config, index, session.runtime, session.ranks),
            config.clip_norm,
            session.runtime,
            session.ranks,
        )

    return _timed(session.runtime, step)


def _timed(runtime: Runtime, work: Callable[[], object]) -> float:
    """Seconds from an idle device to an idle device."""
    runtime.synchronize()
    started = time.perf_counter()
    work()
    runtime.synchronize()
    return time.perf_counter() - started
