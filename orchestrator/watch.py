"""What a person sees while a sweep runs: a live table on a terminal, plain lines in a log."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from orchestrator.console import duration, label
from orchestrator.hardware import GpuUse, gpu_use
from orchestrator.ledger import ReplicateState
from orchestrator.plan import Plan
from orchestrator.status import RunningTrial, running_trial

LOG_SECONDS = 30.0
"""Between two plain progress lines when nothing ends in between."""
GPU_SECONDS = 10.0
"""Between two looks at the GPUs, each of which starts a process."""
SHOWN_TRIALS = 16
"""Rows of the live table; more would not fit a terminal."""
BAR_WIDTH = 24


@dataclass(slots=True)
class Watch:
    """Progress of one call: what runs, what is done, and how long the rest will take.

    A `with` block shows it. While trials run, `update` is called with the states of replicates
    that may have moved; between measurements of speed, `measured`. Nothing is drawn in between, so
    that a measurement has the machine to itself.
    """

    plan: Plan
    console: Console
    _todo: set[str] = field(init=False)
    _said: dict[str, int] = field(init=False)
    _ended: set[str] = field(default_factory=set)
    _shown_at: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _measuring_since: float = 0.0
    _live: Live | None = None
    _gpus: tuple[GpuUse, ...] = ()
    _gpus_seen_at: float = 0.0

    def __post_init__(self) -> None:
        self._todo = set(self.plan.to_run)
        # Attempts whose end was said, or was seen by an earlier call.
        self._said = {name: len(self.plan.states[name].attempts) for name in self._todo}

    def __enter__(self) -> "Watch":
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, states: Mapping[str, ReplicateState]) -> None:
        """Show what has moved."""
        for name, state in states.items():
            if name not in self._todo:
                continue
            is_news = len(state.attempts) > self._said[name]
            if state.end and is_news:
                self._said[name] = len(state.attempts)
                self._ended.add(name)
                self._say_end(name, state)
            elif is_news:  # tried again
                self._ended.discard(name)
        trials = [
            running_trial(self.plan.desired[name], state)
            for name, state in states.items()
            if state.status == "running"
        ]
        if self._todo:
            text = self._counts(states, trials)
            self._show(text, lambda: Group(trial_table(trials, self._gpu_use()), Text(text)))

    def measured(self, done: int, total: int, what: str = "speed") -> None:
        """Show how many of this call's measurements have ended; 0 before the first."""
        if not done:
            self._measuring_since = time.monotonic()
            return
        elapsed = time.monotonic() - self._measuring_since
        eta = duration(elapsed * (total - done) / done)
        text = f"{what}: {done}/{total} measured, one at a time, ETA {eta}"
        if done < total:
            self._show(text, lambda: _beside(_bar(done, total), text))

    def _show(self, text: str, picture: Callable[[], RenderableType]) -> None:
        """On a terminal the picture and at once, in a log the text where the last line is old."""
        if self._live is not None:
            self._live.update(picture(), refresh=True)
        elif time.monotonic() - self._shown_at > LOG_SECONDS:
            self._say(text)

    def _say(self, text: str) -> None:
        self.console.print(f"{time.strftime('%H:%M:%S')} {text}", markup=False)
        self._shown_at = time.monotonic()

    def _say_end(self, name: str, state: ReplicateState) -> None:
        loss = state.end.get("val_loss_nats")
        result = f"loss {loss:.4f} nats" if loss is not None else state.end.get("error", "")
        of_all = f"[{len(self._ended)}/{len(self._todo)}]"
        self._say(f"{of_all} {state.status} {label(self.plan.desired[name])} {result}")

    def _counts(self, states: Mapping[str, ReplicateState], trials: list[RunningTrial]) -> str:
        """How many of this call's trials are done, run and wait, and the time to the end."""
        failed = sum(states[n].status == "failed" for n in self._ended & states.keys())
        waiting = len(self._todo) - len(self._ended) - len(trials)
        share = self._share(trials)
        elapsed = time.monotonic() - self._began
        eta = duration(elapsed * (1 - share) / share) if share > 0.01 else "…"
        shown_failed = f", {failed} failed" if failed else ""
        return (
            f"{len(self._ended)}/{len(self._todo)} done{shown_failed}, {len(trials)} running, "
            f"{max(0, waiting)} waiting, ETA {eta}"
        )

    def _share(self, trials: list[RunningTrial]) -> float:
        """Of this call's steps, the share that is done."""
        total = sum(self.plan.desired[name].steps for name in self._todo) or 1
        ended = sum(self.plan.desired[name].steps for name in self._ended)
        return (ended + sum(trial.step for trial in trials)) / total

    def _gpu_use(self) -> tuple[GpuUse, ...]:
        """Of this machine's GPUs; none where trials run elsewhere."""
        if self.plan.device != "cuda" or self.plan.is_on_cluster:
            return ()
        if time.monotonic() - self._gpus_seen_at > GPU_SECONDS:
            self._gpus, self._gpus_seen_at = gpu_use(), time.monotonic()
        return self._gpus


def trial_table(trials: list[RunningTrial], gpus: tuple[GpuUse, ...] = ()) -> Table:
    """The trials that run now, and below them what the GPUs do."""
    table = Table(box=None, pad_edge=False, show_header=bool(trials))
    table.add_column("running", no_wrap=True)
    for heading in ("step", "loss, nats", "tokens/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("progress", no_wrap=True)
    for trial in trials[:SHOWN_TRIALS]:
        table.add_row(
            trial.label,
            f"{trial.step:,} of {trial.steps:,}",
            "" if trial.loss_nats is None else f"{trial.loss_nats:.4f}",
            "" if trial.tokens_per_second is None else f"{trial.tokens_per_second:,.0f}",
            _bar(trial.step, trial.steps),
        )
    if len(trials) > SHOWN_TRIALS:
        table.add_row(f"… and {len(trials) - SHOWN_TRIALS} more")
    for gpu in gpus:
        table.add_row(
            f"GPU {gpu.index}: {gpu.busy_percent} % busy, {gpu.used_bytes / 2**30:.1f} of "
            f"{gpu.total_bytes / 2**30:.1f} GiB"
        )
    return table


def _bar(done: int, total: int) -> ProgressBar:
    return ProgressBar(total=max(1, total), completed=done, width=BAR_WIDTH)


def _beside(left: RenderableType, right: str) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_row(left, right)
    return grid
