"""The MLflow view follows the journals: idempotent, true at any moment, complete."""

import json
import math
import shutil

import pytest

from orchestrator.errors import ConfigError
from orchestrator.journal import Journal
from orchestrator.ledger import Ledger
from orchestrator.provenance import Provenance
from orchestrator.records import TrialRecord
from orchestrator.store_uri import tracking_uri, ui_address, without_secret
from orchestrator.tracking import MlflowView

PROVENANCE = Provenance(
    git_commit="abc",
    git_dirty=False,
    git_diff="",
    code_digest="0" * 64,
    command="python -m orchestrator sweep conf=demo",
    user="someone",
    python="3.11",
    platform="linux",
    host="here",
    gpus=[],
    packages={},
)
DEAD = {"host": "here", "pid": 1, "process_created": 0.0}


def planned(seed=0):
    return TrialRecord(
        sweep="demo",
        cell_id="cabc",
        arm_id="aabc",
        replicate_id=f"cabc-s{seed}",
        seed=seed,
        mixer="deltanet",
        stack="pure",
        optimizer="adamw",
        lr=0.001,
        size="nano",
        match="params",
        data_seed=seed,
        seq_len=256,
        batch_tokens=512,
        tokens=51_200,
        steps=100,
        config_json='{"optimizer":{"lr":0.001}}',
    )


def step(number):
    return {"event": "step", "step": number, "tokens": number, "train_loss_nats": 9.0 - number / 50}


