"""One call of `sweep`: prepare, reconcile, compact, report, show in MLflow.

Ray and MLflow are imported where they are needed: a sweep with nothing left to do needs neither,
and their start overlaps the preparation of the data.
"""

import functools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from rich.console import Console

from orchestrator import webhook
from orchestrator.data.dataset import open_dataset
from orchestrator.failures import is_storage_error
from orchestrator.hardware import this_machine
from orchestrator.imports import importing
from orchestrator.journal import last_event
from orchestrator.leases import DriverLease
from orchestrator.pilot import (
    Price,
    loss_share,
    needs_pilots,
    pilot_journal,
    price_line,
    price_of,
    refuse_costly,
)
from orchestrator.plan import Plan
from orchestrator.points import record_asks
from orchestrator.progress import Progress, SweepStoppedError, opening_view
from orchestrator.provenance import Provenance
from orchestrator.readiness import (
    completeness,
    interruptible,
    nothing_is_left,
    preparing,
    refuse_other_data,
    require_writable,
)
from orchestrator.records import TrialRecord
from orchestrator.remake import EXIT_DONE, EXIT_FAILED, report
from orchestrator.rounds import extended, next_round, summary, unreached
from orchestrator.store_uri import tracking_uri, without_path, without_secret
from orchestrator.watch import Watch

EXIT_INTERRUPTED = 130

SPEC_FORMAT = 1

MLFLOW_PATIENCE_SECONDS = 60.0
"""How long the end of a sweep waits for an MLflow store that cannot be written."""


def reconcile(
    plan: Plan, provenance: Provenance, console: Console, *, is_price_overruled: bool = False
) -> int:
    """Make the ledger equal to the plan and report; returns the exit code.

    Args:
        plan: what is desired.
        provenance: of this call.
        console: for the user.
        is_price_overruled: run whatever it costs.

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
    require_writable(plan.root)
    with interruptible(), _lease(plan, console) as lease:
        plan = extended(plan)
        if nothing_is_left(plan):
            console.print("nothing is left to do")
            return EXIT_DONE
        if plan.spec.price.max_gpu_hours is not None:
            price = price_of(plan)
            if not price.unmeasured:  # known before anything is started
                refuse_costly(plan, price, is_overruled=is_price_overruled)
        call = _Call(plan, provenance, console, is_price_overruled=is_price_overruled)
        code = _reconcile(call, console, lease, uri)
        call.tell_end()
        return code


def _lease(plan: Plan, console: Console) -> DriverLease:
    def say(holder: str) -> None:
        console.print(f"another process ({holder}) is running this sweep; waiting for its end")

    return DriverLease(plan.ledger.folder, say)


def _reconcile(call: "_Call", console: Console, lease: DriverLease, uri: str) -> int:
    """`reconcile` for the one process that holds the sweep's lease."""
    with preparing(call.plan, console) as wait_for_data:
        try:
            call.run(uri, wait_for_data)
            call.conclude()
            call.outcome = "done"
        except SweepStoppedError as error:
            call.wind_up("FAILED")
            call.outcome = "stopped_by_bugs"
            console.print(f"stopped: {error}", markup=False)
            return EXIT_FAILED
        except (KeyboardInterrupt, SystemExit):  # Ray exits on a signal while it starts
            if lease.lost_to is None:
                call.wind_up("KILLED")
                call.outcome = "interrupted"
            else:
                console.print(f"{lease.lost_to} has taken over this sweep")
            console.print("interrupted; the same command continues")
            return EXIT_INTERRUPTED
        except OSError as error:
            if not is_storage_error(error):
                call.wind_up("FAILED")
                raise
            call.outcome = "stopped_by_storage"
            console.print(
                f"stopped: nothing can be written to {call.plan.root} ({error.strerror}); make "
                "room there, and the same command continues"
            )
            return EXIT_FAILED
        except BaseException:
            call.wind_up("FAILED")
            raise
    return _say_failures(call.plan, console)


