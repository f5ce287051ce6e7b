"""Whole sweeps as a user runs them: real text and training, Ray, MLflow; interrupted, extended."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import mlflow
import pandas as pd
import pytest

from orchestrator.journal import opening
from orchestrator.provenance import CHECKOUT

pytestmark = pytest.mark.ray

TINY = """
name: tiny
base:
  size: nano
  data: sotu
  data.vocab_size: 512
  data.tokenizer_bytes: 1_000_000
  budget.tokens: 1536
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
# Half of the sweep, without its second lane: every worker process imports torch.
DELTANET_LOSSES = ("model.mixer=deltanet", "lanes.speed.enabled=false")


def run(folder, *arguments, **options):
    """One call of the command line; everything it says and its exit code."""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        **options,
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


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder in which the tiny sweep has run to its end."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "tiny.yaml").write_text(TINY)
    result = run(folder, "sweep", "conf=tiny.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_every_replicate_has_its_loss_and_its_speed(finished):
    frame = trials(finished)
    assert len(frame) == 4
    assert set(frame["status"]) == {"completed"}
    assert frame["val_loss_nats"].between(3, 7).all()
    assert (frame["tokens_per_second"] > 0).all()
    assert frame["exclusive"].all()
    assert (frame["steps"] == 12).all()
    assert frame["data_id"].nunique() == frame["eval_id"].nunique() == 1
    assert set(curves(finished).groupby("replicate_id")["step"].count()) == {12}


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


def test_the_same_command_again_has_nothing_to_do(finished):
    before = contents(finished)
    result = run(finished, "sweep", "conf=tiny.yaml")
    assert result.returncode == 0, result.stderr
    assert "nothing to do" in result.stdout
    assert contents(finished) == before


def test_status_from_another_shell_counts(finished):
    result = run(finished, "status", "tiny", "--json")
    status = json.loads(result.stdout)
    assert status["counts"] == {"completed": 4}
    assert {row["params_total"] for row in status["replicates"]} == set(
        trials(finished)["params_total"]
    )


def test_another_base_under_the_same_name_is_refused(finished):
    before = contents(finished)
    result = run(finished, "sweep", "conf=tiny.yaml", "clip_norm=0.5")
    assert result.returncode == 2
    assert "clip_norm: the default → 0.5" in result.stderr
    assert result.stderr.count("\n") == 1
    assert contents(finished) == before


def test_train_gives_the_losses_of_the_sweep_and_writes_no_ledger(finished):
    before = contents(finished)
    result = run(finished, "train", "conf=tiny.yaml", "model.mixer=deltanet", "seeds=1")
    assert result.returncode == 0, result.stderr
    row = trials(finished).query("mixer == 'deltanet' and seed == 1").iloc[0]
    assert f"val_loss_nats {row['val_loss_nats']}" in result.stdout
    assert contents(finished) == before


def test_train_of_several_cells_is_refused(finished):
    result = run(finished, "train", "conf=tiny.yaml")
    assert result.returncode == 2
    assert "one cell with one seed" in result.stderr


def test_more_seeds_run_alone_and_leave_the_others_untouched(finished):
    before = contents(finished)
    result = run(finished, "sweep", "conf=tiny.yaml", "seeds=range(3)", *DELTANET_LOSSES)
    assert result.returncode == 0, result.stdout + result.stderr
    after = contents(finished)
    assert {path: after[path] for path in before} == before
    frame = trials(finished)
    assert len(frame) == 5
    assert frame["desired"].sum() == 3
    assert set(frame.query("desired")["mixer"]) == {"deltanet"}


def test_a_killed_driver_is_continued_to_the_same_curves(finished, empty_store, tmp_path):
    """As by a power cut: driver and workers die while trials run; the same command ends alike."""
    command = ("sweep", "conf=tiny.yaml", *DELTANET_LOSSES)
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "runs").mkdir()
    os.symlink(finished / "runs" / "data", tmp_path / "runs" / "data")
    shutil.copy(empty_store, tmp_path / "runs" / "mlflow.db")
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    driver = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", *command],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    journals = tmp_path / "runs" / "tiny" / "replicates"
    deadline = time.monotonic() + 200
    while not any('"step"' in path.read_text() for path in journals.glob("*/attempt-*.jsonl")):
        assert driver.poll() is None, "the driver ended before a step was journalled"
        assert time.monotonic() < deadline
        time.sleep(0.02)
    workers = {opening(path)["pid"] for path in journals.glob("*/attempt-*.jsonl")}
    for pid in (driver.pid, *workers):
        os.kill(pid, signal.SIGKILL)
    driver.wait()
    result = run(tmp_path, *command)
    assert result.returncode == 0, result.stdout + result.stderr
    frame = trials(tmp_path)
    assert len(frame) == 2
    assert set(frame["status"]) == {"completed"}
    assert frame["attempts"].max() == 2
    expected = curves(finished).query("replicate_id in @frame.index")
    order = ["replicate_id", "step"]
    pd.testing.assert_frame_equal(
        curves(tmp_path).sort_values(order, ignore_index=True),
        expected.sort_values(order, ignore_index=True),
    )
    _, runs = mlflow_runs(tmp_path, "replicate")
    assert sorted(found.info.status for found in runs) == ["FINISHED"] * 2
    assert Path(tmp_path / "runs" / "tiny" / "report" / "index.html").is_file()


def test_doctor_finds_this_machine_fit(tmp_path):
    result = run(tmp_path, "doctor", "--json")
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert {name for name, check in checks.items() if not check["fit"]} <= {"host", "storage"}
    assert "runs a task in a worker" in checks["ray"]["finding"]
    assert list(tmp_path.iterdir()) == []