@pytest.fixture
def world(tmp_path, empty_store):
    """A ledger with one replicate, and a way to open the view as a new driver would."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    ledger = Ledger(tmp_path, "demo")
    ledger.describe(planned())

    def open_view():
        view = MlflowView(tracking_uri(None, tmp_path), tmp_path, "demo")
        view.open({"purpose": "compare"}, PROVENANCE)
        return view

    return ledger, open_view


def attempt(ledger, *events, name="cabc-s0", kind="attempt"):
    journal = Journal(ledger.next_attempt(name, kind))
    for event in events:
        journal.append(event)
    journal.close()


def sync(view, ledger, *records):
    wanted = {r.replicate_id: r for r in records or [planned()]}
    view.sync(ledger, wanted, ledger.states(wanted), PROVENANCE)


def runs(view):
    return list(view._search("tags.kind = 'replicate'"))


def steps(view, run):
    history = view._client.get_metric_history(run.info.run_id, "train_loss_nats")
    return [metric.step for metric in history]


def test_a_crash_and_a_retry_are_one_run_with_each_step_once(world):
    ledger, open_view = world
    view = open_view()
    attempt(ledger, {"event": "claim", **DEAD}, *map(step, range(50)))
    sync(view, ledger)
    assert runs(view)[0].info.status == "KILLED"
    params = runs(view)[0].data.params
    # The next driver knows nothing of what the first one sent.
    view = open_view()
    end = {"event": "end", "status": "completed", "val_loss_nats": 7.0}
    attempt(ledger, {"event": "claim", **DEAD}, *map(step, range(41, 100)), end)
    sync(view, ledger)
    sync(view, ledger)
    (found,) = runs(view)
    assert steps(view, found) == list(range(100))
    assert found.info.status == "FINISHED"
    assert found.data.tags["attempts"] == "2"
    assert found.data.params == params


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ({"status": "completed"}, "FINISHED"),
        ({"status": "diverged", "failure_class": "diverged"}, "FINISHED"),
        ({"status": "failed", "failure_class": "user_bug"}, "FAILED"),
        ({"status": "failed", "failure_class": "preempted"}, "KILLED"),
        ({"status": "failed", "failure_class": "oom_host"}, "FAILED"),
    ],
    ids=lambda value: value.get("failure_class", "completed") if isinstance(value, dict) else value,
)
def test_a_run_ends_as_its_trial_did(world, end, status):
    ledger, open_view = world
    attempt(ledger, {"event": "claim", **DEAD}, step(0), {"event": "end", **end})
    view = open_view()
    sync(view, ledger)
    (found,) = runs(view)
    assert found.info.status == status
    assert found.info.end_time is not None
    assert found.data.tags["status"] == end["status"]


def test_a_speed_that_comes_later_fills_the_run(world):
    ledger, open_view = world
    attempt(ledger, {"event": "claim", **DEAD}, {"event": "end", "status": "completed"})
    view = open_view()
    sync(view, ledger)
    assert "tokens_per_second" not in runs(view)[0].data.metrics
    speed = {"event": "end", "status": "completed", "tokens_per_second": 5.0}
    attempt(ledger, speed, kind="speed")
    sync(open_view(), ledger)
    assert runs(view)[0].data.metrics["tokens_per_second"] == 5.0


def test_a_clock_that_is_set_back_ends_no_run_before_it_began(world, monkeypatch):
    ledger, open_view = world
    clock = iter([5000.0, 4000.0, 3000.0])
    monkeypatch.setattr("orchestrator.journal.time.time", lambda: next(clock, 3000.0))
    attempt(ledger, {"event": "claim", **DEAD}, step(0), {"event": "end", "status": "completed"})
    monkeypatch.undo()
    view = open_view()
    sync(view, ledger)
    (found,) = runs(view)
    assert found.info.end_time == found.info.start_time == 5_000_000
    assert ledger.state("cabc-s0").status == "completed"


def test_infinity_is_never_shown_as_a_large_number(world):
    ledger, open_view = world
    infinite = {**step(0), "train_loss_nats": math.inf}
    attempt(ledger, {"event": "claim", **DEAD}, infinite, {"event": "end", "status": "diverged"})
    view = open_view()
    sync(view, ledger)
    (found,) = runs(view)
    (metric,) = view._client.get_metric_history(found.info.run_id, "train_loss_nats")
    assert math.isnan(metric.value)


def test_more_runs_than_a_page_are_all_found(world, monkeypatch):
    ledger, open_view = world
    monkeypatch.setattr("orchestrator.tracking.RUNS_PER_PAGE", 2)
    records = [planned(seed) for seed in range(5)]
    for record in records:
        ledger.describe(record)
        attempt(ledger, {"event": "claim", **DEAD}, name=record.replicate_id)
    sync(open_view(), ledger, *records)
    view = open_view()
    assert len(view._runs) == 5
    sync(view, ledger, *records)
    assert len(runs(view)) == 5


def test_a_long_curve_is_sent_in_whole_steps(world, monkeypatch):
    ledger, open_view = world
    monkeypatch.setattr("orchestrator.tracking.METRICS_PER_BATCH", 7)
    attempt(ledger, {"event": "claim", **DEAD}, *map(step, range(40)))
    view = open_view()
    sync(view, ledger)
    assert steps(view, runs(view)[0]) == list(range(40))


def test_links_lead_to_the_runs_also_of_a_store_that_was_made_again(world):
    ledger, open_view = world
    attempt(ledger, {"event": "claim", **DEAD}, step(0), {"event": "end", "status": "completed"})
    seen = []
    for _ in range(2):
        view = open_view()
        sync(view, ledger)
        view.write_links(ledger)
        links = json.loads((ledger.folder / "mlflow.json").read_text())
        (run,) = runs(view)
        where = f"http://127.0.0.1:5000/#/experiments/{run.info.experiment_id}/runs"
        assert links["replicates"] == {"cabc-s0": f"{where}/{run.info.run_id}"}
        assert links["sweep"] == f"{where}/{run.data.tags['mlflow.parentRunId']}"
        seen.append(links)
        view.forget()
    assert seen[0] != seen[1]


def test_runs_are_seen_at_the_server_or_where_ui_serves_them():
    assert ui_address("sqlite:////x/mlflow.db") == "http://127.0.0.1:5000"
    assert ui_address("postgresql://me:secret@host/db") == "http://127.0.0.1:5000"
    assert ui_address("https://me:secret@host:8443/mlflow/") == "https://host:8443/mlflow"


def test_one_parent_over_all_calls(world):
    ledger, open_view = world
    assert open_view().open({}, PROVENANCE) == open_view().open({}, PROVENANCE)
    del ledger


def test_paths_start_from_the_root(tmp_path):
    assert tracking_uri(None, tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"
    assert tracking_uri("sqlite:///x/m.db", tmp_path) == f"sqlite:///{tmp_path}/x/m.db"
    assert tracking_uri("http://localhost:5000", tmp_path) == "http://localhost:5000"


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "file:///x/mlruns"])
def test_a_folder_store_is_refused_with_the_way_out(tmp_path, uri):
    with pytest.raises(ConfigError, match=r"sqlite:///.*mlflow migrate-filestore"):
        tracking_uri(uri, tmp_path)


def test_an_unknown_scheme_is_refused_without_its_password(tmp_path):
    with pytest.raises(ConfigError, match="unknown scheme redis") as caught:
        tracking_uri("redis://me:secret@host/0", tmp_path)
    assert "secret" not in str(caught.value)


def test_a_password_never_leaves_a_uri():
    assert without_secret("postgresql://me:secret@host:5/db") == "postgresql://me:***@host:5/db"
    assert without_secret("http://host") == "http://host"
    assert without_secret("postgresql://me:p@ss:w0rd@host/db") == "postgresql://me:***@host/db"
    told = without_secret("sweep conf=x tracking.uri=mysql://me:secret@h/db seeds=0")
    assert told == "sweep conf=x tracking.uri=mysql://me:***@h/db seeds=0"


def test_a_deleted_experiment_says_how_to_restore_it(world):
    _, open_view = world
    view = open_view()
    view._client.delete_experiment(view._experiment)
    with pytest.raises(ConfigError, match="mlflow experiments restore"):
        open_view()