def _say_failures(plan: Plan, console: Console) -> int:
    failed = [name for name, state in plan.states.items() if state.status == "failed"]
    if not failed:
        return EXIT_DONE
    console.print(f"{len(failed)} of {len(plan.desired)} replicates failed:")
    for name in failed[:5]:
        console.print(f"  {name}: {plan.states[name].end.get('error', '')}", markup=False)
    return EXIT_FAILED


class _Call:
    """One call's way from the plan to the report, wherever it ends.

    Attributes:
        plan: as it stands.
        outcome: how the sweep ended here; None while it goes on, here or in another process.
    """

    def __init__(
        self, plan: Plan, provenance: Provenance, console: Console, *, is_price_overruled: bool
    ) -> None:
        self.plan = plan
        self._provenance = provenance
        self._console = console
        self._is_price_overruled = is_price_overruled
        self._progress: Progress | None = None
        self._began = time.monotonic()
        self.outcome: str | None = None

    def run(self, uri: str, wait_for_data: Callable[[], Plan]) -> None:
        """Both lanes, watched; behind it no worker process is left."""
        with ExitStack() as stack:
            with importing():
                opened_view = stack.enter_context(opening_view(uri, self.plan))
                from orchestrator.cluster import ray_session

                stack.enter_context(ray_session(self.plan))
                # Behind it, since Ray's processes start while this one imports Tune.
                from orchestrator.sweep import run_lanes

                self.plan = plan = wait_for_data()
                view = opened_view()
            refuse_other_data(plan)
            self._settle_price(plan)
            plan.ledger.write_spec(spec_json(plan, self._provenance))
            progress = Progress(plan, view, self._provenance, self._console)
            view.open(_sweep_params(plan), self._provenance)
            self._progress = progress
            _announce(plan, self._console)
            tried: set[str] = set()
            is_first = True
            while (current := next_round(self.plan, tried)) is not None:
                if not is_first:  # the first was settled before anything was written
                    self._settle_price(current)
                is_first = False
                record_asks(current)
                with Watch(current, self._console) as watch:
                    progress.follow(self.plan, watch)
                    ended = run_lanes(
                        current, self._provenance, progress.tick, progress.finish, watch.measured
                    )
                tried |= unreached(current, ended)
                self.plan = extended(self.plan, tried)

    def _settle_price(self, plan: Plan) -> None:
        """The pilots that the sweep's rules ask for, and its limit on what it may take."""
        if not needs_pilots(plan):
            return
        price = price_of(plan)
        if price.unmeasured:
            measure_shapes(plan, price, self._provenance, self._console)
            price = price_of(plan)
        refuse_costly(plan, price, is_overruled=self._is_price_overruled)
        asked, share = plan.spec.lanes.loss.gpus, loss_share(plan)
        if price.unmeasured:
            self._console.print(
                f"the pilots of {len(price.unmeasured)} shapes failed (first: "
                f"{next(iter(price.unmeasured.values()))}), so neither their price nor the memory "
                "that their trials need is known",
                markup=False,
            )
        if share > asked:
            self._console.print(
                f"each trial takes {share:.2f} of a GPU for its memory, more than "
                f"lanes.loss.gpus={asked:g}"
            )

    def conclude(self) -> None:
        """Parquet, report and MLflow of a sweep whose lanes have ended."""
        assert self._progress is not None, "run comes first"
        plan, progress = self.plan, self._progress
        progress.finish(MLFLOW_PATIENCE_SECONDS)
        compact(plan)
        for line in summary(plan):
            self._console.print(line, markup=False)
        for sentence in plan.ledger.damages(plan.states):
            self._console.print(sentence, markup=False)
        progress.write_links()
        metrics, files = report(plan.ledger, self._console)
        spec = spec_json(plan, self._provenance)
        if progress.close("FINISHED", metrics, _note(plan), files):
            spec["complete"] = completeness(plan)
        plan.ledger.write_spec(spec)

    def wind_up(self, status: str) -> None:
        """Parquet and MLflow of a sweep whose lanes ended early; its workers are gone by now."""
        if self._progress is None:
            return
        self.plan = self.plan.refreshed()
        self._progress.finish()
        compact(self.plan)
        self._progress.close(status, {}, _note(self.plan), [])

    def tell_end(self) -> None:
        """Tell the webhook, if there is one, how the sweep ended."""
        spec = self.plan.spec
        if spec.notify.webhook is None or self.outcome is None:
            return
        try:
            states = self.plan.ledger.states(self.plan.desired)
        except OSError:  # the storage that ended the sweep; what was read last must do
            states = self.plan.states
        body = webhook.message(
            spec.name,
            self.outcome,
            Counter(state.status for state in states.values()),
            wall_seconds=time.monotonic() - self._began,
            host=this_machine().host,
            mlflow_url=self._progress.page if self._progress is not None else None,
        )
        if problem := webhook.post(spec.notify.webhook, body):
            self._console.print(
                f"the webhook at {without_path(spec.notify.webhook)} was not told of the end: "
                f"{problem}",
                markup=False,
            )


