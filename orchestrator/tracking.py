"""The MLflow view: one parent run per sweep, one nested run per replicate, replayed from journals.

The only file that imports MLflow, and its only writer. The journal is the record: everything here
can be deleted and made again. Writing is idempotent; a run carries the tag `synced`, which says
what of the ledger it shows, and a step that it already has is not sent twice. A call that fails may
or may not have reached the store, so the next one first asks the store what it has.
"""

import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

# Read by MLflow when it is imported, so they come first.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
# Two lines for every run that ends, with the server's password if its URI has one.
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
# A server that is down is asked again at the next look, not for minutes within one call.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag, ViewType
from mlflow.exceptions import MlflowException

from orchestrator.errors import ConfigError, LedgerError
from orchestrator.failures import mlflow_status
from orchestrator.journal import read_events
from orchestrator.leases import waiting_lock
from orchestrator.ledger import Ledger, ReplicateState, write_atomically
from orchestrator.provenance import Provenance
from orchestrator.records import TrialRecord
from orchestrator.store_uri import tracking_uri, ui_address, without_secret

CURVE_METRICS = ("tokens", "train_loss_nats", "grad_norm", "lr", "val_loss_nats")
FINAL_METRICS = (
    "val_loss_se",
    "val_bits_per_byte",
    "recall_accuracy",
    "needle_accuracy",
    "two_hop_accuracy",
    "init_loss_nats",
    "tokens_per_second",
    "step_seconds_median",
    "peak_memory_bytes",
    "device_seconds",
    "wall_seconds",
    "params_total",
    "params_non_embedding",
    "flops_per_token",
    "state_bytes",
    "kv_bytes_per_token",
)
FINAL_TAGS = ("device_name", "data_id", "eval_id", "kernel_impl", "precision", "git_commit")
METRICS_PER_BATCH = 1000
"""MLflow's own limit."""
PARAMS_PER_BATCH = 100
"""MLflow's own limit."""
PARAM_CHARACTERS = 6000
"""MLflow's own limit."""
RUNS_PER_PAGE = 1000

STORE_ERRORS = (MlflowException, OSError)
"""What MLflow raises when its store is away, locked or full."""

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class TrackingError(LedgerError):
    """The MLflow store cannot be reached or written now; the journals have what it lacks."""


