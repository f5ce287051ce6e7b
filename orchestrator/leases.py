"""Who may run a sweep, and which processes still do.

A driver holds its sweep's lease: the lock on SWEEP/driver.lock, which the kernel frees when the
process ends, however it ends. Some network file systems keep locks on each host alone, so the file
also names the holder and counts its heartbeats. A driver on another host takes the lease over only
after it has seen no heartbeat for `LEASE_SECONDS` of its own steady clock; what either wall clock
says doesn't matter.

A process is known by host, pid and the moment it was started, in clock ticks since a boot that has
an id: a pid that was given to another process, or a wall clock that was set, confuses nothing.
"""

import contextlib
import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from orchestrator.errors import LedgerError

if TYPE_CHECKING:
    import psutil

HEARTBEAT_SECONDS = 5.0
LEASE_SECONDS = 60.0
"""Without a heartbeat for so long, a driver on another host counts as gone: twelve heartbeats."""
POLL_SECONDS = 1.0


def process_facts() -> dict[str, Any]:
    """Host, pid and start of this process: what tells a live writer from a dead one."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "process_started": process_started(os.getpid()),
    }


def process_started(pid: int) -> str | None:
    """When a process was started, as a text that no other process of that pid shares.

    None where there is no such process, or only its exit status is left.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _started_elsewhere(pid)
    # The name, in parentheses, may hold anything; state and start time are fields 3 and 22.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state == "Z" else f"{boot}:{fields[18]}"


def _started_elsewhere(pid: int) -> str | None:
    """The same without /proc."""
    import psutil  # noqa: PLC0415 - slow to load, and `status` does without

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None


def is_alive(facts: dict[str, Any]) -> bool:
    """Whether the process of this host that gave these `process_facts` still runs."""
    if facts.get("host") != socket.gethostname() or not isinstance(facts.get("pid"), int):
        return False
    started = process_started(facts["pid"])
    return started is not None and started == facts.get("process_started")


def living(claims: Iterable[dict[str, Any]]) -> list["psutil.Process"]:
    """The processes of this host that gave these `process_facts` and still run."""
    import psutil  # noqa: PLC0415 - slow to load, and `status` does without

    processes = []
    for facts in claims:
        with contextlib.suppress(psutil.NoSuchProcess):
            if is_alive(facts):
                processes.append(psutil.Process(facts["pid"]))
    return processes


def interrupt_main_thread() -> None:
    """Send SIGTERM to the main thread, whatever call it waits in.

    Not SIGINT, which a shell's background jobs ignore; a driver takes both alike.
    """
    ident = threading.main_thread().ident
    assert ident is not None
    signal.pthread_kill(ident, signal.SIGTERM)


@contextmanager
def waiting_lock(path: Path) -> Iterator[None]:
    """Holds a lock file for a `with` block; others on this host wait for it."""
    with path.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class DriverLease:
    """The right to run a sweep, for a `with` block; one process has it at a time.

    Attributes:
        lost_to: who took it over while this process seemed gone; None while it is held.
    """

    def __init__(self, folder: Path, on_wait: Callable[[str], None] | None = None) -> None:
        """Take nothing yet.

        Args:
            folder: of the sweep.
            on_wait: told once who holds the lease, if another process does, which is then waited
                for; None to be refused instead.
        """
        self.lost_to: str | None = None
        self._path = folder / "driver.lock"
        self._on_wait = on_wait
        self._stop = threading.Event()
        self._beats = 0

    def __enter__(self) -> "DriverLease":
        """Wait for the lease and hold it.

        Raises:
            LedgerError: another process holds it and waiting was not asked for.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        has_waited = False
        while (file := self._taken()) is None:
            if self._on_wait is None:
                raise LedgerError(
                    f"another process ({self._holder()}) is running this sweep; wait for it or "
                    "stop it"
                )
            if not has_waited:
                self._on_wait(self._holder())
            has_waited = True
            time.sleep(POLL_SECONDS)
        self._file = file
        self._beat()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.lost_to is None:
            self._file.truncate(0)
        self._file.close()

    def _taken(self) -> TextIO | None:
        """The locked file, or None while another process holds the lease."""
        file = self._path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            return None
        if self._beats_elsewhere():
            file.close()
            return None
        return file

    def _beats_elsewhere(self) -> bool:
        """Whether a driver on another host, where this host's locks may not count, is alive."""
        first = self._facts()
        if not first or first.get("host") == socket.gethostname():
            return False
        deadline = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < deadline:
            if self._facts() != first:
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _facts(self) -> dict[str, Any]:
        """What the file says of its holder; nothing where it is empty or half written."""
        try:
            facts = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return facts if isinstance(facts, dict) else {}

    def _holder(self) -> str:
        facts = self._facts()
        return f"{facts.get('host', 'unknown host')} pid {facts.get('pid', 'unknown')}"

    def _beat(self) -> None:
        self._beats += 1
        # In place: the lock is on this file, which another one under its name would not have.
        self._file.seek(0)
        self._file.truncate(0)
        self._file.write(json.dumps({**process_facts(), "beats": self._beats}))
        self._file.flush()

    def _keep(self) -> None:
        """Beats until the block ends; interrupts it when another host has taken over."""
        while not self._stop.wait(HEARTBEAT_SECONDS):
            facts = self._facts()
            if facts and (facts.get("host"), facts.get("pid")) != (
                socket.gethostname(),
                os.getpid(),
            ):
                self.lost_to = self._holder()
                interrupt_main_thread()
                return
            try:
                self._beat()
            except OSError:  # a full disk: the lock itself still holds on this host
                continue
