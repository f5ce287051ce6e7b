"""What a sweep costs beyond its trials: `make bench-overhead`, on scripted trials that do nothing.

Prints one line a quantity, with the limit where there is one. Not a test: it takes minutes, and its
numbers are those of the machine.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

CHECKOUT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CHECKOUT))

from orchestrator.journal import Journal, opening, read_events  # noqa: E402
from orchestrator.leases import process_facts  # noqa: E402
from orchestrator.ledger import Ledger  # noqa: E402
from orchestrator.records import TrialRecord  # noqa: E402

SWEEP = """
name: {name}
base:
  size: nano
  data: files
  data.sources: [text.jsonl]
  data.vocab_size: 300
  budget.tokens: 25600
  batch.tokens: 1280
  seq_len: 64
  eval.windows: 4
axes:
  optimizer.lr: {rates}
seeds: {seeds}
lanes: {{speed: {{enabled: false}}}}
"""

PLAIN_TUNE = """
import os, sys, tempfile, time
for name in ("RAY_CHDIR_TO_TRIAL_DIR", "RAY_AIR_NEW_OUTPUT"):
    os.environ[name] = "0"
os.environ["TUNE_DISABLE_AUTO_CALLBACK_LOGGERS"] = "1"
import ray
from ray import tune

class Nothing(tune.Trainable):
    def setup(self, config): pass
    def reset_config(self, config): return True
    def step(self): return {"done": True}

number, reuse = int(sys.argv[1]), sys.argv[2] == "reuse"
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
with tempfile.TemporaryDirectory() as storage:
    tuner = tune.Tuner(
        tune.with_resources(Nothing, {"cpu": 1}),
        param_space={"job": tune.grid_search(list(range(number)))},
        tune_config=tune.TuneConfig(reuse_actors=reuse),
        run_config=tune.RunConfig(
            storage_path=storage,
            verbose=0,
            checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
        ),
    )
    began = time.perf_counter()
    tuner.fit()
    sys.stdout.write(f"seconds {time.perf_counter() - began}\\n")