def _reaching_the_store(
    method: Callable[Concatenate["MlflowView", Arguments], Result],
) -> Callable[Concatenate["MlflowView", Arguments], Result]:
    """The method; where MLflow fails, it raises `TrackingError` and doubts what was sent."""

    @functools.wraps(method)
    def reach(view: "MlflowView", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return method(view, *args, **kwargs)
        except STORE_ERRORS as error:
            view.doubt()
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise TrackingError(without_secret(first)[:300]) from None

    return reach


class MlflowView:
    """One sweep's runs in one MLflow store.

    Methods raise `TrackingError` where the store cannot be used; a later call makes up for it.
    """

    def __init__(self, uri: str, root: Path, sweep: str) -> None:
        self._sweep = sweep
        self._address = ui_address(uri)
        self._has_server = uri.startswith(("http://", "https://"))
        root.mkdir(parents=True, exist_ok=True)
        # Processes that make or migrate an SQLite store at the same time break it.
        with waiting_lock(root / "mlflow.lock"):
            self._client = _connect(uri)
            self._experiment = self._ensure_experiment(root)
        self._parent: str | None = None
        self._is_known = False
        self._runs: dict[str, str] = {}
        self._described: set[str] = set()
        self._synced: dict[str, str] = {}
        self._steps: dict[str, int] = {}
        self._offsets: dict[str, int] = {}

    @_reaching_the_store
    def open(self, params: dict[str, Any], provenance: Provenance) -> str:
        """Find or make the sweep's parent run, mark it running, and return its id."""
        if self.find_parent():
            self._client.update_run(self._parent_id, status="RUNNING")
        else:
            tags = {"kind": "sweep", "sweep": self._sweep, **_source_tags(provenance)}
            run = self._client.create_run(
                self._experiment, tags=tags, run_name=self._sweep, start_time=_milliseconds()
            )
            self._parent = run.info.run_id
            self._log_params(self._parent_id, params)
        self._find_runs()
        return self._parent_id

    def doubt(self) -> None:
        """Forget what the store is believed to have, so that it is asked."""
        self._is_known = False

    def _find_runs(self) -> None:
        """Ask the store for the sweep's runs and for what they show."""
        for known in (self._runs, self._described, self._synced, self._steps, self._offsets):
            known.clear()
        for run in self._search(f"tags.`mlflow.parentRunId` = '{self._parent_id}'"):
            name = run.data.tags["replicate_id"]
            self._runs[name] = run.info.run_id
            self._synced[name] = run.data.tags.get("synced", "")
            if "described" in run.data.tags:
                self._described.add(name)
        self._is_known = True

    @property
    def page(self) -> str | None:
        """Where a tracking server shows the sweep's own run; None for a store without a server."""
        return f"{self._runs_page}/{self._parent}" if self._has_server and self._parent else None

    @property
    def _runs_page(self) -> str:
        return f"{self._address}/#/experiments/{self._experiment}/runs"

    @property
    def _parent_id(self) -> str:
        assert self._parent is not None, "open or find_parent comes first"
        return self._parent

    @_reaching_the_store
    def find_parent(self) -> bool:
        """Find the sweep's parent run; whether there is one."""
        run = next(self._search("tags.kind = 'sweep'"), None)
        self._parent = run.info.run_id if run is not None else None
        return run is not None

    @_reaching_the_store
    def sync(
        self,
        ledger: Ledger,
        records: dict[str, TrialRecord],
        states: dict[str, ReplicateState],
        provenance: Provenance,
    ) -> None:
        """Bring every begun replicate's run up to what its journals say.

        Args:
            ledger: of the sweep.
            records: what was planned, by replicate.
            states: what the journals say of each of `records`.
            provenance: for the tags of new runs.
        """
        if not self._is_known:
            self._find_runs()
        for name, planned in records.items():
            state = states[name]
            if not state.attempts or self._synced.get(name) == _signature(state):
                continue
            self._sync_one(ledger, ledger.record(planned, state), state, provenance)

    @_reaching_the_store
    def write_links(self, ledger: Ledger) -> None:
        """Write the sweep's `mlflow.json`: where each replicate's run is seen.

        Ids of runs are the store's own and new in a store that is made again, so they are no part
        of the records; reports link to them.
        """
        if not self._is_known:
            self._find_runs()
        page = self._runs_page
        links = {
            "sweep": f"{page}/{self._parent_id}",
            "replicates": {name: f"{page}/{run_id}" for name, run_id in sorted(self._runs.items())},
        }
        write_atomically(ledger.folder / "mlflow.json", json.dumps(links, indent=1))

    @_reaching_the_store
    def close(self, status: str, metrics: dict[str, float], note: str) -> None:
        """Mark the parent run as ended, with the sweep's headline numbers."""
        self._log(
            self._parent_id,
            [_metric(key, value, 0, _milliseconds()) for key, value in metrics.items()],
        )
        self._client.set_tag(self._parent_id, "mlflow.note.content", note)
        self._client.set_terminated(self._parent_id, status=status)

    @_reaching_the_store
    def attach(self, folder: Path, files: Iterable[Path]) -> None:
        """Copy files under a folder to the parent run's artifacts, folders kept."""
        for path in files:
            inside = path.relative_to(folder).parent
            self._client.log_artifact(
                self._parent_id, str(path), None if inside == Path() else str(inside)
            )

    @_reaching_the_store
    def record_file(self, path: Path, provenance: Provenance) -> None:
        """Make a finished run that holds one file, named as the file is."""
        tags = {"kind": "benchmark", **_source_tags(provenance)}
        run = self._client.create_run(
            self._experiment, tags=tags, run_name=path.stem, start_time=_milliseconds()
        )
        self._client.log_artifact(run.info.run_id, str(path))
        self._client.set_terminated(run.info.run_id)

    @_reaching_the_store
    def forget(self) -> int:
        """Delete the sweep's runs from the view, to be made again; returns how many there were."""
        found = list(self._search("tags.kind = 'replicate'")) + list(
            self._search("tags.kind = 'sweep'")
        )
        for run in found:
            self._client.delete_run(run.info.run_id)
        self.doubt()
        self._parent = None
        return len(found)

    @_reaching_the_store
    def differences(self, ledger: Ledger, records: dict[str, TrialRecord]) -> list[str]:
        """Sentences on every replicate whose run does not show what the journals hold."""
        runs: dict[str, list[Run]] = {}
        for run in self._search("tags.kind = 'replicate'"):
            runs.setdefault(run.data.tags["replicate_id"], []).append(run)
        found = [f"{name}: a run without a replicate" for name in runs.keys() - records.keys()]
        for name, planned in records.items():
            state = ledger.state(name)
            if not state.attempts:
                continue
            if len(runs.get(name, [])) != 1:
                found.append(f"{name}: {len(runs.get(name, []))} runs instead of one")
                continue
            found += self._run_differences(ledger, ledger.record(planned, state), runs[name][0])
        return found

    def _run_differences(self, ledger: Ledger, record: TrialRecord, run: Run) -> list[str]:
        name, row = record.replicate_id, record.as_row()
        state = ledger.state(name)
        found = []
        status = mlflow_status(state.status, state.failure_class)
        if run.info.status != status:
            found.append(f"{name}: MLflow says {run.info.status}, the journal {status}")
        for key in FINAL_METRICS:
            shown = run.data.metrics.get(key)
            if not _same(shown, row[key]) and status != "RUNNING":
                found.append(f"{name}: {key} is {shown} in MLflow and {row[key]} in the journal")
        points = ledger.curve(name, state.attempts)
        for key in CURVE_METRICS:
            history = self._client.get_metric_history(run.info.run_id, key)
            shown_points = [(metric.step, metric.value) for metric in history]
            wanted = [(p.step, v) for p in points if (v := getattr(p, key)) is not None]
            if len(shown_points) != len(wanted) or not all(
                a[0] == b[0] and _same(a[1], b[1])
                for a, b in zip(sorted(shown_points), wanted, strict=True)
            ):
                found.append(f"{name}: the curve of {key} differs")
        return found

    def _ensure_experiment(self, root: Path) -> str:
        found = self._client.get_experiment_by_name(self._sweep)
        if found is None:
            location = (root / "artifacts" / self._sweep).as_uri()
            return str(self._client.create_experiment(self._sweep, artifact_location=location))
        if found.lifecycle_stage != "active":
            raise ConfigError(
                f"the MLflow experiment {self._sweep} was deleted; restore it with `mlflow "
                f"experiments restore -x {found.experiment_id}`, or use another sweep name"
            )
        return str(found.experiment_id)

    def _search(self, query: str) -> Iterator[Run]:
        """Every run that meets a query; MLflow hands them out in pages."""
        token: str | None = None
        while True:
            page = self._client.search_runs(
                [self._experiment],
                query,
                run_view_type=ViewType.ACTIVE_ONLY,
                max_results=RUNS_PER_PAGE,
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                return

    def _sync_one(
        self, ledger: Ledger, record: TrialRecord, state: ReplicateState, provenance: Provenance
    ) -> None:
        name = record.replicate_id
        if name not in self._runs:
            self._runs[name] = self._create(record, state, provenance)
            self._steps[name] = -1
        run_id = self._runs[name]
        if name not in self._described:
            self._describe(ledger, record, run_id)
        if name not in self._steps:
            history = self._client.get_metric_history(run_id, "tokens")
            self._steps[name] = max((metric.step for metric in history), default=-1)
        self._send_curve(name, run_id, state)
        status = mlflow_status(state.status, state.failure_class)
        if status == "RUNNING":
            if self._synced.get(name) != _RUNNING:
                self._client.update_run(run_id, status="RUNNING")
                self._synced[name] = _RUNNING
            return
        self._finish(ledger, record, state, run_id, status)

    def _create(self, record: TrialRecord, state: ReplicateState, provenance: Provenance) -> str:
        tags = {
            "kind": "replicate",
            "mlflow.parentRunId": self._parent_id,
            "sweep": record.sweep,
            "replicate_id": record.replicate_id,
            "cell_id": record.cell_id,
            "arm_id": record.arm_id,
            "seed": str(record.seed),
            **_source_tags(provenance),
        }
        started = int(1000 * float(state.start.get("time", time.time())))
        run = self._client.create_run(
            self._experiment, start_time=started, tags=tags, run_name=run_name(record)
        )
        return str(run.info.run_id)

    def _describe(self, ledger: Ledger, record: TrialRecord, run_id: str) -> None:
        """What never changes of a run; MLflow takes equal values again."""
        folder = ledger.replicate_folder(record.replicate_id)
        self._client.log_artifact(run_id, str(folder / "config.json"))
        self._log_params(run_id, _flat_params(record), [RunTag("described", "True")])
        self._described.add(record.replicate_id)

    def _send_curve(self, name: str, run_id: str, state: ReplicateState) -> None:
        metrics: list[Metric] = []
        for path in state.attempts:
            events, self._offsets[path] = read_events(path, self._offsets.get(path, 0))
            for event in events:
                if event["event"] != "step" or event["step"] <= self._steps[name]:
                    continue
                stamp = int(1000 * event["time"])
                metrics += [
                    _metric(key, event[key], event["step"], stamp)
                    for key in CURVE_METRICS
                    if event.get(key) is not None
                ]
                self._steps[name] = event["step"]
        self._log(run_id, metrics)

    def _finish(
        self, ledger: Ledger, record: TrialRecord, state: ReplicateState, run_id: str, status: str
    ) -> None:
        # A clock that was set back during a trial must not end it before it began.
        began = float(state.start.get("time", 0.0))
        ended = int(1000 * max(began, float(state.end.get("time", time.time()))))
        row = record.as_row()
        metrics = [
            _metric(k, row[k], record.steps, ended) for k in FINAL_METRICS if row[k] is not None
        ]
        output = ledger.replicate_folder(record.replicate_id) / "output.log"
        if output.is_file() and output.stat().st_size:
            self._client.log_artifact(run_id, str(output))
        tags = {key: str(row[key]) for key in FINAL_TAGS if row[key] is not None}
        tags |= {
            "status": record.status,
            "failure_class": record.failure_class or "",
            "attempts": str(record.attempts),
            "synced": _signature(state),
        }
        self._client.set_terminated(run_id, status=status, end_time=ended)
        # The last call, since `synced` says that all else is there.
        self._client.log_batch(run_id, metrics, tags=[RunTag(k, v) for k, v in tags.items()])
        self._synced[record.replicate_id] = tags["synced"]

    def _log_params(self, run_id: str, params: dict[str, Any], tags: Sequence[RunTag] = ()) -> None:
        """Send parameters, and with the last of them some tags."""
        entries = [Param(key, str(value)[:PARAM_CHARACTERS]) for key, value in params.items()]
        while len(entries) > PARAMS_PER_BATCH:
            self._client.log_batch(run_id, params=entries[:PARAMS_PER_BATCH])
            entries = entries[PARAMS_PER_BATCH:]
        self._client.log_batch(run_id, params=entries, tags=tags)

    def _log(self, run_id: str, metrics: list[Metric]) -> None:
        """Send metrics in batches that never divide a step."""
        start = 0
        while start < len(metrics):
            end = min(start + METRICS_PER_BATCH, len(metrics))
            while end < len(metrics) and metrics[end].step == metrics[end - 1].step:
                end -= 1
            self._client.log_batch(run_id, metrics=metrics[start:end])
            start = end


_RUNNING = "running"


def _connect(uri: str) -> MlflowClient:
    try:
        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        client.search_experiments(max_results=1)
    except (*STORE_ERRORS, ImportError) as error:  # or a database whose driver is not installed
        raise ConfigError(
            f"tracking.uri={without_secret(uri)}: MLflow cannot use it "
            f"({without_secret(str(error).strip()).splitlines()[0]})"
        ) from None
    return client


def serve_ui(root: Path, port: int) -> int:
    """Run the MLflow UI on the root's embedded store, on this machine only, until interrupted.

    Prints where each sweep is seen: MLflow's own front page opens in its view for agents, in which
    runs are hard to find.

    Raises:
        ConfigError: there is no store yet.
    """
    if not (root / "mlflow.db").is_file():
        raise ConfigError(f"{root} has no MLflow store yet; run a sweep first")
    command = [sys.executable, "-m", "mlflow", "ui"]
    uri = tracking_uri(None, root)
    for experiment in MlflowClient(uri).search_experiments(order_by=["name ASC"]):
        if experiment.name != "Default":
            sys.stdout.write(
                f"{experiment.name}: http://127.0.0.1:{port}/#/experiments/"
                f"{experiment.experiment_id}/runs?workflowType=machine_learning\n"
            )
    sys.stdout.flush()
    store = ["--backend-store-uri", uri]
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return subprocess.run([*command, *store, *address], check=False).returncode


def run_name(record: TrialRecord) -> str:
    """A run's name in MLflow: the choices that tell it from its neighbours."""
    return f"{record.mixer} {record.stack} {record.optimizer} lr={record.lr:g} s{record.seed}"


def _signature(state: ReplicateState) -> str:
    """What of the ledger a run shows when it is up to date."""
    return (
        f"{len(state.attempts)}:{state.status}:{state.failure_class or ''}:"
        f"{len(state.speed_attempts) if state.speed else 0}"
    )


def _source_tags(provenance: Provenance) -> dict[str, str]:
    tags = {
        "mlflow.user": provenance.user,
        "mlflow.source.name": provenance.command,
        "mlflow.source.type": "LOCAL",
        "code_digest": provenance.code_digest[:12],
    }
    if provenance.git_commit:
        tags["mlflow.source.git.commit"] = provenance.git_commit
        tags["git_dirty"] = str(provenance.git_dirty)
    return tags


def _flat_params(record: TrialRecord) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def visit(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                visit(f"{prefix}.{key}" if prefix else key, item)
        else:
            flat[prefix] = value

    visit("", json.loads(record.config_json))
    return flat | {"seed": record.seed, "data_seed": record.data_seed}


def _metric(key: str, value: float, step: int, stamp: int) -> Metric:
    # MLflow would store an infinity as 1.797e308, so it is shown as NaN; the journal has the value.
    number = float(value)
    return Metric(key, number if math.isfinite(number) else math.nan, stamp, step)


def _same(shown: float | None, recorded: float | None) -> bool:
    """Whether MLflow's number is the recorded one; an infinity is shown as NaN."""
    if shown is None or recorded is None:
        return shown is recorded
    if not math.isfinite(recorded):
        return math.isnan(shown)
    return float(shown) == float(recorded)


def _milliseconds() -> int:
    return int(1000 * time.time())
