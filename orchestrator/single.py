"""`train`: one cell with one seed in this process, without Ray, MLflow or a ledger."""

from typing import Any

from rich.console import Console

from orchestrator.parallel import run_trial_on, runtimes_of
from orchestrator.plan import Plan
from orchestrator.readiness import with_data

RESULTS = (
    "init_loss_nats",
    "val_loss_nats",
    "val_loss_se",
    "val_bits_per_byte",
    "unigram_loss_nats",
    "wall_seconds",
    "peak_memory_bytes",
    "kernel_impl",
    "data_id",
)


class _PrintingJournal:
    """A journal that shows curve points as they come and keeps the last facts."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self.facts: dict[str, Any] = {}

    def append(self, event: dict[str, Any]) -> None:
        """Show a step, or remember what another event says."""
        if event["event"] != "step":
            self.facts.update(event)
            if "parameter_table" in event:
                self._console.print(event["parameter_table"], markup=False)
            return
        parts = [f"step {event['step']:>6}/{self._num_steps}"]
        for key, text in (("train_loss_nats", "train"), ("val_loss_nats", "val")):
            if event.get(key) is not None:
                parts.append(f"{text} {event[key]:.6f}")
        parts.append(f"lr {event['lr']:.3g}")
        if event.get("grad_norm") is not None:
            parts.append(f"grad {event['grad_norm']:.3f}")
        self._console.print("  ".join(parts), markup=False)


def train_one(plan: Plan, console: Console) -> int:
    """Train the plan's only replicate and print its curve and result; returns the exit code."""
    plan = with_data(plan, console)
    record = next(iter(plan.desired.values()))
    assert plan.data_folder is not None
    journal = _PrintingJournal(console, record.steps)
    console.print(
        f"{record.replicate_id}: {record.params_total:,} parameters, {record.tokens:,} tokens on "
        f"{plan.device} ({plan.precision})"
    )
    outcome = run_trial_on(
        runtimes_of(plan.device, plan.precision, plan.threads, plan.ranks),
        plan.sweep.cells[0].config,
        seed=record.seed,
        data_folder=plan.data_folder,
        journal=journal,
        checkpoint_folder=None,
        export_folder=plan.root / "models" / record.replicate_id,
        should_stop=lambda: False,
    )
    console.print(outcome.status)
    for key in RESULTS:
        if journal.facts.get(key) is not None:
            console.print(f"{key} {journal.facts[key]}", markup=False)
    return 0
