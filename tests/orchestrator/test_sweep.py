"""A whole sweep as a user runs it: real text and training, Ray, MLflow; interrupted, extended.

One sweep serves all tests, since its processes and their imports take most of its time: its driver
and workers are killed while trials run, as by a power cut, and the same command with one more seed
ends it.
"""

import json
import os
import signal
import subprocess
import sys
import time

import mlflow
import pandas as pd
import pytest

from orchestrator.cli import main
from orchestrator.config import trial_from_dict
from orchestrator.journal import opening
from orchestrator.provenance import CHECKOUT
from orchestrator.training.runtime import Runtime
from orchestrator.trial import ListJournal, run_trial

pytestmark = pytest.mark.ray

TINY = """
name: tiny
base:
  size: nano
  data: sotu
  budget.tokens: 3072
  batch.tokens: 128
  seq_len: 64
  eval.windows: 4
  checkpoint.every_steps: 4
  log.every_steps: 1
axes:
  model.mixer: [softmax, deltanet]
seeds: [0, 1]
lanes: {speed: {warmup_steps: 1, steps: 2}}
"""
SEEDS = "seeds=range(3)"
"""One more than in the file."""


def start(folder, *arguments):
    """A call of the command line that goes on while the test does."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    with (folder / "said").open("w") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator", *arguments],
            cwd=folder,
            env=environment,
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def trials(folder):
    return pd.read_parquet(folder / "runs" / "tiny" / "trials.parquet").set_index("replicate_id")


def curves(folder):
    frame = pd.read_parquet(folder / "runs" / "tiny" / "curves.parquet")
    return frame.drop(columns=["wall_seconds", "attempt"])


def contents(folder):
    """Every file of every replicate, by path."""
    places = sorted((folder / "runs" / "tiny" / "replicates").rglob("*"))
    return {path: path.read_bytes() for path in places if path.is_file()}


def mlflow_runs(folder, kind):
    client = mlflow.MlflowClient(f"sqlite:///{folder}/runs/mlflow.db")
    experiment = client.get_experiment_by_name("tiny")
    return client, client.search_runs([experiment.experiment_id], f"tags.kind = '{kind}'")


def attempts(folder):
    """The journals of all attempts, by path."""
    found = (folder / "runs" / "tiny" / "replicates").glob("*/attempt-*.jsonl")
    return {path: path.read_text() for path in found}


def kill_amid_trials(folder):
    """Starts the sweep and kills it with one trial done and another begun; the journals then."""
    driver = start(folder, "sweep", "conf=tiny.yaml")
    deadline = time.monotonic() + 300

    def is_amid():
        texts = attempts(folder).values()
        done = ['"status":"completed"' in text for text in texts]
        begun = ['"step"' in text for text in texts]
        return any(done) and sum(begun) > sum(done)

    while not is_amid():
        assert driver.poll() is None, "the driver ended before it was killed"
        assert time.monotonic() < deadline, (folder / "said").read_text()
        time.sleep(0.02)
    workers = {opening(path)["pid"] for path in attempts(folder)}
    for pid in (driver.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    driver.wait()
    return attempts(folder)


@pytest.fixture(scope="module")
def extended(tmp_path_factory, common_root):
    """The folder of the tiny sweep after its end, and its journals at the kill."""
    folder = tmp_path_factory.mktemp("extended")
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "runs").mkdir()
    os.symlink(common_root / "data", folder / "runs" / "data")
    before = kill_amid_trials(folder)
    code = start(folder, "sweep", "conf=tiny.yaml", SEEDS).wait(500)
    assert code == 0, (folder / "said").read_text()
    return folder, before


@pytest.fixture(scope="module")
def finished(extended):
    """A folder in which the tiny sweep has run to its end."""
    return extended[0]


@pytest.fixture
def call(finished, monkeypatch, capsys):
    """A call in this process, in the folder of the tiny sweep: exit code and both streams."""
    monkeypatch.chdir(finished)

    def run_here(*arguments):
        code = main(list(arguments))
        return code, *capsys.readouterr()

    return run_here


def test_every_replicate_has_its_loss_and_its_speed(finished):
    frame = trials(finished)
    assert len(frame) == 6
    assert set(frame["status"]) == {"completed"}
    assert (frame["val_loss_nats"] < frame["init_loss_nats"]).all()
    assert (frame["tokens_per_second"] > 0).all()
    assert frame["exclusive"].all()
    assert (frame["steps"] == 24).all()
    assert frame["data_id"].nunique() == frame["eval_id"].nunique() == 1
    assert set(curves(finished).groupby("replicate_id")["step"].count()) == {24}


def test_mlflow_shows_what_parquet_holds(finished):
    client, runs = mlflow_runs(finished, "replicate")
    frame = trials(finished)
    assert {run.data.tags["replicate_id"] for run in runs} == set(frame.index)
    for found in runs:
        row = frame.loc[found.data.tags["replicate_id"]]
        assert found.info.status == "FINISHED"
        assert found.data.metrics["val_loss_nats"] == row["val_loss_nats"]
        assert found.data.metrics["tokens_per_second"] == row["tokens_per_second"]
        assert found.data.tags["cell_id"] == row["cell_id"]
        history = client.get_metric_history(found.info.run_id, "train_loss_nats")
        wanted = curves(finished).query("replicate_id == @row.name")
        assert [(m.step, m.value) for m in history] == list(
            zip(wanted["step"], wanted["train_loss_nats"], strict=True)
        )
    _, parents = mlflow_runs(finished, "sweep")
    assert len(parents) == 1
    assert {r.data.tags["mlflow.parentRunId"] for r in runs} == {parents[0].info.run_id}
    paths = [file.path for file in client.list_artifacts(parents[0].info.run_id, "report")]
    assert "report/index.html" in paths


def test_trials_share_worker_processes(finished):
    frame = trials(finished)
    assert frame["worker_id"].nunique() < len(frame)
    assert frame["worker_position"].max() > 0


def test_the_same_command_again_has_nothing_to_do(finished, call):
    before = contents(finished)
    code, out, _ = call("sweep", "conf=tiny.yaml", SEEDS)
    assert code == 0
    assert "nothing to do" in out
    assert contents(finished) == before


def test_status_from_another_shell_counts(finished, call):
    _, out, _ = call("status", "tiny", "--json")
    status = json.loads(out)
    assert status["counts"] == {"completed": 6}
    assert {row["params_total"] for row in status["replicates"]} == set(
        trials(finished)["params_total"]
    )


def test_another_base_under_the_same_name_is_refused(finished, call):
    before = contents(finished)
    code, _, err = call("sweep", "conf=tiny.yaml", "clip_norm=0.5")
    assert code == 2
    assert "clip_norm: the default → 0.5" in err
    assert err.count("\n") == 1
    assert contents(finished) == before


def test_train_gives_the_losses_of_the_sweep_and_writes_no_ledger(finished, call):
    before = contents(finished)
    code, out, _ = call("train", "conf=tiny.yaml", "model.mixer=deltanet", "seeds=1")
    assert code == 0
    row = trials(finished).query("mixer == 'deltanet' and seed == 1").iloc[0]
    assert f"val_loss_nats {row['val_loss_nats']}" in out
    assert contents(finished) == before


def test_train_of_several_cells_is_refused(call):
    code, _, err = call("train", "conf=tiny.yaml")
    assert code == 2
    assert "one cell with one seed" in err


def test_what_had_ended_at_the_kill_is_left_as_it_was_and_the_rest_goes_on(extended):
    folder, before = extended
    frame, after = trials(folder), attempts(folder)
    done = {path for path, text in before.items() if '"status":"completed"' in text}
    assert 0 < len(done) < len(before)
    for path in before:
        assert frame.loc[path.parent.name, "attempts"] == (1 if path in done else 2)
    assert {path: after[path] for path in done} == {path: before[path] for path in done}
    assert sorted(frame["seed"]) == [0, 0, 1, 1, 2, 2]
    assert frame["desired"].all()


def undisturbed_curve(folder, row):
    """The steps of an attempt that nothing interrupts, trained in this process."""
    config = trial_from_dict(json.loads(row["config_json"]))
    (data,) = (folder / "runs" / "data").glob("sotu-*")
    journal = ListJournal()
    run_trial(config, seed=row["seed"], data_folder=data, runtime=Runtime(), journal=journal)
    return pd.DataFrame(journal.of("step"))


def test_interrupted_and_added_replicates_have_undisturbed_curves(finished):
    frame, found = trials(finished), curves(finished)
    again = frame[(frame["attempts"] == 2) | (frame["seed"] == 2)]
    assert len(again) > 2
    for _, row in again.iterrows():
        wanted = undisturbed_curve(finished, row)
        own = found.query("replicate_id == @row.name").sort_values("step", ignore_index=True)
        columns = ["step", "tokens", "lr", "train_loss_nats", "grad_norm"]
        pd.testing.assert_frame_equal(own[columns], wanted[columns], check_exact=True)


def test_doctor_finds_this_machine_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    main(["doctor", "--json"])
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert {name for name, check in checks.items() if not check["fit"]} <= {"host", "storage"}
    assert "runs a task in a worker" in checks["ray"]["finding"]
    assert list(tmp_path.iterdir()) == []
