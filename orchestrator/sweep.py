"""Running a sweep: the loss lane on Ray Tune, then the speed lane alone, then Parquet and MLflow.

Tune executes a list that our plan made: it gets plain dicts, a fresh experiment for every round, no
retries of its own and no restore, because the journals are the record of what has run. The driver
never imports torch: only workers import `orchestrator.worker`.
"""

import gc
import json
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before ray, as it sets what ray reads when it is imported.
from orchestrator.cluster import lost_since, nodes, places, reap_orphans, whole_node
from orchestrator.imports import importing

with importing():  # of a worker too, of which this is the first module of ours
    from ray import tune
    from ray.tune.experiment import Trial
    from ray.tune.schedulers import FIFOScheduler

from orchestrator.failures import classify_death, grants_retry, smaller_pass
from orchestrator.job import Job, WorkerRetiredError
from orchestrator.journal import Journal, last_event
from orchestrator.leases import interrupt_main_thread
from orchestrator.outages import RoomWatch
from orchestrator.pilot import (
    PILOT_STEPS,
    PILOT_WARMUP_STEPS,
    loss_share,
    pilot_journal,
    read_pilot,
)
from orchestrator.plan import Plan
from orchestrator.provenance import Provenance, trial_stamp

if TYPE_CHECKING:
    from orchestrator.worker import Baseline

POLL_SECONDS = 2.0
ROOM_SECONDS = 10.0
"""How often to look whether anything is left that could run a trial: beside measurements too."""
JOBS_PER_EXPERIMENT = 1000
"""Tune keeps 33 kB of each trial until its experiment ends (measured), so that one of ten thousand
would take 300 MB; the price is that its last trials leave devices idle once in a thousand."""

OnTick = Callable[[Callable[[], bool]], None]
"""Called every `POLL_SECONDS` while trials run, with a function that tells whether they are over:
the call is waited for, with nothing running, so it should then end soon."""
OnEnd = Callable[[], None]
OnMeasured = Callable[[int, int], None]
"""Called with how many measurements of speed have ended, and how many there are."""


class TrialWorker(tune.Trainable):
    """A Tune trainable whose one step is one job; the actor is kept for the next job."""

    def setup(self, config: dict[str, Any]) -> None:
        """Remember the first job."""
        from orchestrator.worker import baseline, drift, run_job

        self._run, self._measure, self._drift = run_job, baseline, drift
        self._job = Job(**json.loads(config["job"]))
        self._position = 0
        self._baseline: Baseline | None = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Remember the next job; the process stays."""
        self._job = Job(**json.loads(new_config["job"]))
        return True

    def step(self) -> dict[str, Any]:
        """Run the job to its end."""
        status = self._run(self._job, self._position)
        self._position += 1
        if self._baseline is None:
            self._baseline = self._measure()
        grown = self._drift(self._baseline)
        if grown:
            raise WorkerRetiredError(grown)
        return {"done": True, "status": status}


class StartsSpared(FIFOScheduler):
    """First come, first served, except that a free worker takes no trial whose own is starting.

    Tune asks for workers for the trials that wait, in their order, and gives a worker that becomes
    free the trial chosen here; the one that was starting for it is then thrown away. Where trials
    are shorter than a worker's start, the oldest trial is always one of those, so that the first
    worker would do them all while others start in vain (docs/decisions.md has the cost).
    """

    def __init__(self, room: int) -> None:
        """Know how many trials run at a time.

        Args:
            room: trials that there is room for; a number too large costs their order alone.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self._room = room

    def choose_trial_to_run(self, tune_controller: Any) -> Trial | None:
        """The oldest waiting trial for which no worker can be starting, else the last one."""
        live: list[Trial] = sorted(tune_controller.get_live_trials(), key=lambda t: str(t.trial_id))
        waiting = [trial for trial in live if trial.status == Trial.PENDING]
        if not waiting:
            return None
        running = sum(trial.status == Trial.RUNNING for trial in live)
        # Places that neither trials nor the free worker have; Ray fills them in order.
        starting = max(0, self._room - running - 1)
        return waiting[min(starting, len(waiting) - 1)]


