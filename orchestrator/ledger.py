"""The ledger: append-only journals on disk, and what they say about every replicate.

    SWEEP/spec.json                               what was asked for, and who ran it
    SWEEP/driver.lock                             held by the process that runs the sweep
    SWEEP/search.jsonl                            what a search has asked for (orchestrator.points)
    SWEEP/replicates/ID/config.json               the replicate's identity and configuration
    SWEEP/replicates/ID/attempt-0001.jsonl        one try at the loss trial, event by event
    SWEEP/replicates/ID/speed-0001.jsonl          one try at the speed measurement
    SWEEP/trials.parquet  curves.parquet          compaction, written atomically
    SWEEP/mlflow.json                             where MLflow shows each replicate, for links

The journals (`orchestrator.journal`) are the record; Parquet and MLflow are made from them.
"""

import difflib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from orchestrator.errors import LedgerError
from orchestrator.journal import damaged_lines, last_event, opening, read_events
from orchestrator.leases import is_alive
from orchestrator.records import CURVE_COLUMNS, TRIAL_COLUMNS, CurvePoint, TrialRecord


@dataclass(frozen=True, slots=True)
class ReplicateState:
    """What the journals say about one replicate, curves aside.

    Attributes:
        attempts: paths of the journals of loss trials, oldest first.
        speed_attempts: the same of speed measurements.
        status: one of `orchestrator.records.STATUSES`.
        failure_class: of a failed or diverged last attempt.
        end: the last attempt's `end` event.
        start: the last attempt's `claim` and `start` events together.
        speed: the newest completed speed measurement's `end` event.
        is_paused: whether the last attempt stopped where it was told to, to be continued.
    """

    attempts: tuple[str, ...] = ()
    speed_attempts: tuple[str, ...] = ()
    status: str = "pending"
    failure_class: str | None = None
    end: dict[str, Any] = field(default_factory=dict)
    start: dict[str, Any] = field(default_factory=dict)
    speed: dict[str, Any] = field(default_factory=dict)
    is_paused: bool = False

    @property
    def is_result(self) -> bool:
        """Whether the loss trial has a result that is never repeated."""
        return self.status in ("completed", "diverged")

    @property
    def needs_speed(self) -> bool:
        """Whether a completed replicate still lacks its speed measurement."""
        return self.status == "completed" and not self.speed


