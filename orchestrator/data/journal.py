"""One file that is both the lock of a preparation and its memory: `NAME-BUILD.journal`.

Whoever holds the file's `flock` prepares; the kernel frees it when the process ends, however it
ends, so nothing stale blocks a later run. Its lines, one JSON object each, say what is finished.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any


class Journal:
    """The finished steps of a preparation; made by `exclusive_journal` alone."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.entries: list[dict[str, Any]] = []
        whole = 0
        for line in stream.readlines():
            try:
                entry = json.loads(line) if line.endswith(b"\n") else None
            except ValueError:
                entry = None
            if entry is None:
                # It was being written when the process died or the power went.
                break
            self.entries.append(entry)
            whole += len(line)
        stream.truncate(whole)
        stream.seek(whole)

    def append(self, entry: dict[str, Any]) -> None:
        """Note a finished step; it survives whatever happens after this returns."""
        self.entries.append(entry)
        self._stream.write(json.dumps(entry).encode() + b"\n")
        self._sync()

    def replace(self, entries: list[dict[str, Any]]) -> None:
        """Forget all steps but these, in order."""
        self._stream.seek(0)
        self._stream.truncate()
        self.entries = []
        for entry in entries:
            self.append(entry)
        self._sync()

    def _sync(self) -> None:
        self._stream.flush()
        os.fsync(self._stream.fileno())


@contextlib.contextmanager
def exclusive_journal(path: Path, on_wait: Callable[[], None]) -> Iterator[Journal]:
    """The journal at `path`, for this process alone.

    It is removed when the block is done, also when the block refuses its input by a `ValueError`;
    any other error is an interruption, and leaves it for the next run.

    Args:
        path: made if it is missing; on a file system that supports `flock`.
        on_wait: called once before waiting for another process.
    """
    while True:
        stream = path.open("ab+")
        try:
            _lock(stream, on_wait)
            if _is_still_at(stream, path):
                break
        except BaseException:
            stream.close()
            raise
        # The holder before us finished and removed the file: this is a lock on nothing.
        stream.close()
    with stream:
        stream.seek(0)
        try:
            yield Journal(stream)
        except ValueError:
            path.unlink()
            raise
        path.unlink()


def _lock(stream: IO[bytes], on_wait: Callable[[], None]) -> None:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        on_wait()
        fcntl.flock(stream, fcntl.LOCK_EX)


def _is_still_at(stream: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False