def run_lanes(
    plan: Plan,
    provenance: Provenance,
    on_tick: OnTick,
    lane_ends: OnEnd,
    on_measured: OnMeasured,
) -> Plan:
    """Run what the plan lacks, both lanes, with retries; returns the plan as it then stands.

    Call it inside `ray_session`.

    Args:
        plan: what is desired; its data must be prepared.
        provenance: repeated in every journal.
        on_tick: called while loss trials run, for progress and tracking; never while speed is
            measured.
        lane_ends: called after each lane.
        on_measured: called before the first measurement of speed and after each.

    Raises:
        KeyboardInterrupt: the process was interrupted; journals stay as they are.
    """
    reap_orphans(plan)
    plan = plan.refreshed()
    plan = _loss_lane(plan, provenance, on_tick)
    lane_ends()
    plan = _speed_lane(plan, provenance, on_measured)
    lane_ends()
    return plan


def _loss_lane(plan: Plan, provenance: Provenance, on_tick: OnTick) -> Plan:
    resources = {"cpu": plan.threads * plan.ranks, "gpu": loss_share(plan)}
    waiting = plan.to_run
    failures: dict[str, list[str]] = defaultdict(list)
    while waiting:
        _run_round(plan, _jobs(plan, waiting, "loss", provenance), resources, on_tick=on_tick)
        plan = plan.refreshed()
        again = []
        for name in waiting:
            state = plan.states[name]
            if state.is_result or state.is_paused:
                continue
            failures[name].append(state.failure_class or "oom_host")
            if grants_retry(plan.spec.retries, failures[name]) and _fits_smaller(plan, name):
                again.append(name)
        waiting = again
    return plan


def _speed_lane(plan: Plan, provenance: Provenance, on_measured: OnMeasured) -> Plan:
    """Measure the speed of every completed replicate that lacks it."""
    if not plan.to_time:
        return plan
    _measure(plan, _jobs(plan, plan.to_time, "speed", provenance), on_measured)
    return plan.refreshed()


def run_pilots(
    plan: Plan, missing: Mapping[str, Path], provenance: Provenance, on_measured: OnMeasured
) -> None:
    """Measure shapes one after another, as often as failures are retried; call in `ray_session`.

    Args:
        plan: what the shapes are of; its data must be prepared.
        missing: folder of each pilot, by a cell of its shape.
        provenance: repeated in every journal.
        on_measured: called before the first shape and after each.
    """
    failures: dict[str, list[str]] = defaultdict(list)
    while missing:
        _measure(plan, _pilot_jobs(plan, missing, provenance), on_measured)
        failed = {cell: folder for cell, folder in missing.items() if read_pilot(folder) is None}
        for cell, folder in failed.items():
            end = last_event(pilot_journal(folder)) or {}
            failures[cell].append(end.get("failure_class") or "oom_host")
        # A shape that does not fit its device fits no better the second time.
        missing = {
            cell: folder
            for cell, folder in failed.items()
            if failures[cell][-1] != "oom_gpu" and grants_retry(plan.spec.retries, failures[cell])
        }


def _pilot_jobs(plan: Plan, missing: Mapping[str, Path], provenance: Provenance) -> list[Job]:
    jobs, stamp = [], trial_stamp(provenance)
    for cell in plan.sweep.cells:
        if cell.cell_id not in missing:
            continue
        folder = missing[cell.cell_id]
        # An earlier pilot that failed says nothing any more.
        pilot_journal(folder).unlink(missing_ok=True)
        folder.mkdir(parents=True, exist_ok=True)
        jobs.append(
            Job(
                lane="speed",
                replicate_id=folder.name,
                seed=plan.spec.seeds[0],
                config=cell.values,
                journal=str(pilot_journal(folder)),
                folder=str(folder),
                data_folder=str(plan.data_folder),
                device=plan.device,
                precision=plan.precision,
                threads=plan.threads,
                steps=PILOT_STEPS,
                warmup_steps=PILOT_WARMUP_STEPS,
                micro_windows=None,
                max_seconds=None,
                stamp=stamp,
                ranks=plan.ranks,
            )
        )
    return jobs


