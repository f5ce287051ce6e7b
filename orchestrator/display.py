"""What a person sees while a sweep runs: a live bar on a terminal, plain lines in a log."""

import time
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from orchestrator.console import duration, label
from orchestrator.journal import last_event
from orchestrator.ledger import ReplicateState
from orchestrator.plan import Plan, rate_ratios, total_flops

SHOWN_CELLS = 200
"""Rows of a plan's table; more are no longer read, and take long to lay out."""

LOG_SECONDS = 30.0
"""Between two plain progress lines when nothing ends in between."""


@dataclass(slots=True)
class Watch:
    """Progress of one call: replicates and steps done, and how long the rest will take.

    A `with` block shows it; `update` is called with the states of replicates that may have moved.
    """

    plan: Plan
    console: Console
    _todo: set[str] = field(init=False)
    _said: dict[str, int] = field(init=False)
    _ended: set[str] = field(default_factory=set)
    _shown_at: float = 0.0
    _began: float = field(default_factory=time.monotonic)
    _bar: Progress | None = None

    def __post_init__(self) -> None:
        self._todo = set(self.plan.to_run)
        # Attempts whose end was said, or was seen by an earlier call.
        self._said = {name: len(self.plan.states[name].attempts) for name in self._todo}

    def __enter__(self) -> "Watch":
        if self.console.is_terminal and self._todo:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), console=self.console, transient=True
            )
            self._bar.add_task("starting", total=1.0)
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, states: dict[str, ReplicateState]) -> None:
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
        share = self._share(states)
        text = self._line(states, share)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=share, description=text)
        elif time.monotonic() - self._shown_at > LOG_SECONDS and self._todo:
            self.console.print(f"{time.strftime('%H:%M:%S')} {text}")
            self._shown_at = time.monotonic()

    def _say_end(self, name: str, state: ReplicateState) -> None:
        loss = state.end.get("val_loss_nats")
        result = f"loss {loss:.4f} nats" if loss is not None else state.end.get("error", "")
        self.console.print(
            f"{time.strftime('%H:%M:%S')} [{len(self._ended)}/{len(self._todo)}] ".replace(
                "[", "\\["
            )
            + f"{state.status} {label(self.plan.desired[name])} {result}".replace("[", "\\[")
        )
        self._shown_at = time.monotonic()

    def _share(self, states: dict[str, ReplicateState]) -> float:
        """Of this call's steps, the share that is done."""
        total = sum(self.plan.desired[name].steps for name in self._todo) or 1
        done = 0.0
        for name in self._todo:
            if name in self._ended:
                done += self.plan.desired[name].steps
            elif name in states and states[name].status == "running":
                event = last_event(states[name].attempts[-1]) or {}
                done += float(event.get("step", 0))
        return done / total

    def _line(self, states: dict[str, ReplicateState], share: float) -> str:
        running = sum(state.status == "running" for state in states.values())
        elapsed = time.monotonic() - self._began
        eta = duration(elapsed * (1 - share) / share) if share > 0.01 else "…"
        return f"{len(self._ended)}/{len(self._todo)} done, {running} running, ETA {eta}"


def plan_table(plan: Plan) -> Table:
    """The cells of a plan: what they are, their size, and what is done."""
    table = Table(box=None, pad_edge=False)
    for heading in ("cell", "mixer", "stack", "optimizer", "size"):
        table.add_column(heading, no_wrap=True)
    for heading in ("lr", "adam lr", "FFN", "parameters", "tokens", "done", "to run", "to time"):
        table.add_column(heading, justify="right", no_wrap=True)
    by_cell: dict[str, list[str]] = {}
    for name, record in plan.desired.items():
        by_cell.setdefault(record.cell_id, []).append(name)
    for cell in plan.sweep.cells[:SHOWN_CELLS]:
        names = by_cell[cell.cell_id]
        record = plan.desired[names[0]]
        states = [plan.states[name] for name in names]
        table.add_row(
            record.cell_id,
            record.mixer,
            record.stack,
            record.optimizer,
            record.size,
            f"{record.lr:g}",
            "" if record.adam_lr is None else f"{record.adam_lr:g}",
            str(cell.config.model.ffn_dim),
            f"{record.params_total:,}",
            f"{record.tokens:,}",
            str(sum(state.is_result for state in states)),
            str(sum(not state.is_result for state in states)),
            str(sum(state.needs_speed for state in states)),
        )
    return table


def show_plan(plan: Plan, console: Console) -> None:
    """Print the cells, what would run, what rules left out, and notes."""
    console.print(plan_table(plan))
    if len(plan.sweep.cells) > SHOWN_CELLS:
        console.print(f"… and {len(plan.sweep.cells) - SHOWN_CELLS} more cells (--json has all)")
    spec = plan.spec
    for rule, count in zip(spec.exclude, plan.sweep.excluded, strict=True):
        console.print(f"excluded by {rule}: {count} cells", markup=False)
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
    for which, ratios in dict.fromkeys(r for cell in plan.sweep.cells for r in rate_ratios(cell)):
        rates = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        console.print(
            f"rate at 0, 25, 50, 75, 100 % of the steps, as shares of the peak: {rates}{which}"
        )
    counts = ", ".join(f"{count} {status}" for status, count in sorted(plan.counts().items()))
    console.print(
        f"{spec.name}: {len(plan.sweep.cells)} cells × {len(spec.seeds)} seeds = "
        f"{len(plan.desired)} replicates ({counts}); {len(plan.to_run)} to run on {plan.device} "
        f"({plan.precision}), {total_flops(plan):.2g} training FLOPs"
    )
