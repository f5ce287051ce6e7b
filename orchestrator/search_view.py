"""What `plan` shows of a search: what is fixed, the space, and how far each point is."""

from typing import Any

from rich.console import Console
from rich.table import Table

from orchestrator.plan import Plan
from orchestrator.points import Point, Search, read_search

UNFINISHED = "—"


def search_json(plan: Plan) -> dict[str, Any]:
    """The plan of a search as one JSON-ready object.

    Args:
        plan: extended, so that it holds what would run next.
    """
    search = read_search(plan)
    settings, space = search.settings, plan.sweep.space
    assert space is not None
    return {
        "sweep": plan.spec.name,
        "purpose": plan.spec.purpose,
        "match": plan.spec.match,
        "device": plan.device,
        "precision": plan.precision,
        "data_prepared": plan.data_folder is not None,
        "fixed": plan.spec.base,
        "space": {p.name: str(p.values) for p in space.parameters},
        "sampler": settings.sampler,
        "objectives": settings.objectives,
        "seeds": plan.spec.seeds,
        "trials": settings.trials,
        "asked": search.num_asked,
        "rungs_tokens": search.rungs,
        "points": [_row(search, point) for point in search.points],
        "next": plan.asks,
        "to_run": plan.to_run,
        "to_time": plan.to_time,
        "counts": plan.counts(),
        "notes": plan.notes,
    }


def _row(search: Search, point: Point) -> dict[str, Any]:
    """One point: what it sets, how far it was sent and came, and its loss there."""
    reached = [rung for rung, losses in enumerate(search.losses) if point.number in losses]
    return {
        "number": point.number,
        "cell_id": point.cell.cell_id,
        "point": point.assignment,
        "sent_to_tokens": search.rungs[point.target],
        "reached_tokens": search.rungs[reached[-1]] if reached else None,
        "loss_nats": search.losses[reached[-1]][point.number] if reached else None,
        "is_finished": point.number in search.losses[-1],
        "statuses": [search.states[name].status for name in search.names(point)],
    }


def show_search(plan: Plan, console: Console) -> None:
    """Print what a search holds fixed, what it draws from, its points, and what would run next."""
    found = search_json(plan)
    spec = plan.spec
    console.print(f"fixed: {', '.join(f'{k}={v}' for k, v in spec.base.items())}", markup=False)
    for name, values in found["space"].items():
        console.print(f"  {name}: {values}", markup=False)
    if len(found["rungs_tokens"]) > 1:
        assert spec.search is not None
        assert spec.search.asha is not None
        rungs = ", ".join(f"{tokens:,}" for tokens in found["rungs_tokens"])
        console.print(
            f"judged at {rungs} tokens by the mean loss over seeds; of "
            f"{spec.search.asha.reduction} points 1 goes on"
        )
    if found["points"]:
        console.print(_table(found["points"]))
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
    new = sum(event["event"] == "asked" for event in plan.asks)
    on = len(plan.asks) - new
    console.print(
        f"{spec.name}: {found['sampler']} for {' and '.join(found['objectives'])}, "
        f"{found['asked']} of {found['trials']} points asked for, each with {len(spec.seeds)} "
        f"seeds; next: {new} new points, {on} go on; {len(plan.to_run)} replicates to run on "
        f"{plan.device} ({plan.precision})"
    )


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    paths = list(dict.fromkeys(path for row in rows for path in row["point"]))
    for heading in ("point", *paths, "tokens", "loss", "finished"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        values = [row["point"].get(path, UNFINISHED) for path in paths]
        loss, tokens = row["loss_nats"], row["reached_tokens"]
        table.add_row(
            str(row["number"]),
            *(f"{v:.4g}" if isinstance(v, float) else str(v) for v in values),
            UNFINISHED if tokens is None else f"{tokens:,}",
            UNFINISHED if loss is None else f"{loss:.4f}",
            "yes" if row["is_finished"] else "no",
        )
    return table