def _measure(plan: Plan, jobs: list[Job], on_measured: OnMeasured) -> None:
    """Run jobs that are alone on their node: each asks for all of it."""
    ended = count(1)
    on_measured(0, len(jobs))
    on_end = _AtEnds(lambda: on_measured(next(ended), len(jobs)))
    _run_round(plan, jobs, whole_node(plan), on_end=on_end)


def _jobs(plan: Plan, names: Sequence[str], lane: str, provenance: Provenance) -> list[Job]:
    assert plan.data_folder is not None
    kind = "attempt" if lane == "loss" else "speed"
    values = {cell.cell_id: cell.values for cell in plan.sweep.cells}
    minutes = plan.spec.lanes.loss.max_minutes
    stamp = trial_stamp(provenance)
    return [
        Job(
            lane=lane,
            replicate_id=name,
            seed=plan.desired[name].seed,
            config=values[plan.desired[name].cell_id],
            journal=str(plan.ledger.next_attempt(name, kind)),
            folder=str(plan.ledger.describe(plan.desired[name])),
            data_folder=str(plan.data_folder),
            device=plan.device,
            precision=plan.precision,
            threads=plan.threads,
            steps=plan.spec.lanes.speed.steps,
            warmup_steps=plan.spec.lanes.speed.warmup_steps,
            micro_windows=_micro_windows(plan, name),
            pause_step=plan.pause_steps.get(name) if lane == "loss" else None,
            max_seconds=None if minutes is None else 60 * minutes,
            stamp=stamp,
            ranks=plan.ranks,
        )
        for name in names
    ]


def _micro_windows(plan: Plan, name: str) -> int | None:
    """Windows of a forward pass: what the last attempt had, less if it ran out of device memory.

    None stands for what the configuration says.
    """
    state, record = plan.states[name], plan.desired[name]
    last: int | None = state.start.get("micro_windows")
    if state.failure_class != "oom_gpu":
        return last
    config = next(c.config for c in plan.sweep.cells if c.cell_id == record.cell_id)
    windows = config.windows_per_step // plan.ranks
    return smaller_pass(windows, last or config.batch.micro_windows)


def _fits_smaller(plan: Plan, name: str) -> bool:
    """Whether there is a way to need less device memory, for a replicate that needs one."""
    return plan.states[name].failure_class != "oom_gpu" or _micro_windows(plan, name) is not None


def _run_round(
    plan: Plan,
    jobs: list[Job],
    resources: Mapping[str, float],
    on_tick: OnTick | None = None,
    on_end: "_AtEnds | None" = None,
) -> None:
    """Run a list of jobs to their ends; a job whose worker died is journalled as such."""
    for first in range(0, len(jobs), JOBS_PER_EXPERIMENT):
        _run_experiment(plan, jobs[first : first + JOBS_PER_EXPERIMENT], resources, on_tick, on_end)
        gc.collect()  # Tune's trials refer to each other


def _run_experiment(
    plan: Plan,
    jobs: list[Job],
    resources: Mapping[str, float],
    on_tick: OnTick | None,
    on_end: "_AtEnds | None",
) -> None:
    """One Tune experiment over a list of jobs.

    Raises:
        LedgerError: Ray has died, or its cluster has no room for a trial any more.
    """
    room = RoomWatch(plan, resources)
    room.look()  # asking a Ray that died between two experiments for its nodes would not end
    # Tune looks for its folder from every node of a cluster, and they share the root.
    place = plan.root if plan.is_on_cluster else None
    before = nodes()
    folder = tempfile.TemporaryDirectory(prefix=".seedfront-tune-", dir=place)
    with folder as storage, _ticking(on_tick), _ticking(lambda _: room.look(), ROOM_SECONDS):
        tuner = _tuner(plan, jobs, resources, places(before, resources), storage, on_end)
        try:
            results = tuner.fit()
        except Exception:
            room.look()  # what Tune says of a Ray that has died explains nothing
            raise
        errors = [results[index].error for index in range(len(results))]
    abandoned = [
        (job, error) for job, error in zip(jobs, errors, strict=True) if not _has_ended(job)
    ]
    if abandoned:
        room.look()  # a Ray that has died explains them all
    is_node_lost = plan.is_on_cluster and bool(abandoned) and lost_since(before)
    for job, error in abandoned:
        _close_abandoned(job, error, is_node_lost=is_node_lost)


