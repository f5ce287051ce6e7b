"""`status`: what the ledger says now, from any shell, also while a sweep runs."""

from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.console import duration, label
from orchestrator.journal import last_event
from orchestrator.ledger import Ledger, ReplicateState


def status_json(root: Path, sweep: str) -> dict[str, Any]:
    """Counts and every replicate with the columns of `trials.parquet` known now.

    Raises:
        LedgerError: there is no such sweep under the root.
    """
    ledger = Ledger(root, sweep)
    spec = ledger.spec()
    rows, states = [], {}
    for name in ledger.replicate_ids():
        state = ledger.state(name)
        record = ledger.record(ledger.planned(name), state)
        states[name] = state
        rows.append({**record.as_row(), "step": _step(state)})
    return {
        "sweep": sweep,
        "asked_for": spec["replicates"],
        "counts": dict(Counter(row["status"] for row in rows)),
        "without_speed": sum(state.needs_speed for state in states.values()),
        "eta_seconds": _eta_seconds(rows, int(spec["replicates"])),
        "replicates": rows,
    }


def show_status(root: Path, sweep: str, console: Console) -> None:
    """Print the counts, the running trials and the expected end.

    Reads no more of an ended trial than its end, so that it answers while thousands have ended.
    """
    ledger = Ledger(root, sweep)
    asked_for = int(ledger.spec()["replicates"])
    names = ledger.replicate_ids()
    states = {name: ledger.state(name, without_start=True) for name in names}
    counts = Counter(state.status for state in states.values())
    shown = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    without_speed = sum(state.needs_speed for state in states.values())
    console.print(
        f"{sweep}: {asked_for} replicates asked for, {len(names)} begun ({shown or 'none'}), "
        f"{without_speed} without speed"
    )
    rows = []
    for name, state in states.items():
        row = {"status": state.status, "wall_seconds": state.end.get("wall_seconds"), "step": None}
        if state.status == "running":
            record = ledger.planned(name)
            row |= {"step": _step(state), "steps": record.steps}
            console.print(f"  running {label(record)}: step {row['step']} of {record.steps}")
        elif state.status == "failed":
            text = f"  failed {label(ledger.planned(name))}: {state.end.get('error')}"
            console.print(text, markup=False)
        rows.append(row)
    eta_seconds = _eta_seconds(rows, asked_for)
    if eta_seconds is not None:
        console.print(f"ETA {duration(eta_seconds)}")


def _step(state: ReplicateState) -> int | None:
    if state.status != "running":
        return None
    event = last_event(state.attempts[-1]) or {}
    return int(event.get("step", 0))


def _eta_seconds(rows: list[dict[str, Any]], asked_for: int) -> float | None:
    """Remaining trials at the mean pace of the ended ones; null when nothing runs or has ended."""
    running = [row for row in rows if row["status"] == "running"]
    seconds = [row["wall_seconds"] for row in rows if row["wall_seconds"]]
    if not running or not seconds:
        return None
    ended = sum(row["status"] in ("completed", "diverged", "failed") for row in rows)
    started = sum((row["step"] or 0) / row["steps"] for row in running)
    remaining = max(0.0, asked_for - ended - started)
    return float(remaining * (sum(seconds) / len(seconds)) / len(running))
