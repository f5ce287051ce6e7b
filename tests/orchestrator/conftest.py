"""Sweeps of scripted trials: real driver, real Ray and MLflow, no model."""

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import mlflow
import numpy as np
import pandas as pd
import psutil
import pytest

from orchestrator.cli import main
from orchestrator.compose import composer
from orchestrator.journal import opening, read_events
from orchestrator.provenance import CHECKOUT

SWEEP = """
name: fake
base:
  size: nano
  data: files
  data.sources: [text.jsonl]
  data.vocab_size: 300
  budget.tokens: {tokens}
  batch.tokens: 1280
  seq_len: 64
  eval.windows: 4
axes:
  optimizer.lr: {rates}
seeds: {seeds}
lanes: {{speed: {{enabled: false}}}}
"""
TRAINER = Path(__file__).with_name("fake_trainer.py")
FINISHED = {"completed": "FINISHED", "diverged": "FINISHED", "failed": "FAILED"}


@dataclass
class FakeSweep:
    """One sweep of scripted trials in a folder of its own."""

    folder: Path

    def write(self, rates, seeds, steps=20, **script):
        """The sweep file, and what its trials do."""
        text = SWEEP.format(tokens=1280 * steps, rates=rates, seeds=seeds)
        (self.folder / "fake.yaml").write_text(text)
        (self.folder / "script.json").write_text(json.dumps({"steps": steps, **script}))

    def environment(self):
        """Of a process whose trials are scripted."""
        return {
            "PYTHONPATH": str(CHECKOUT),
            "OMP_NUM_THREADS": "1",
            "SEEDFRONT_TEST_TRAINER": str(TRAINER),
            "SEEDFRONT_TEST_SCRIPT": str(self.folder / "script.json"),
        }

    def start(self, *overrides, verb="sweep"):
        """A call that goes on while the test does; both streams end up in `said`."""
        with (self.folder / "said").open("a") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "orchestrator", verb, "conf=fake.yaml", *overrides],
                cwd=self.folder,
                env={**os.environ, **self.environment()},
                stdout=said,
                stderr=subprocess.STDOUT,
                # A shell that runs the tests in its background has its children ignore Ctrl-C.
                preexec_fn=_hear_interrupts,
            )

    def run(self, *overrides, verb="sweep"):
        """The exit code of a whole call."""
        return self.start(*overrides, verb=verb).wait(500)

    def call(self, *overrides, verb="sweep"):
        """The exit code of a whole call in this process, which has imported everything already."""
        with (
            pytest.MonkeyPatch.context() as patch,
            (self.folder / "said").open("a") as said,
            redirect_stdout(said),
            redirect_stderr(said),
        ):
            for name, value in self.environment().items():
                patch.setenv(name, value)
            patch.chdir(self.folder)
            return main([verb, "conf=fake.yaml", *overrides])

    @property
    def said(self):
        """What all calls printed."""
        return (self.folder / "said").read_text()

    @property
    def sweep(self):
        return self.folder / "runs" / "fake"

    def journals(self):
        return sorted(self.sweep.glob("replicates/*/attempt-*.jsonl"))

    def wait_for(self, condition, process=None, seconds=300):
        """Waits until something holds while a call goes on."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert process is None or process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.02)

    def begun(self):
        """Whether a trial has journalled a step."""
        return any('"step"' in path.read_text() for path in self.journals())

    def workers(self):
        """Processes that have claimed an attempt and still live."""
        claims = [opening(path) for path in self.journals()]
        return {c["pid"] for c in claims if "pid" in c and psutil.pid_exists(c["pid"])}

    def trials(self):
        return pd.read_parquet(self.sweep / "trials.parquet").set_index("replicate_id")

    def curves(self):
        return pd.read_parquet(self.sweep / "curves.parquet")

    def client(self):
        return mlflow.MlflowClient(f"sqlite:///{self.folder}/runs/mlflow.db")

    def runs(self, kind="replicate"):
        client = self.client()
        experiment = client.get_experiment_by_name("fake").experiment_id
        return client.search_runs([experiment], f"tags.kind = '{kind}'", max_results=5000)

    def ends(self):
        """Every replicate's `end` events."""
        found = {}
        for path in self.journals():
            events = [e for e in read_events(path)[0] if e["event"] == "end"]
            found.setdefault(path.parent.name, []).extend(events)
        return found

    def assert_consistent(self, replicates):
        """Each replicate once, each step once, MLflow = Parquet = journal, nothing left running."""
        trials, curves, runs = self.trials(), self.curves(), self.runs()
        assert len(trials) == trials.index.nunique() == replicates
        results = {
            name: [e for e in ends if e["status"] != "failed"] for name, ends in self.ends().items()
        }
        assert {name: len(found) for name, found in results.items() if len(found) > 1} == {}
        assert not curves.duplicated(["replicate_id", "step"]).any()
        by_name = {run.data.tags["replicate_id"]: run for run in runs}
        assert len(by_name) == len(runs)
        assert set(by_name) == set(trials.index[trials["attempts"] > 0])
        client = self.client()
        for name, run in by_name.items():
            row = trials.loc[name]
            assert run.data.tags["status"] == row["status"]
            assert run.info.status != "RUNNING"
            assert run.info.end_time is not None
            history = client.get_metric_history(run.info.run_id, "train_loss_nats")
            shown = sorted((m.step, m.value) for m in history)
            wanted = curves[curves["replicate_id"] == name].sort_values("step")
            assert [step for step, _ in shown] == wanted["step"].tolist()
            np.testing.assert_array_equal([v for _, v in shown], wanted["train_loss_nats"])
        (parent,) = self.runs("sweep")
        assert parent.info.status != "RUNNING"
        assert self.workers() == set()


