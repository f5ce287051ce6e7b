"""One call of `sweep`: prepare, reconcile, compact, report, show in MLflow."""

import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from orchestrator.data.batches import evaluation_set
from orchestrator.data.dataset import open_dataset
from orchestrator.data.preparation import prepare
from orchestrator.display import Watch
from orchestrator.errors import ConfigError
from orchestrator.identity import digest
from orchestrator.ledger import DriverLock, Ledger, ReplicateState, read_rows
from orchestrator.plan import Plan, unprepared
from orchestrator.provenance import Provenance
from orchestrator.records import TrialRecord
from orchestrator.store_uri import tracking_uri, without_secret
from orchestrator.sweep import run_lanes
from orchestrator.tracking import MlflowView

EXIT_DONE = 0
EXIT_FAILED = 3
EXIT_INTERRUPTED = 130

SPEC_FORMAT = 1


def reconcile(plan: Plan, provenance: Provenance, console: Console) -> int:
    """Make the ledger equal to the plan and report; returns the exit code.

    Raises:
        ConfigError: something that is refused before any trial starts.
        LedgerError: another process runs this sweep.
    """
    if _is_complete(plan):
        console.print(
            f"nothing to do: all {len(plan.desired)} replicates of {plan.spec.name} have ended; "
            f"report: {plan.ledger.folder / 'report' / 'index.html'}"
        )
        return EXIT_DONE
    uri = tracking_uri(plan.spec.tracking.uri, plan.root)
    plan = with_data(plan, console)
    _refuse_other_data(plan)
    view = MlflowView(uri, plan.root, plan.spec.name)
    with DriverLock(plan.ledger.folder):
        plan.ledger.write_spec(spec_json(plan, provenance))
        view.open(_sweep_params(plan), provenance)
        progress = _Progress(plan, view, provenance)
        try:
            with Watch(plan, console) as watch:
                progress.watch = watch
                _announce(plan, console)
                plan = run_lanes(plan, provenance, progress.tick, progress.finish)
        except KeyboardInterrupt:
            _leave(plan.refreshed(), progress, view, "KILLED")
            console.print("interrupted; the same command continues")
            return EXIT_INTERRUPTED
        except Exception:
            _leave(plan.refreshed(), progress, view, "FAILED")
            raise
        progress.finish()
        compact(plan)
        metrics = report(plan.ledger, view, console)
        view.close("FINISHED", metrics, _note(plan))
        plan.ledger.write_spec({**spec_json(plan, provenance), "complete": _completeness(plan)})
    failed = [name for name, state in plan.states.items() if state.status == "failed"]
    if failed:
        console.print(f"{len(failed)} of {len(plan.desired)} replicates failed:")
        for name in failed[:5]:
            console.print(f"  {name}: {plan.states[name].end.get('error', '')}", markup=False)
        return EXIT_FAILED
    return EXIT_DONE


def _leave(plan: Plan, progress: "_Progress", view: MlflowView, status: str) -> None:
    """Leave Parquet and MLflow as true as they can be when a sweep ends early."""
    progress.finish()
    compact(plan)
    view.close(status, {}, _note(plan))


class _Progress:
    """Keeps MLflow and the display up with the journals; one caller at a time."""

    def __init__(self, plan: Plan, view: MlflowView, provenance: Provenance) -> None:
        self._plan = plan
        self._view = view
        self._provenance = provenance
        self._lock = threading.Lock()
        self._open = dict(plan.desired)
        self.watch: Watch | None = None

    def tick(self) -> None:
        """Bring open replicates up to date; those with a result are closed."""
        with self._lock:
            states = self._sync(self._open)
            for name, state in states.items():
                if state.is_result:
                    self._open.pop(name)

    def finish(self) -> None:
        """Bring every desired replicate up to date."""
        with self._lock:
            self._sync(self._plan.desired)

    def _sync(self, records: dict[str, TrialRecord]) -> dict[str, ReplicateState]:
        states = self._view.sync(self._plan.ledger, records, self._provenance)
        if self.watch is not None:
            self.watch.update(states)
        return states


def with_data(plan: Plan, console: Console) -> Plan:
    """The plan with its data prepared and checked.

    Raises:
        ConfigError: data that has to be prepared by its own command, that does not match its
            manifest, or that is too short for a window.
    """
    folder = plan.data_folder
    try:
        if folder is None:
            if not plan.data.is_embedded:
                raise ConfigError(unprepared(plan.sweep, plan.data))
            console.print(f"preparing the data set {plan.data.name}")
            folder = prepare(plan.data, plan.root).folder
        dataset = open_dataset(folder)
        for seq_len, windows in {
            (cell.config.seq_len, cell.config.eval.windows) for cell in plan.sweep.cells
        }:
            dataset.train.num_windows(seq_len)
            evaluation_set(dataset, seq_len, windows)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return replace(plan, data_folder=folder)


def _refuse_other_data(plan: Plan) -> None:
    """Refuse to train on other tokens than the replicates that the ledger has."""
    assert plan.data_folder is not None
    known = plan.ledger.spec().get("data_id") if plan.ledger.exists else None
    now = open_dataset(plan.data_folder).data_id
    if known and known != now and plan.ledger.replicate_ids():
        raise ConfigError(
            f"sweep {plan.spec.name} has replicates trained on data {known[:8]}, but this call "
            f"would use {now[:8]}; restore that data, or use another name"
        )


def compact(plan: Plan) -> list[TrialRecord]:
    """Write both Parquet files from the journals: desired replicates first, then the others."""
    ledger = plan.ledger
    planned = dict(plan.desired)
    for name in ledger.replicate_ids():
        if name not in planned:
            planned[name] = replace(ledger.planned(name), desired=False)
    states = ledger.states(planned)
    records = [ledger.record(record, states[name]) for name, record in planned.items()]
    ledger.compact(records, states)
    return records