def _tuner(
    plan: Plan,
    jobs: list[Job],
    resources: Mapping[str, float],
    room: int,
    storage: str,
    on_end: "_AtEnds | None",
) -> tune.Tuner:
    """A Tune experiment with a trial for each job, kept in the folder `storage`."""
    return tune.Tuner(
        tune.with_resources(TrialWorker, dict(resources)),
        # As texts, since Tune copies the whole grid for every trial that it makes of it.
        param_space={"job": tune.grid_search([json.dumps(asdict(job)) for job in jobs])},
        tune_config=tune.TuneConfig(
            scheduler=StartsSpared(room),
            reuse_actors=plan.spec.reuse_workers,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name=f"round-{time.time_ns()}",
            storage_path=storage,
            callbacks=[on_end] if on_end is not None else None,
            failure_config=tune.FailureConfig(max_failures=0),
            # A trainable without save_checkpoint fails at its end otherwise, and is not reused.
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
            verbose=0,
        ),
    )


class _AtEnds(tune.Callback):
    """Calls a function in the driver whenever a trial of Tune's has ended, one way or another."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune saves its callbacks, and what they hold here cannot be saved."""
        return {}

    def on_trial_complete(self, *arguments: Any, **information: Any) -> None:
        self._call()

    def on_trial_error(self, *arguments: Any, **information: Any) -> None:
        self._call()


def _has_ended(job: Job) -> bool:
    """Whether the attempt journalled its own end."""
    path = Path(job.journal)
    return path.is_file() and (last_event(path) or {}).get("event") in ("end", "stop")


def _close_abandoned(job: Job, error: Exception | None, *, is_node_lost: bool) -> None:
    """Journal the end of an attempt that did not do so itself."""
    text = str(error or "")
    if "creation task" in text:  # the worker could not be set up at all
        failure, sentence = "user_bug", text.strip().splitlines()[-1][:2000]
    elif is_node_lost:
        failure, sentence = "node", "a node of the cluster was lost, most likely the trial's"
    elif "[Errno " in text:  # the journal itself could not be written
        failure, sentence = "node", text.strip().splitlines()[-1][:2000]
    else:
        failure, sentence = classify_death(Path(job.folder))
    journal = Journal(Path(job.journal))
    journal.append(
        {"event": "end", "status": "failed", "failure_class": failure, "error": sentence}
    )
    journal.close()


@contextmanager
def _ticking(on_tick: OnTick | None, seconds: float = POLL_SECONDS) -> Iterator[None]:
    """Calls `on_tick` every so often in a thread; its first error ends the `with` block at once.

    Call it where SIGTERM raises `KeyboardInterrupt`.
    """
    if on_tick is None:
        yield
        return
    stop = threading.Event()
    errors: list[Exception] = []

    def loop() -> None:
        while not stop.wait(seconds):
            try:
                on_tick(stop.is_set)
            except Exception as error:  # noqa: BLE001 - raised again in the main thread
                errors.append(error)
                interrupt_main_thread()
                return

    thread = threading.Thread(target=loop, name="ticker", daemon=True)
    thread.start()
    try:
        try:
            yield
        finally:
            stop.set()
            thread.join()
    except KeyboardInterrupt:
        if errors:
            raise errors[0] from None
        raise
    if errors:
        raise errors[0]
