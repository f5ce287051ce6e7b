"""What a driver asks of a worker process; plain values, importable without torch."""

from dataclasses import dataclass
from typing import Any


class WorkerRetiredError(RuntimeError):
    """The job ended and is journalled, but this process must not run another one."""


@dataclass(frozen=True, slots=True)
class Job:
    """One lane's work on one replicate; plain values, so that it travels to any process.

    Attributes:
        lane: `loss` or `speed`.
        replicate_id: the replicate.
        seed: its seed.
        config: the resolved trial, as `orchestrator.config.trial_to_dict` gives it.
        journal: path of the attempt's journal, which does not exist yet.
        folder: the replicate's folder.
        data_folder: the prepared data set.
        device: `cpu` or `cuda`.
        precision: `fp32` or `bf16`.
        threads: torch threads of each process.
        steps: timed steps of the speed lane.
        warmup_steps: untimed steps before them.
        micro_windows: windows of one forward pass, where that of the configuration did not fit
            the device's memory; None for the configuration's own.
        max_seconds: after which the attempt is ended; None for no limit.
        stamp: what the journal repeats of the sweep's provenance.
        pause_step: after which a loss trial waits to be continued; None for its end.
        ranks: processes that share each step's windows, on a GPU each where the device is `cuda`.
    """

    lane: str
    replicate_id: str
    seed: int
    config: dict[str, Any]
    journal: str
    folder: str
    data_folder: str
    device: str
    precision: str
    threads: int
    steps: int
    warmup_steps: int
    micro_windows: int | None
    max_seconds: float | None
    stamp: dict[str, Any]
    pause_step: int | None = None
    ranks: int = 1
