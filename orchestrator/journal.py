"""Journals: one attempt's events, appended to one file that survives whatever ends the attempt.

A line is a JSON object with `event` (`claim`, `start`, `step`, `checkpoint`, `stop`, `end`) and
`time` (Unix seconds, for people: nothing depends on a clock that goes forward). A line that cannot
be read, torn by a process that was killed while it wrote or damaged later, loses only itself.
"""

import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

DURABLE_EVENTS = ("claim", "start", "checkpoint", "stop", "end", "asked", "promoted")
"""Events that are on disk before the trial goes on."""

TAIL_BYTES = (4096, 65_536)
"""Read from the end of a journal for its last event: nearly all are in the first, and an `end`
event with its traceback is in the second."""

POINT_KEYS = ("step", "tokens")
"""What a `step` event must hold to be a point of a curve."""

NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_decode = json.JSONDecoder().decode  # without the guess at an encoding that `json.loads` makes


class Journal:
    """One attempt's events, appended to one file.

    Numbers that are not finite are written as the strings "nan", "inf" and "-inf", since JSON has
    none.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        is_torn = path.is_file() and not path.read_bytes().endswith(b"\n")
        self._file = path.open("a", encoding="utf-8")
        if is_torn:  # what a killed process left must not swallow the next line
            self._file.write("\n")

    def append(self, event: dict[str, Any]) -> None:
        """Write one event; `DURABLE_EVENTS` are on disk when this returns."""
        stamped = {"time": round(time.time(), 3), **_encoded(event)}
        self._file.write(json.dumps(stamped, separators=(",", ":")) + "\n")
        self._file.flush()
        if event["event"] in DURABLE_EVENTS:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; the journal can be read but no longer written."""
        self._file.close()


def _encoded(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(event: dict[str, Any]) -> dict[str, Any]:
    return {
        key: NON_FINITE[value] if isinstance(value, str) and value in NON_FINITE else value
        for key, value in event.items()
    }


def read_events(path: Path | str, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
    """Complete events of a journal from a byte offset on, and the offset after the last of them."""
    with open(path, "rb") as file:
        file.seek(offset)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return [event for line in data[:end].splitlines() if (event := _parsed(line))], offset + end


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The event of a line; None for one that a dying process tore."""
    try:
        event = _decode(line.decode())
    except ValueError:
        return None
    if not isinstance(event, dict) or "event" not in event:
        return None
    if event["event"] == "step" and not all(isinstance(event.get(k), int) for k in POINT_KEYS):
        return None
    # Most lines hold no such number and are taken as they are.
    return _decoded(event) if b'"nan"' in line or b'inf"' in line else event


def last_event(path: Path | str, kind: str | None = None) -> dict[str, Any] | None:
    """The last complete event of a journal, without reading all of it.

    Args:
        path: of the journal.
        kind: the last one of this kind; None for any.
    """
    # Without Python's file objects, which cost more than reading: there are thousands of journals.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.lseek(descriptor, 0, os.SEEK_END)
        for length in TAIL_BYTES:
            begin = max(0, size - length)
            event = _last_in(os.pread(descriptor, length, begin), kind, is_whole=begin == 0)
            if event is not None or begin == 0:
                return event
    finally:
        os.close(descriptor)
    return None


def _last_in(data: bytes, kind: str | None, *, is_whole: bool) -> dict[str, Any] | None:
    """The last complete event of a kind; the first line counts only in the whole file."""
    end = data.rfind(b"\n")
    while end > 0:
        begin = data.rfind(b"\n", 0, end)
        if begin < 0 and not is_whole:
            return None
        event = _parsed(data[begin + 1 : end])
        if event is not None and kind in (None, event.get("event")):
            return event
        end = begin
    return None


def opening(path: Path | str) -> dict[str, Any]:
    """What a journal's `claim` and `start` events say together; empty for a torn first line."""
    facts: dict[str, Any] = {}
    with open(path, "rb") as file:
        for line in itertools.islice(file, 2):
            event = _parsed(line)
            if event is not None and event["event"] in ("claim", "start"):
                facts.update(event)
    return facts


def damaged_lines(path: Path | str) -> list[int]:
    """Numbers, from 1, of lines that cannot be read although nothing was killed while writing them.

    A process that is killed tears the last line that it wrote: the file's last one, or the one
    before the `end` that was written for it.
    """
    lines = Path(path).read_bytes().splitlines()
    numbers = [n for n, line in enumerate(lines, start=1) if _parsed(line) is None]
    torn = {len(lines)}
    if lines and (_parsed(lines[-1]) or {}).get("event") == "end":
        torn.add(len(lines) - 1)
    return [number for number in numbers if number not in torn]