"""


def say(what, value, unit, limit=""):
    """One line of the result."""
    sys.stdout.write(f"{what:<58} {value:>10.3f} {unit:<14} {limit}\n")
    sys.stdout.flush()


def environment(folder):
    """Of a process whose trials are scripted."""
    return {
        **os.environ,
        "PYTHONPATH": str(CHECKOUT),
        "OMP_NUM_THREADS": "1",
        "SEEDFRONT_TEST_TRAINER": str(Path(__file__).with_name("fake_trainer.py")),
        "SEEDFRONT_TEST_SCRIPT": str(folder / "script.json"),
    }


def write_sweep(folder, name, rates, seeds, steps):
    """A sweep file of `rates * seeds` replicates, and what their trials do."""
    text = SWEEP.format(
        name=name, rates=[1e-4 * n for n in range(1, rates + 1)], seeds=list(range(seeds))
    )
    (folder / f"{name}.yaml").write_text(text)
    (folder / "script.json").write_text(json.dumps({"steps": steps}))
    words = " ".join(f"w{n % 97}" for n in range(200))
    rows = [json.dumps({"text": words})] * 100
    (folder / "text.jsonl").write_text("\n".join(rows))


def call(folder, *arguments):
    """Seconds of one call of the command line, which has to succeed."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "orchestrator", *arguments]
    subprocess.run(
        command, cwd=folder, env=environment(folder), check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - began


def ours(folder):
    """200 trials through the command, and 200 through plain Tune, in this order."""
    write_sweep(folder, "ours", 20, 10, steps=20)
    call(folder, "data", "prepare", "conf=ours.yaml")
    whole = call(folder, "sweep", "conf=ours.yaml")
    journals = list((folder / "runs" / "ours").glob("replicates/*/attempt-*.jsonl"))
    first = min(opening(path)["time"] for path in journals)
    last = max(read_events(path)[0][-1]["time"] for path in journals)
    say("ours: the whole command over 200 trials", whole / 200, "s a trial", "limit 0.15")
    say(
        "ours: from the first trial's start to the last one's end",
        (last - first) / 200,
        "s a trial",
    )
    for number, kind in ((200, "reuse"), (8, "new")):
        command = [sys.executable, "-c", PLAIN_TUNE, str(number), kind]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds = float(result.stdout.split("seconds ")[1])
        say(f"plain Tune: {number} trials, processes: {kind}", seconds / number, "s a trial")


def journals(folder):
    """Appending and reading events."""
    path = folder / "journal" / "attempt-0001.jsonl"
    journal = Journal(path)
    point = {"event": "step", "step": 1, "tokens": 512, "wall_seconds": 1.0, "lr": 1e-3}
    point |= {"train_loss_nats": 3.3, "grad_norm": 1.0, "lr_by_group": {"matrix": 1e-3}}
    began = time.perf_counter()
    for step in range(20_000):
        journal.append(point | {"step": step})
    say(
        "journal: one step appended", 1000 * (time.perf_counter() - began) / 20_000, "ms", "limit 1"
    )
    began = time.perf_counter()
    for step in range(50):
        journal.append({"event": "checkpoint", "step": step})
    say("journal: one durable event appended", 1000 * (time.perf_counter() - began) / 50, "ms")
    journal.close()
    began = time.perf_counter()
    events, _ = read_events(path)
    rate = len(events) / (time.perf_counter() - began)
    say("journal: events read", rate, "1/s")


def replay(folder):
    """Journals into MLflow, from nothing."""
    from orchestrator.tracking import MlflowView  # noqa: PLC0415

    sys.path.insert(0, str(Path(__file__).parent))
    from test_tracking_outages import PROVENANCE, RECORD  # noqa: PLC0415

    ledger = Ledger(folder, "demo")
    ledger.describe(RECORD)
    journal = Journal(ledger.next_attempt(RECORD.replicate_id))
    for step in range(5000):
        point = {"step": step, "tokens": step, "train_loss_nats": 3.3, "grad_norm": 1.0, "lr": 1e-3}
        journal.append({"event": "step", "wall_seconds": 1.0, **point})
    journal.append({"event": "end", "status": "completed"})
    journal.close()
    view = MlflowView(f"sqlite:///{folder}/mlflow.db", folder, "demo")
    view.open({}, PROVENANCE)
    records = {RECORD.replicate_id: RECORD}
    began = time.perf_counter()
    view.sync(ledger, records, ledger.states(records), PROVENANCE)
    rate = 5000 * 4 / (time.perf_counter() - began)
    say("MLflow: metric points replayed", rate, "1/s", "limit 2000 (at least)")


def ten_thousand(folder):
    """`plan` and `status` of 10,000 replicates, untried and all done."""
    write_sweep(folder, "large", 1000, 10, steps=20)
    say(
        "plan: 10,000 replicates, none begun",
        call(folder, "plan", "conf=large.yaml"),
        "s",
        "limit 5",
    )
    planned = json.loads(
        subprocess.run(
            [sys.executable, "-m", "orchestrator", "plan", "conf=large.yaml", "--json"],
            cwd=folder,
            env=environment(folder),
            check=True,
            capture_output=True,
        ).stdout
    )
    ledger = Ledger(folder / "runs", "large")
    facts = process_facts()
    for cell in planned["cells"]:
        for name in cell["replicates"]:
            known = {k: v for k, v in cell.items() if k in TrialRecord.__dataclass_fields__}
            seed = int(name.rpartition("-s")[2])
            record = TrialRecord(
                **known,
                replicate_id=name,
                seed=seed,
                data_seed=seed,
                config_json=json.dumps(cell["config"]),
            )
            ledger.describe(record)
            journal = Journal(ledger.next_attempt(name))
            journal.append({"event": "claim", **facts})
            journal.append({"event": "end", "status": "completed", "wall_seconds": 1.0})
            journal.close()
    spec = {"device": "cpu", "precision": "fp32", "threads": 1, "replicates": 10_000}
    ledger.write_spec({**spec, "base": {}, "axes": {}, "match": "params"})
    say("status: 10,000 replicates, all done", call(folder, "status", "large"), "s", "limit 1")


def driver_memory(folder):
    """Resident memory of the driver after 1,000 and after 10,000 trials of one call."""
    write_sweep(folder, "long", 1000, 10, steps=1)
    process = subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "sweep", "conf=long.yaml"],
        cwd=folder,
        env=environment(folder),
        stdout=subprocess.DEVNULL,
    )
    seen = {}
    driver = psutil.Process(process.pid)
    replicates = folder / "runs" / "long" / "replicates"
    while process.poll() is None:
        time.sleep(2)
        begun = len(list(replicates.glob("*/attempt-*.jsonl"))) if replicates.is_dir() else 0
        for number in (1000, 10_000):
            if begun >= number and number not in seen:
                seen[number] = driver.memory_info().rss
    grown = (seen[10_000] - seen[1000]) / 2**20
    say("driver: memory from trial 1,000 to trial 10,000", grown, "MiB", "limit 50")


PARTS = {
    "ours": ours,
    "journals": journals,
    "replay": replay,
    "ten_thousand": ten_thousand,
    "driver_memory": driver_memory,
}


def main(names):
    """Every part by name, or all but the last, which takes an hour."""
    for name in names or list(PARTS)[:-1]:
        with tempfile.TemporaryDirectory(prefix="seedfront-bench-") as folder:
            PARTS[name](Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
