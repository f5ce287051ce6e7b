"""Verbs that make what a sweep shows again from what its ledger keeps, or check it."""

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from orchestrator.errors import ConfigError
from orchestrator.imports import importing
from orchestrator.leases import DriverLease
from orchestrator.ledger import Ledger
from orchestrator.parquet import read_rows
from orchestrator.provenance import Provenance
from orchestrator.readiness import interruptible
from orchestrator.store_uri import tracking_uri

EXIT_DONE = 0
EXIT_FAILED = 3


def report(ledger: Ledger, console: Console) -> tuple[dict[str, float], list[Path]]:
    """Write the report from Parquet; returns its headline numbers and its files."""
    with importing():
        from analysis.report import write_report

    out = ledger.folder / "report"
    try:
        result = write_report(ledger.folder, out)
    except ValueError as error:  # records that cannot be compared; they are kept as they are
        console.print(f"no report: {error}", markup=False)
        return {}, []
    console.print(f"report: {out / 'index.html'}", markup=False)
    headline = {k: float(v) for k, v in result.headline.items() if isinstance(v, int | float)}
    return headline, [out / name for name in result.files]


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
    with interruptible(), DriverLease(ledger.folder):
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
        view.sync(ledger, records, states, provenance)
        view.write_links(ledger)
        metrics, files = report(ledger, console)
        view.attach(ledger.folder, files)
        view.close("FINISHED", metrics, f"Sweep **{sweep}**, made again from its journals.")
        different = view.differences(ledger, records)
    for sentence in ledger.damages(states) + different:
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
    has_runs = view.find_parent()
    if has_runs:
        view.write_links(ledger)
    _, files = report(ledger, console)
    if has_runs:
        view.attach(ledger.folder, files)
    return EXIT_DONE
