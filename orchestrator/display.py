"""What a person sees of a plan: its cells, what is done and what would run."""

from rich.console import Console
from rich.table import Table

from orchestrator.plan import Plan, rate_ratios, total_flops

SHOWN_CELLS = 200
"""Rows of a plan's table; more are no longer read, and take long to lay out."""


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