def descendants_of(folder):
    """Living processes that were started for a sweep in a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
        except psutil.Error:
            continue
        if environment.get("SEEDFRONT_TEST_SCRIPT") == str(folder / "script.json"):
            found.append(process)
    return found


@pytest.fixture(scope="session")
def descendants():
    """Living processes that were started for a sweep of scripted trials, by its folder."""
    return descendants_of


@pytest.fixture(autouse=True, scope="session")
def shipped_groups_composed_once():
    """Hydra composes files of `conf/` alone once: half of the time in which a sweep is read.

    Calls that also search a folder of the user's, where a test may change files, are left alone.
    """
    compose, known = composer.compose, {}

    def compose_once(name, overrides):
        key = (name, *overrides)
        if any(text.startswith("hydra.searchpath") for text in overrides):
            return compose(name, overrides=overrides)
        if key not in known:
            known[key] = compose(name, overrides=overrides)
        return copy.deepcopy(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(composer, "compose", compose_once)
        yield


@pytest.fixture(scope="session")
def common_root(tmp_path_factory):
    """A root that all processes of one test run share.

    The embedded corpus is prepared in it by whichever needs it first; `prepare` itself has the
    others wait.
    """
    own = tmp_path_factory.getbasetemp()
    root = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "common"
    (root / "data").mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory):
    """A migrated, empty store; making one takes seconds, copying it does not."""
    folder = tmp_path_factory.mktemp("store")
    mlflow.MlflowClient(f"sqlite:///{folder}/mlflow.db").search_experiments(max_results=1)
    return folder / "mlflow.db"


@pytest.fixture(scope="session")
def prepared_root(tmp_path_factory):
    """A root with prepared data."""
    folder = tmp_path_factory.mktemp("prepared")
    generator = np.random.Generator(np.random.PCG64(0))
    words = ["".join(generator.choice(list("abcdefgh"), size=4)) for _ in range(300)]
    rows = [json.dumps({"text": " ".join(generator.choice(words, size=100))}) for _ in range(200)]
    (folder / "text.jsonl").write_text("\n".join(rows))
    sweep = FakeSweep(folder)
    sweep.write([1e-3], [0])
    command = [sys.executable, "-m", "orchestrator", "data", "prepare", "conf=fake.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    return folder


@pytest.fixture
def fake(prepared_root, empty_store, tmp_path):
    """A new sweep of scripted trials; what it leaves running at the end of a test is ended."""
    (tmp_path / "runs").mkdir()
    for name in ("text.jsonl", "runs/data"):
        os.symlink(prepared_root / name, tmp_path / name)
    shutil.copy(empty_store, tmp_path / "runs" / "mlflow.db")
    yield FakeSweep(tmp_path)
    for process in descendants_of(tmp_path):
        process.send_signal(signal.SIGKILL)


def _hear_interrupts():
    signal.signal(signal.SIGINT, signal.default_int_handler)