def report(ledger: Ledger, view: MlflowView | None, console: Console) -> dict[str, float]:
    """Write the report from Parquet, attach it to the sweep's run, and return its numbers."""
    from analysis.report import write_report

    out = ledger.folder / "report"
    try:
        result = write_report(ledger.folder, out)
    except ValueError as error:  # records that cannot be compared; they are kept as they are
        console.print(f"no report: {error}", markup=False)
        return {}
    if view is not None:
        view.attach(ledger.folder, [out / name for name in result.files])
    console.print(f"report: {out / 'index.html'}", markup=False)
    return {k: float(v) for k, v in result.headline.items() if isinstance(v, int | float)}


def spec_json(plan: Plan, provenance: Provenance) -> dict[str, Any]:
    """What `spec.json` says: the resolved sweep and who ran it, on what."""
    spec = plan.spec
    assert plan.data_folder is not None
    return {
        "format": SPEC_FORMAT,
        **asdict(spec),
        "tracking": {"uri": without_secret(spec.tracking.uri) if spec.tracking.uri else None},
        "asked_device": spec.device,
        "device": plan.device,
        "precision": plan.precision,
        "threads": plan.threads,
        "data_id": open_dataset(plan.data_folder).data_id,
        "data_folder": str(plan.data_folder),
        "conf_path": str(plan.sweep.conf_path),
        "overrides": plan.sweep.overrides,
        "cells": len(plan.sweep.cells),
        "replicates": len(plan.desired),
        "provenance": asdict(provenance),
    }


def _sweep_params(plan: Plan) -> dict[str, Any]:
    """Parameters of the parent run that never change while a sweep grows."""
    spec = plan.spec
    return {"purpose": spec.purpose, "match": spec.match, "device": plan.device} | spec.base


def _is_complete(plan: Plan) -> bool:
    """Whether the last call of this very sweep ended with nothing left to do."""
    if plan.to_run or plan.to_time or not plan.ledger.exists:
        return False
    return plan.ledger.spec().get("complete") == _completeness(plan)


def _completeness(plan: Plan) -> str:
    """Digest of the desired set and of what the ledger says about it."""
    return digest({name: [s.status, len(s.attempts)] for name, s in plan.states.items()})


def _note(plan: Plan) -> str:
    """The description that MLflow shows on the parent run."""
    counts = ", ".join(f"{count} {status}" for status, count in sorted(plan.counts().items()))
    return (
        f"Sweep **{plan.spec.name}**: {len(plan.sweep.cells)} cells × {len(plan.spec.seeds)} seeds "
        f"({counts}). The report is under Artifacts, `report/index.html`."
    )


def _announce(plan: Plan, console: Console) -> None:
    for note in plan.notes:
        console.print(f"note: {note}", markup=False)
    done = len(plan.desired) - len(plan.to_run)
    console.print(
        f"{plan.spec.name}: {len(plan.desired)} replicates asked for, {done} done, "
        f"{len(plan.to_run)} to run on {plan.device}"
    )


def verify(root: Path, sweep: str, console: Console) -> int:
    """Recompute every number of a sweep's report from its records; returns the exit code.

    Raises:
        LedgerError: there is no such sweep.
        ConfigError: it has no report, or its records cannot be read.
    """
    from analysis.claims import verify as verify_claims

    ledger = Ledger(root, sweep)
    ledger.spec()
    try:
        drifts = verify_claims(ledger.folder)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for drift in drifts:
        console.print(drift, markup=False)
    if drifts:
        console.print(f"{len(drifts)} claims do not follow from the records")
        return EXIT_FAILED
    console.print(f"{sweep}: every number of the report follows from the records")
    return EXIT_DONE


def rebuild(root: Path, sweep: str, provenance: Provenance, console: Console) -> int:
    """Make a sweep's Parquet and MLflow runs again from its journals and compare them.

    Returns the exit code: 0 where MLflow then shows what the journals hold.

    Raises:
        LedgerError: there is no such sweep, or a process is running it.
    """
    ledger = Ledger(root, sweep)
    spec = ledger.spec()
    with DriverLock(ledger.folder):
        desired = {
            row["replicate_id"]: bool(row["desired"])
            for row in read_rows(ledger.folder / "trials.parquet")
        }
        records = {
            name: replace(ledger.planned(name), desired=desired.get(name, True))
            for name in ledger.replicate_ids()
        }
        states = ledger.states(records)
        ledger.compact([ledger.record(r, states[name]) for name, r in records.items()], states)
        view = MlflowView(tracking_uri(spec["tracking"]["uri"], root), root, sweep)
        removed = view.forget()
        params = {"purpose": spec["purpose"], "match": spec["match"], "device": spec["device"]}
        view.open(params | spec["base"], provenance)
        view.sync(ledger, records, provenance)
        metrics = report(ledger, view, console)
        view.close("FINISHED", metrics, f"Sweep **{sweep}**, made again from its journals.")
        different = view.differences(ledger, records)
    for sentence in different:
        console.print(sentence, markup=False)
    console.print(
        f"{sweep}: {removed} runs replaced, {len(records)} replicates made again, "
        f"{len(different)} differences"
    )
    return EXIT_FAILED if different else EXIT_DONE


def report_again(root: Path, sweep: str, console: Console) -> int:
    """Write a sweep's report from its records and attach it; returns the exit code.

    Raises:
        LedgerError: there is no such sweep.
    """
    ledger = Ledger(root, sweep)
    spec = ledger.spec()
    view = MlflowView(tracking_uri(spec["tracking"]["uri"], root), root, sweep)
    view.find_parent()
    report(ledger, view, console)
    return EXIT_DONE
