"""`status`: what the ledger says now, from any shell, also while a sweep runs."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from orchestrator.console import duration, label
from orchestrator.journal import last_event
from orchestrator.ledger import Ledger, ReplicateState
from orchestrator.records import TrialRecord


@dataclass(frozen=True, slots=True)
class RunningTrial:
    """Where a trial stands, by the last step that it journalled.

    Attributes:
        label: the replicate in words.
        step: steps done.
        steps: of the whole trial.
        loss_nats: mean loss of the step's tokens; None before the first.
        tokens_per_second: of the trial so far; None before the first step.
    """

    label: str
    step: int
    steps: int
    loss_nats: float | None
    tokens_per_second: float | None


def running_trial(record: TrialRecord, state: ReplicateState) -> RunningTrial:
    """Where a running replicate stands."""
    event = last_event(state.attempts[-1], "step") or {}
    seconds = event.get("wall_seconds")
    return RunningTrial(
        label=label(record),
        step=int(event.get("step", 0)),
        steps=record.steps,
        loss_nats=event.get("train_loss_nats"),
        tokens_per_second=event["tokens"] / seconds if seconds else None,
    )


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
        planned = ledger.planned(name)
        step = running_trial(planned, state).step if state.status == "running" else None
        states[name] = state
        rows.append({**ledger.record(planned, state).as_row(), "step": step})
    counts = Counter(row["status"] for row in rows)
    return {
        "sweep": sweep,
        "asked_for": spec["replicates"],
        "counts": dict(counts),
        "without_speed": sum(state.needs_speed for state in states.values()),
        "eta_seconds": _eta_seconds(
            counts,
            [row["wall_seconds"] for row in rows if row["wall_seconds"]],
            [(row["step"] or 0) / row["steps"] for row in rows if row["status"] == "running"],
            int(spec["replicates"]),
        ),
        "replicates": rows,
    }


def show_status(root: Path, sweep: str, out: TextIO) -> None:
    """Write the counts, the running trials and the expected end.

    Reads no more of an ended trial than its end, and loads nothing that plain text doesn't need, so
    that it answers at once where thousands have ended.

    Raises:
        LedgerError: there is no such sweep under the root.
    """
    ledger = Ledger(root, sweep)
    asked_for = int(ledger.spec()["replicates"])
    counts: Counter[str] = Counter()
    without_speed, wall_seconds, shares, lines = 0, [], [], []
    # One state at a time: Python's garbage collector would go through thousands that are kept.
    for name in ledger.replicate_ids():
        state = ledger.state(name, without_start=True)
        counts[state.status] += 1
        without_speed += state.needs_speed
        if state.end.get("wall_seconds"):
            wall_seconds.append(float(state.end["wall_seconds"]))
        if state.status == "running":
            trial = running_trial(ledger.planned(name), state)
            shares.append(trial.step / trial.steps)
            lines.append(f"  running {trial.label}: {_where(trial)}")
        elif state.status == "failed":
            lines.append(f"  failed {label(ledger.planned(name))}: {state.end.get('error')}")
    shown = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    out.write(
        f"{sweep}: {asked_for} replicates asked for, {counts.total()} begun ({shown or 'none'}), "
        f"{without_speed} without speed\n"
    )
    out.writelines(f"{line}\n" for line in lines)
    eta_seconds = _eta_seconds(counts, wall_seconds, shares, asked_for)
    if eta_seconds is not None:
        out.write(f"ETA {duration(eta_seconds)}\n")


def _where(trial: RunningTrial) -> str:
    parts = [f"step {trial.step} of {trial.steps}"]
    if trial.loss_nats is not None:
        parts.append(f"loss {trial.loss_nats:.4f} nats")
    if trial.tokens_per_second is not None:
        parts.append(f"{trial.tokens_per_second:,.0f} tokens/s")
    return ", ".join(parts)


def _eta_seconds(
    counts: Mapping[str, int],
    wall_seconds: Sequence[float],
    shares: Sequence[float],
    asked_for: int,
) -> float | None:
    """Remaining trials at the mean pace of the ended ones; null when nothing runs or has ended.

    Args:
        counts: replicates by status.
        wall_seconds: of the ended ones.
        shares: of their steps that the running ones have done.
        asked_for: replicates in all.
    """
    if not shares or not wall_seconds:
        return None
    ended = sum(counts.get(status, 0) for status in ("completed", "diverged", "failed"))
    remaining = max(0.0, asked_for - ended - sum(shares))
    return remaining * (sum(wall_seconds) / len(wall_seconds)) / len(shares)