def measure_shapes(plan: Plan, price: Price, provenance: Provenance, console: Console) -> None:
    """Run the pilots that a price lacks; call it inside `ray_session`, with the data prepared."""
    from orchestrator.sweep import run_pilots

    console.print(f"measuring a few steps of {len(price.unmeasured)} shapes")
    with Watch(plan, console) as watch:
        measured = functools.partial(watch.measured, what="pilots")
        run_pilots(plan, price.unmeasured, provenance, measured)


def pilot(plan: Plan, provenance: Provenance, console: Console) -> int:
    """Measure every shape of what is left to run, and say what it costs; returns the exit code.

    Raises:
        ConfigError: something that is refused before anything starts.
    """
    require_writable(plan.root)
    if price_of(plan).unmeasured:
        with interruptible(), preparing(plan, console) as wait_for_data:
            from orchestrator.cluster import ray_session

            with ray_session(plan):
                plan = wait_for_data()
                measure_shapes(plan, price_of(plan), provenance, console)
    price = price_of(plan)
    console.print(price_line(plan, price), markup=False)
    for cell, folder in price.unmeasured.items():
        end = last_event(pilot_journal(folder)) if pilot_journal(folder).is_file() else None
        why = (end or {}).get("error", "it left no word")
        console.print(f"  the pilot of cell {cell} failed: {why}", markup=False)
    return EXIT_FAILED if price.unmeasured else EXIT_DONE


def compact(plan: Plan) -> list[TrialRecord]:
    """Write both Parquet files from the journals, of desired replicates and of the others."""
    ledger = plan.ledger
    planned = dict(plan.desired)
    for name in ledger.replicate_ids():
        if name not in planned:
            planned[name] = replace(ledger.planned(name), desired=False)
    states = ledger.states(planned)
    records = [ledger.record(record, states[name]) for name, record in planned.items()]
    ledger.compact(records, states)
    return records


def spec_json(plan: Plan, provenance: Provenance) -> dict[str, Any]:
    """What `spec.json` says: the resolved sweep and who ran it, on what."""
    spec = plan.spec
    assert plan.data_folder is not None
    return {
        "format": SPEC_FORMAT,
        **asdict(spec),
        "notify": {"webhook": without_path(spec.notify.webhook) if spec.notify.webhook else None},
        "tracking": {"uri": without_secret(spec.tracking.uri) if spec.tracking.uri else None},
        "asked_device": spec.device,
        "device": plan.device,
        "precision": plan.precision,
        "threads": plan.threads,
        "data_id": open_dataset(plan.data_folder).data_id,
        "data_folder": str(plan.data_folder),
        "conf_path": str(plan.sweep.conf_path),
        "overrides": [without_secret(text) for text in plan.sweep.overrides],
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
