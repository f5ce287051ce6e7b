"""A copy of a sweep's folder in an object store, so that another machine can continue from there.

Journals need appending, fsync, renames and locks, which object stores lack, so a sweep always runs
in a folder of its machine. Before it runs, what the store has and the folder lacks is fetched;
while it runs, and at its end, what has changed is sent. One machine at a time runs a sweep
(`orchestrator.store_lease`), so changes go one way at a time.

`.store.json` in the sweep's folder notes each file as both sides had it last; what it says only
saves work and tells which side has changed. Journals are never overwritten by anything but a longer
text that begins with theirs, on either side, and nothing but checkpoints is ever removed.
"""

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.errors import LedgerError
from orchestrator.ledger import Ledger, write_atomically
from orchestrator.store import Store, StoreError
from orchestrator.store_lease import FOLDER as LEASES
from orchestrator.store_lease import StoreLease

SEND_SECONDS = 30.0
"""Between two looks for what has changed."""
SEND_SHARE = 0.02
"""Of the time, at most, that is spent on such looks."""
TRANSFERS = 8
"""Files on their way at the same time."""

STATE = ".store.json"
OF_ONE_MACHINE = ("driver.lock", "mlflow.json")
"""Files that mean something on their own machine only."""
APPENDED = (".jsonl", ".log")
"""Files that grow at their end: copied as they were at one moment, and compared by their text."""

Seen = dict[str, Any]
"""A file as both sides had it last: its `size` and `mtime_ns` here, its `version` there."""


