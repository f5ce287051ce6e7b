"""Which machine may run a sweep whose records are kept in an object store.

Leases are objects with rising numbers, each created only if it is not there yet, so that of several
machines one wins. The highest number holds; its holder rewrites it to show that it lives. A machine
takes over with the next number after it has seen no change for `LEASE_SECONDS` of its own steady
clock, and a holder that could not rewrite for nearly as long stops by itself: both before any wall
clock is asked.
"""

import json
import threading
import time
from collections.abc import Callable
from typing import Any

from orchestrator.leases import interrupt_main_thread, is_alive, process_facts
from orchestrator.store import Store, StoreError

LEASE_SECONDS = 300.0
"""Without a sign of life for so long, a machine counts as gone; a store may be away for less."""
HEARTBEAT_SECONDS = 15.0
GIVE_UP_SECONDS = LEASE_SECONDS - 2 * HEARTBEAT_SECONDS
"""After so long without reaching the store a holder stops, before another machine may begin."""
POLL_SECONDS = 2.0
FOLDER = "leases"


class StoreLease:
    """The right to run one sweep of a store, for a `with` block; one process has it at a time.

    Attributes:
        lost_to: who took it over, or what else ended it; None while it is held.
    """

    def __init__(self, store: Store, on_wait: Callable[[str], None]) -> None:
        """Take nothing yet.

        Args:
            store: the sweep's.
            on_wait: told once who holds the lease, if another process does, which is waited for.
        """
        self.lost_to: str | None = None
        self._store = store
        self._on_wait = on_wait
        self._stop = threading.Event()
        self._beats = 0

    def __enter__(self) -> "StoreLease":
        """Wait for the lease and hold it.

        Raises:
            StoreError: the store cannot be used, or creates objects that are there already.
        """
        has_waited = False
        while True:
            newest = self._newest()
            if newest and self._is_held(newest):
                if not has_waited:
                    self._on_wait(self._holder(newest))
                has_waited = True
                if self._changes(newest):
                    continue
            self._number = newest + 1
            if self._store.create(_path(self._number), self._text()):
                break
        if self._store.create(_path(self._number), self._text()):
            raise StoreError(
                f"the store {self._store.uri} does not honour If-None-Match, so it cannot keep two "
                "machines from running one sweep; use a store that does"
            )
        self._reached_at = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name="store lease", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.lost_to is not None:
            return
        try:
            self._store.write(_path(self._number), json.dumps({"released": True}).encode())
            for name in self._store.names(FOLDER):
                if _number(name) < self._number:
                    self._store.remove(f"{FOLDER}/{name}")
        except StoreError:  # it runs out by itself
            return

    def confirm(self) -> bool:
        """Whether the lease is held, asked of the store.

        Raises:
            StoreError: the store cannot be asked.
        """
        newest = self._newest()
        if newest > self._number:
            self.lost_to = self._holder(newest)
        return self.lost_to is None

    def _newest(self) -> int:
        """The highest number; 0 where nobody has ever run the sweep."""
        return max((_number(name) for name in self._store.names(FOLDER)), default=0)

    def _facts(self, number: int) -> dict[str, Any]:
        """What a lease says of its holder; nothing while it is half written in a shared folder."""
        try:
            facts = json.loads(self._store.read(_path(number)))
        except ValueError:
            return {}
        return facts if isinstance(facts, dict) else {}

    def _is_held(self, number: int) -> bool:
        """Whether a lease was neither given back nor left by a process of this boot that ended."""
        facts = self._facts(number)
        if facts.get("released"):
            return False
        here = process_facts()
        is_here = facts.get("host") == here["host"] and _boot(facts) == _boot(here)
        return not is_here or is_alive(facts)

    def _changes(self, number: int) -> bool:
        """Waits; whether the lease has changed before it ran out."""
        first = self._facts(number)
        deadline = time.monotonic() + LEASE_SECONDS
        while time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            if self._newest() > number or self._facts(number) != first:
                return True
            if not self._is_held(number):
                return True
        return False

    def _holder(self, number: int) -> str:
        facts = self._facts(number)
        return f"{facts.get('host', 'unknown host')} pid {facts.get('pid', 'unknown')}"

    def _text(self) -> bytes:
        self._beats += 1
        return json.dumps({**process_facts(), "beats": self._beats}).encode()

    def _keep(self) -> None:
        """Beats until the block ends; interrupts it when the lease is gone."""
        while not self._stop.wait(HEARTBEAT_SECONDS):
            try:
                if self.confirm():
                    self._store.write(_path(self._number), self._text())
                    self._reached_at = time.monotonic()
            except StoreError as error:
                if time.monotonic() - self._reached_at > GIVE_UP_SECONDS:
                    self.lost_to = f"nobody for all that is known: {error}"
            if self.lost_to is not None:
                interrupt_main_thread()
                return


def _path(number: int) -> str:
    return f"{FOLDER}/{number:08d}.json"


def _number(name: str) -> int:
    return int(name.partition(".")[0])


def _boot(facts: dict[str, Any]) -> str:
    """Of which boot of a machine a process is."""
    return str(facts.get("process_started")).partition(":")[0]
