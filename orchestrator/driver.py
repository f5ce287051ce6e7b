"""One call of `sweep`: prepare, reconcile, compact, report, show in MLflow.

Ray and MLflow are imported where they are needed: a sweep with nothing left to do needs neither,
and their start overlaps the preparation of the data.
"""

import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from orchestrator.data.dataset import open_dataset
from orchestrator.display import Watch
from orchestrator.errors import ConfigError
from orchestrator.ledger import DriverLock, Ledger, ReplicateState, read_rows
from orchestrator.plan import Plan
from orchestrator.provenance import Provenance
from orchestrator.readiness import completeness, nothing_is_left, preparing, refuse_other_data
from orchestrator.records import TrialRecord
from orchestrator.store_uri import tracking_uri, without_secret

if TYPE_CHECKING:
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
    if nothing_is_left(plan):
        console.print(
            f"nothing to do: all {len(plan.desired)} replicates of {plan.spec.name} have ended; "
            f"report: {plan.ledger.folder / 'report' / 'index.html'}"
        )
        return EXIT_DONE
    uri = tracking_uri(plan.spec.tracking.uri, plan.root)
    with preparing(plan, console) as wait_for_data:
        from orchestrator.sweep import local_ray

        with DriverLock(plan.ledger.folder):
            with local_ray(plan):
                from orchestrator.tracking import MlflowView

                view = MlflowView(uri, plan.root, plan.spec.name)
                plan = wait_for_data()
                refuse_other_data(plan)
                progress = _Progress(plan, view, provenance)
                try:
                    plan = _run(plan, progress, console)
                except KeyboardInterrupt:
                    console.print("interrupted; the same command continues")
                    return EXIT_INTERRUPTED
            _conclude(plan, progress, console)
    failed = [name for name, state in plan.states.items() if state.status == "failed"]
    if failed:
        console.print(f"{len(failed)} of {len(plan.desired)} replicates failed:")
        for name in failed[:5]:
            console.print(f"  {name}: {plan.states[name].end.get('error', '')}", markup=False)
        return EXIT_FAILED
    return EXIT_DONE


def _run(plan: Plan, progress: "_Progress", console: Console) -> Plan:
    """Both lanes, watched; where they end early, Parquet and MLflow say so."""
    from orchestrator.sweep import run_lanes

    provenance = progress.provenance
    plan.ledger.write_spec(spec_json(plan, provenance))
    progress.view.open(_sweep_params(plan), provenance)
    try:
        with Watch(plan, console) as watch:
            progress.watch = watch
            _announce(plan, console)
            return run_lanes(plan, provenance, progress.tick, progress.finish)
    except BaseException as error:
        progress.finish()
        compact(plan.refreshed())
        status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        progress.view.close(status, {}, _note(plan.refreshed()))
        raise


def _conclude(plan: Plan, progress: "_Progress", console: Console) -> None:
    """Parquet, report and MLflow of a sweep whose lanes have ended."""
    progress.finish()
    compact(plan)
    metrics = report(plan.ledger, progress.view, console)
    progress.view.close("FINISHED", metrics, _note(plan))
    plan.ledger.write_spec({**spec_json(plan, progress.provenance), "complete": completeness(plan)})


class _Progress:
    """Keeps MLflow and the display up with the journals; one caller at a time."""

    def __init__(self, plan: Plan, view: "MlflowView", provenance: Provenance) -> None:
        self.view = view
        self.provenance = provenance
        self._plan = plan
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
        states = self.view.sync(self._plan.ledger, records, self.provenance)
        if self.watch is not None:
            self.watch.update(states)
        return states


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


def report(ledger: Ledger, view: "MlflowView | None", console: Console) -> dict[str, float]:
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
    from orchestrator.tracking import MlflowView

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
    from orchestrator.tracking import MlflowView

    ledger = Ledger(root, sweep)
    spec = ledger.spec()
    view = MlflowView(tracking_uri(spec["tracking"]["uri"], root), root, sweep)
    view.find_parent()
    report(ledger, view, console)
    return EXIT_DONE