class Mirror:
    """One sweep's folder and its copy."""

    def __init__(self, store: Store, folder: Path) -> None:
        """Read what is noted of the last exchange.

        Args:
            store: of this sweep.
            folder: of this sweep.
        """
        self._store, self._folder = store, folder
        self._seen: dict[str, Seen] = {}
        try:
            noted = json.loads((folder / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):  # never, or half written: everything is looked at
            return
        if noted.get("uri") == store.uri:
            self._seen = noted["files"]

    def fetch(self) -> int:
        """Bring the folder up to what the store has; returns how many files came.

        Raises:
            StoreError: the store cannot be used.
            LedgerError: a journal that goes on differently here and in the store.
        """
        versions = {p: v for p, v in self._store.versions().items() if _is_kept(p)}
        wanted = [path for path, version in versions.items() if self._is_news(path, version)]
        try:
            return sum(self._each(self._fetch_one, ((p, versions[p]) for p in wanted)))
        finally:
            self._note()

    def send(self) -> int:
        """Bring the store up to what the folder has; returns how many files went.

        Raises:
            StoreError: the store cannot be used; what went is not sent again.
        """
        here = {path: stat for path, stat in _files(self._folder) if _is_kept(path)}
        changed = [p for p, stat in here.items() if not _is_same(self._seen.get(p), stat)]
        gone = [p for p in self._seen if p not in here and _is_checkpoint(p)]
        try:
            went = sum(self._each(self._send_one, ((path,) for path in changed)))
            for path in gone:
                self._store.remove(path)
                del self._seen[path]
        finally:
            if changed or gone:
                self._note()
        return went

    def _each(self, work: Any, arguments: Iterable[tuple[Any, ...]]) -> list[int]:
        with ThreadPoolExecutor(TRANSFERS, thread_name_prefix="store") as pool:
            return [int(done.result()) for done in [pool.submit(work, *a) for a in arguments]]

    def _is_news(self, path: str, version: str) -> bool:
        """Whether the store has something of a file that the folder may lack."""
        seen = self._seen.get(path)
        if seen is None or seen["version"] != version:
            return True
        # A checkpoint that is gone here was of a trial that has ended, and goes there as well.
        return not (self._folder / path).exists() and not _is_checkpoint(path)

    def _fetch_one(self, path: str, version: str) -> bool:
        target = self._folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        self._store.download(path, partial)
        is_appended = path.endswith(APPENDED) and target.exists()
        if is_appended and not self._takes(target, partial):
            partial.unlink()
            return False
        partial.replace(target)
        self._seen[path] = _as_seen(target.stat(), version)
        return True

    def _takes(self, here: Path, there: Path) -> bool:
        """Whether the store's text goes on where ours ends; what goes on here is sent to it.

        Raises:
            LedgerError: a journal of which neither begins with the other.
        """
        if _begins(there, here):
            return True
        if here.suffix == ".log" or _begins(here, there):
            return False
        raise LedgerError(
            f"{here} and its copy in {self._store.uri} were written by two machines at once; move "
            "this one away to go on from the store's"
        )

    def _send_one(self, path: str) -> bool:
        source = self._folder / path
        try:
            stat = source.stat()  # before reading, so that what is appended meanwhile is news
            if path.endswith(APPENDED):
                self._store.write(path, source.read_bytes())
            else:
                self._store.upload(source, path)
        except FileNotFoundError:  # an older checkpoint that has just been removed
            return False
        self._seen[path] = _as_seen(stat, self._store.version(path))
        return True

    def _note(self) -> None:
        if self._folder.is_dir():
            text = json.dumps({"uri": self._store.uri, "files": self._seen})
            write_atomically(self._folder / STATE, text)


@dataclass(slots=True)
class Copy:
    """What became of the copy of a sweep.

    Attributes:
        is_complete: whether the store has all that the folder has.
    """

    is_complete: bool = False


@contextmanager
def kept_in_store(uri: str, root: Path, sweep: str, console: Console) -> Iterator[Copy]:
    """For a `with` block, this machine alone runs the sweep and its copy in the store follows.

    Raises:
        ConfigError: a URI that is no store's.
        LedgerError: the store cannot be used, or has another journal than the folder.
    """
    store = Store(f"{uri.rstrip('/')}/{sweep}")
    mirror = Mirror(store, Ledger(root, sweep).folder)

    def say(holder: str) -> None:
        console.print(f"another machine ({holder}) is running this sweep; waiting for its end")

    with StoreLease(store, say) as lease:
        came = mirror.fetch()
        if came:
            console.print(f"{came} files fetched from {store.uri}", markup=False)
        stop = threading.Event()
        sender = threading.Thread(
            target=_keep_sending, args=(mirror, lease, stop, console), name="store", daemon=True
        )
        sender.start()
        copy = Copy()
        try:
            yield copy
        finally:
            stop.set()
            sender.join()
            copy.is_complete = _send_the_rest(mirror, lease, console)


def _send_the_rest(mirror: Mirror, lease: StoreLease, console: Console) -> bool:
    """Sends what is left at the end of a call; whether the store then has all."""
    try:
        if lease.lost_to is None and lease.confirm():
            mirror.send()
            return True
    except StoreError as error:
        console.print(f"{error}; the same command again sends what it lacks", markup=False)
        return False
    console.print(f"the right to run this sweep went to {lease.lost_to}", markup=False)
    return False


def fetch(uri: str, root: Path, sweep: str, console: Console) -> None:
    """Bring a sweep's folder up to its copy, to look at it here.

    Raises:
        ConfigError: a URI that is no store's.
        LedgerError: the store cannot be used, or has no such sweep, or has another journal.
    """
    store = Store(f"{uri.rstrip('/')}/{sweep}")
    if "spec.json" not in store.versions():
        raise LedgerError(f"no sweep {sweep!r} in the store {uri}")
    came = Mirror(store, Ledger(root, sweep).folder).fetch()
    console.print(f"{sweep}: {came} files fetched from {store.uri}", markup=False)


def _keep_sending(
    mirror: Mirror, lease: StoreLease, stop: threading.Event, console: Console
) -> None:
    """Sends what changes until told to stop; a store that is away is tried again."""
    pause_seconds, is_behind = SEND_SECONDS, False
    while not stop.wait(pause_seconds):
        began = time.monotonic()
        try:
            if not lease.confirm():
                return
            mirror.send()
        except StoreError as error:
            if not is_behind:
                console.print(f"{error}; trials go on, and it is tried again", markup=False)
            is_behind = True
        else:
            is_behind = False
        pause_seconds = max(SEND_SECONDS, (time.monotonic() - began) / SEND_SHARE)


def _files(folder: Path, inside: str = "") -> Iterator[tuple[str, os.stat_result]]:
    """Every file below a folder, by its path inside, with what the system says of it."""
    try:
        entries = list(os.scandir(folder / inside))
    except FileNotFoundError:
        return
    for entry in entries:
        path = f"{inside}{entry.name}"
        if entry.is_dir(follow_symlinks=False):
            if not entry.name.startswith("."):
                yield from _files(folder, f"{path}/")
        else:
            try:
                yield path, entry.stat()
            except FileNotFoundError:
                continue


def _is_kept(path: str) -> bool:
    """Whether a file belongs into the copy: none of one machine's own, none half written.

    Nor one outside the folder: a store takes any name, such as `../x`, `a//x` or `/x`.
    """
    parts = path.split("/")
    is_inside = all(part and not part.startswith(".") for part in parts)
    return is_inside and path not in OF_ONE_MACHINE and parts[0] != LEASES


def _is_checkpoint(path: str) -> bool:
    return "/checkpoints/" in path


def _as_seen(stat: os.stat_result, version: str) -> Seen:
    return {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "version": version}


def _is_same(seen: Seen | None, stat: os.stat_result) -> bool:
    return seen is not None and (seen["size"], seen["mtime_ns"]) == (stat.st_size, stat.st_mtime_ns)


def _begins(longer: Path, shorter: Path) -> bool:
    """Whether one file begins with all of the other."""
    with longer.open("rb") as a, shorter.open("rb") as b:
        text = b.read()
        return a.read(len(text)) == text