class Ledger:
    """The folder of one sweep."""

    def __init__(self, root: Path, sweep: str) -> None:
        self.sweep = sweep
        self.folder = root / sweep
        self._replicates = self.folder / "replicates"

    @property
    def exists(self) -> bool:
        """Whether this sweep was ever started under this root."""
        return (self.folder / "spec.json").is_file()

    def replicate_folder(self, replicate_id: str) -> Path:
        """Folder of one replicate."""
        return self._replicates / replicate_id

    def replicate_ids(self) -> list[str]:
        """Every replicate that the ledger knows, desired or not, in a fixed order."""
        if not self._replicates.is_dir():
            return []
        return sorted(entry.name for entry in os.scandir(self._replicates) if entry.is_dir())

    def describe(self, planned: TrialRecord) -> Path:
        """Write a replicate's `config.json` if it has none; returns its folder."""
        folder = self.replicate_folder(planned.replicate_id)
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            row = {**planned.as_row(), "config": json.loads(planned.config_json)}
            write_atomically(folder / "config.json", json.dumps(row, indent=1))
        return folder

    def planned(self, replicate_id: str) -> TrialRecord:
        """The record that `describe` wrote.

        Raises:
            LedgerError: the replicate's `config.json` is missing or unreadable.
        """
        path = self.replicate_folder(replicate_id) / "config.json"
        try:
            row = json.loads(path.read_text(encoding="utf-8"))
            return TrialRecord(**{key: row[key] for key in row if key in TRIAL_COLUMNS})
        except (OSError, ValueError, TypeError) as error:
            raise LedgerError(
                f"{path} cannot be read ({error}); restore it or remove its folder"
            ) from None

    def next_attempt(self, replicate_id: str, kind: str = "attempt") -> Path:
        """Path of the next journal of a kind, `attempt` or `speed`."""
        folder = self.replicate_folder(replicate_id)
        attempts, speeds = _journals(str(folder))
        journals = attempts if kind == "attempt" else speeds
        last = int(Path(journals[-1]).stem.rpartition("-")[2]) if journals else 0
        return folder / f"{kind}-{last + 1:04d}.jsonl"

    def state(self, replicate_id: str, *, without_start: bool = False) -> ReplicateState:
        """What the journals of one replicate say.

        Args:
            replicate_id: the replicate.
            without_start: leave `start` empty where the last attempt has ended, to read less.
        """
        attempts, speeds = _journals(f"{self._replicates}/{replicate_id}")
        speed = next((end for path in reversed(speeds) if (end := _completed(path))), {})
        if not attempts:
            return ReplicateState(speed_attempts=speeds)
        end = last_event(attempts[-1]) or {}
        has_ended = end.get("event") == "end"
        start = {} if has_ended and without_start else opening(attempts[-1])
        if has_ended:
            status, failure = end["status"], end.get("failure_class")
            return ReplicateState(attempts, speeds, status, failure, end, start, speed)
        is_paused = end.get("event") == "stop"  # the worker may live on with another trial
        status = "running" if is_alive(start) and not is_paused else "pending"
        return ReplicateState(
            attempts, speeds, status, start=start, speed=speed, is_paused=is_paused
        )

    def states(self, replicate_ids: Iterable[str]) -> dict[str, ReplicateState]:
        """`state` of several replicates."""
        on_disk = set(self.replicate_ids())
        untried = ReplicateState()
        return {n: self.state(n) if n in on_disk else untried for n in replicate_ids}

    def curve(self, replicate_id: str, attempts: tuple[str, ...]) -> list[CurvePoint]:
        """Each logged step once: the value that was journalled first.

        An attempt that continues from a checkpoint trains some steps again; on a CPU their values
        are the same bits, on a GPU they may differ by rounding, and the first stands.
        """
        points: list[CurvePoint] = []
        for number, path in enumerate(attempts, start=1):
            for event in read_events(path)[0]:
                if event["event"] == "step" and (not points or event["step"] > points[-1].step):
                    points.append(_point(self.sweep, replicate_id, number, event))
        return points

    def record(self, planned: TrialRecord, state: ReplicateState) -> TrialRecord:
        """The replicate's row: what was planned, then what the journals measured."""
        measured = {**state.start, **state.end}
        values = {k: v for k, v in measured.items() if k in TRIAL_COLUMNS and v is not None}
        for key in ("status", "failure_class", "tokens_per_second", "step_seconds_median"):
            values.pop(key, None)
        speed = {k: v for k, v in state.speed.items() if k in SPEED_COLUMNS}
        return replace(
            planned,
            **{**values, **speed},
            status=state.status,
            failure_class=state.failure_class,
            attempts=len(state.attempts),
        )

    def compact(self, records: list[TrialRecord], states: dict[str, ReplicateState]) -> None:
        """Write `trials.parquet` and `curves.parquet` from the journals, each in one rename.

        Rows are in the order of replicate ids, so that the same records are the same bytes.
        """
        from orchestrator.parquet import write_rows  # noqa: PLC0415 - slow to load; see there

        records = sorted(records, key=lambda record: record.replicate_id)
        points = [
            point.as_row()
            for record in records
            for point in self.curve(record.replicate_id, states[record.replicate_id].attempts)
        ]
        rows = [record.as_row() for record in records]
        write_rows(self.folder / "curves.parquet", points, CurvePoint)
        write_rows(self.folder / "trials.parquet", rows, TrialRecord)

    def damages(self, states: dict[str, ReplicateState]) -> list[str]:
        """A sentence for each journal of these replicates with lines that cannot be read."""
        sentences = []
        for state in states.values():
            for path in (*state.attempts, *state.speed_attempts):
                numbers = damaged_lines(path)
                if numbers:
                    shown = ", ".join(map(str, numbers[:5]))
                    sentences.append(
                        f"{path}: damaged in line {shown}; what was said there is "
                        "missing, all else is kept"
                    )
        return sentences

    def spec(self) -> dict[str, Any]:
        """What `spec.json` holds.

        Raises:
            LedgerError: there is no such sweep, or its `spec.json` cannot be read.
        """
        path = self.folder / "spec.json"
        try:
            loaded = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise LedgerError(_no_sweep(self.sweep, self.folder.parent)) from None
        except (OSError, ValueError) as error:
            raise LedgerError(f"{path} cannot be read ({error})") from None
        return dict(loaded)

    def write_spec(self, spec: dict[str, Any]) -> None:
        """Write `spec.json` atomically."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.folder / "spec.json", json.dumps(spec, indent=1, sort_keys=True))


SPEED_COLUMNS = (
    "tokens_per_second",
    "step_seconds_median",
    "exclusive",
    "device_name",
)
"""Columns that only the speed lane fills."""


def _journals(folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Journals of a replicate, of its loss trials and of its speed measurements, oldest first.

    Paths are texts: for the thousands of a sweep, `Path` takes as long as listing the folders.
    """
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return (), ()
    attempts, speeds = [], []
    for name in names:
        if name.endswith(".jsonl"):
            if name.startswith("attempt-"):
                attempts.append(f"{folder}/{name}")
            elif name.startswith("speed-"):
                speeds.append(f"{folder}/{name}")
    return tuple(attempts), tuple(speeds)


def _completed(path: str) -> dict[str, Any]:
    end = last_event(path) or {}
    return end if end.get("event") == "end" and end.get("status") == "completed" else {}


def _point(sweep: str, replicate_id: str, attempt: int, event: dict[str, Any]) -> CurvePoint:
    values = {key: event[key] for key in CURVE_COLUMNS if key in event}
    return CurvePoint(
        **{**values, "sweep": sweep, "replicate_id": replicate_id, "attempt": attempt}
    )


def write_atomically(path: Path, text: str) -> None:
    """Replace a file's content in one rename, so that no reader sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _no_sweep(name: str, root: Path) -> str:
    """A sentence with the sweeps that are there, those of a like name first."""
    there = sorted(path.parent.name for path in root.glob("*/spec.json"))
    near = difflib.get_close_matches(name.removeprefix("conf="), there, n=3, cutoff=0.4)
    shown = ", ".join(near or there[:3])
    known = f"; there is {shown}" if shown else ", nor any other"
    rule = "; a sweep is named without conf=" if name.startswith("conf=") else ""
    return f"no sweep {name!r} under {root}{known}{rule}"
