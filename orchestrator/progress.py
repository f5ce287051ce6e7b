"""What is shown of a sweep while its trials run: MLflow, the display, and when to stop early."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from orchestrator.failures import alike
from orchestrator.ledger import ReplicateState
from orchestrator.plan import Plan
from orchestrator.provenance import Provenance
from orchestrator.records import TrialRecord
from orchestrator.watch import Watch

if TYPE_CHECKING:
    from orchestrator.tracking import MlflowView

MLFLOW_PAUSE_SECONDS = 5.0
MLFLOW_SHARE = 0.02
"""Share of one core that showing trials in MLflow may take while they run, as they may need it."""
SHOWN_AT_A_TIME = 100
"""Results whose states are in memory together, 7 kB each, while MLflow is told of them."""


class SweepStoppedError(RuntimeError):
    """Trials fail in a way that the ones still to come would share; the message shows it."""


@contextmanager
def opening_view(uri: str, plan: Plan) -> Iterator[Callable[[], "MlflowView"]]:
    """Imports MLflow and makes its database, which take seconds, while the `with` block goes on.

    Yields:
        A function that waits for the view; raises as `MlflowView` does.
    """

    def open_view() -> "MlflowView":
        from orchestrator.tracking import MlflowView

        return MlflowView(uri, plan.root, plan.spec.name)

    with ThreadPoolExecutor(1, thread_name_prefix="mlflow") as pool:
        yield pool.submit(open_view).result


class Progress:
    """Keeps MLflow and the display up with the journals; one caller at a time.

    A store that is away holds up no trial: the journals have everything, and each later look, or
    the next call, makes up for what it lacks.
    """

    def __init__(
        self, plan: Plan, view: "MlflowView", provenance: Provenance, console: Console
    ) -> None:
        self.watch: Watch | None = None
        self._view = view
        self._console = console
        self._is_behind = False
        self._plan = plan
        self._provenance = provenance
        self._lock = threading.Lock()
        self._open = dict(plan.desired)
        self._ended: dict[str, TrialRecord] = {}
        self._failed_before = {n for n, s in plan.states.items() if s.status == "failed"}
        self._next_show = 0.0

    @property
    def page(self) -> str | None:
        """Where a tracking server shows the sweep; None without a server."""
        return self._view.page

    def follow(self, plan: Plan, watch: Watch) -> None:
        """Look after the replicates of a plan from now on, and show them."""
        with self._lock:
            self._plan, self.watch = plan, watch
            self._open, self._ended = dict(plan.desired), {}

    def tick(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Look at open replicates; MLflow shows them, where that is due, and then the ended close.

        Args:
            is_over: whether trials have stopped running, which then wait for this look. MLflow is
                told of no more results in it; the next look, or `finish`, tells it of the rest.

        Raises:
            SweepStoppedError: too many replicates have failed by one and the same bug.
        """
        with self._lock:
            states = self._plan.ledger.states(self._open)
            if self.watch is not None:
                self.watch.update(states)
            self._stop_if_alike(states)
            # Nothing happens to these any more: looking at all of thousands that MLflow is yet to
            # be told of, every time, would cost memory and time for each of them.
            for name, state in states.items():
                if state.is_result:
                    self._ended[name] = self._open.pop(name)
            if time.monotonic() < self._next_show:
                return
            began = time.thread_time()
            if self._show(self._open, states):
                self._show_ended(is_over)
            self._next_show = time.monotonic() + (time.thread_time() - began) / MLFLOW_SHARE

    def finish(self, patience_seconds: float = 0.0) -> None:
        """Bring every desired replicate up to date.

        Args:
            patience_seconds: how long to go on trying while MLflow cannot be written.
        """
        deadline = time.monotonic() + patience_seconds
        with self._lock:
            states = self._plan.ledger.states(self._plan.desired)
            if self.watch is not None:
                self.watch.update(states)
            while not self._show(self._plan.desired, states) and time.monotonic() < deadline:
                time.sleep(MLFLOW_PAUSE_SECONDS)

    def write_links(self) -> None:
        """Note where MLflow shows each replicate, for the report; left as it was without MLflow."""
        from orchestrator.tracking import TrackingError

        try:
            self._view.write_links(self._plan.ledger)
        except TrackingError as error:
            self._say_behind(str(error))

    def close(self, status: str, metrics: dict[str, float], note: str, files: list[Path]) -> bool:
        """End the sweep's own run; whether MLflow then shows everything."""
        from orchestrator.tracking import TrackingError

        try:
            self._view.attach(self._plan.ledger.folder, files)
            self._view.close(status, metrics, note)
        except TrackingError as error:
            self._say_behind(str(error))
        if self._is_behind:
            self._console.print(
                "MLflow lacks the newest results; the same command again, or rebuild "
                f"{self._plan.spec.name}, brings them from the journals"
            )
        return not self._is_behind

    def _show_ended(self, is_over: Callable[[], bool]) -> None:
        """Bring MLflow up to the results that it lacks, a few at a time, while trials run."""
        while self._ended and not is_over():
            records = dict(islice(self._ended.items(), SHOWN_AT_A_TIME))
            states = {name: self._plan.ledger.state(name) for name in records}
            if not self._show(records, states):
                return
            for name in records:
                del self._ended[name]

    def _show(self, records: dict[str, TrialRecord], states: dict[str, ReplicateState]) -> bool:
        """Bring MLflow up to the states; whether it could be written."""
        from orchestrator.tracking import TrackingError

        try:
            self._view.sync(self._plan.ledger, records, states, self._provenance)
        except TrackingError as error:
            self._say_behind(str(error))
            return False
        if self._is_behind:
            self._console.print("MLflow can be written again and is up to date")
        self._is_behind = False
        return True

    def _say_behind(self, reason: str) -> None:
        if not self._is_behind:
            self._console.print(
                f"MLflow cannot be written ({reason}); trials go on, and journals keep all of it",
                markup=False,
            )
        self._is_behind = True

    def _stop_if_alike(self, states: dict[str, ReplicateState]) -> None:
        """Failures of an earlier call don't count until they have failed again."""
        self._failed_before -= {n for n, s in states.items() if s.status != "failed"}
        fresh = {n: s for n, s in states.items() if n not in self._failed_before}
        names = alike(fresh, self._plan.spec.max_equal_failures)
        if names:
            raise SweepStoppedError(
                f"{len(names)} replicates failed alike ({', '.join(names)}), so the others are not "
                f"tried (max_equal_failures={self._plan.spec.max_equal_failures}):\n"
                f"{states[names[0]].end.get('traceback', '').rstrip()}"
            )
