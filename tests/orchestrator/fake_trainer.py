"""A trainer without a model: scripted curves and scripted mishaps, for tests of what is around it.

A worker process uses it where `SEEDFRONT_TEST_TRAINER` names this file. What it does stands in the
JSON file that `SEEDFRONT_TEST_SCRIPT` names:

    {"steps": 20, "step_seconds": 0.01, "checkpoint_every": 5,
     "mishaps": [{"when": {"seed": 3}, "attempts": 1, "at_step": 7, "what": "crash"}],
     "killed_measurements": 1}

A mishap happens in the first `attempts` attempts (all of them by default) of trials whose seed and
configuration meet every entry of `when`, after the journal has its step. The first
`killed_measurements` of speed, pilots among them, end with their process. Losses are a function of
seed, rate and step alone, so any two ways to the end must give the same curve.
"""

import ctypes
import errno
import json
import math
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Runtime:
    """Stands in for the real one, which needs torch."""

    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1


@dataclass(frozen=True)
class Outcome:
    """What a trial or a measurement ended as."""

    status: str = "completed"
    failure_class: str | None = None
    steps: int | None = None
    tokens: int | None = None
    init_loss_nats: float | None = None
    val_loss_nats: float | None = None
    val_loss_se: float | None = None
    val_bits_per_byte: float | None = None
    train_loss_nats: float | None = None
    wall_seconds: float | None = None
    device_seconds: float | None = None
    peak_memory_bytes: int | None = None
    tokens_per_second: float | None = None
    step_seconds_median: float | None = None
    step_seconds_lower: float | None = None
    step_seconds_upper: float | None = None
    device_name: str | None = None

    def as_fields(self):
        return {k: v for k, v in asdict(self).items() if v is not None and k != "status"}


class OutOfMemoryError(RuntimeError):
    """Named as torch's, which is what decides its class."""


def crash(config):
    raise RuntimeError("scripted crash")


def out_of_gpu_memory(config):
    raise OutOfMemoryError("CUDA out of memory (scripted)")


def out_of_host_memory(config):
    raise MemoryError("scripted")


def disk_full(config):
    raise OSError(errno.ENOSPC, "No space left on device")


def killed(config):
    os.kill(os.getpid(), signal.SIGKILL)


def terminated(config):
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(60)


def slow(config):
    time.sleep(3600)


def held(config):
    """Until the test lets it go, by a file `go` beside the script."""
    while not Path(os.environ["SEEDFRONT_TEST_SCRIPT"]).with_name("go").exists():
        time.sleep(0.02)


def hang(config):
    """Where Python code cannot be interrupted: one call into C that no signal ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
    ctypes.PyDLL(None).sleep(3600)


MISHAPS = {
    "crash": crash,
    "out_of_gpu_memory": out_of_gpu_memory,
    "out_of_host_memory": out_of_host_memory,
    "disk_full": disk_full,
    "killed": killed,
    "terminated": terminated,
    "slow": slow,
    "held": held,
    "hang": hang,
}


DATA = {"data_id": "d" * 64}


def loss(seed, rate, step):
    return 8.0 - math.log1p(step) * (1 + 100 * rate) - 0.001 * seed


def run_trial(
    config,
    *,
    seed,
    data_folder,
    runtime,
    journal,
    checkpoint_folder,
    should_stop,
    pause_step=None,
):
    """The signature of `orchestrator.trial.run_trial`."""
    script = json.loads(Path(os.environ["SEEDFRONT_TEST_SCRIPT"]).read_text())
    attempt = len(list(checkpoint_folder.parent.glob("attempt-*.jsonl")))
    mishaps = [m for m in script.get("mishaps", []) if _meets(m, config, seed, attempt)]
    done = _resume(checkpoint_folder)
    began, rate = time.perf_counter(), config.optimizer.lr
    journal.append({"event": "start", "resumed_from_step": done, "init_loss_nats": 8.0} | DATA)
    sys.stdout.write(f"training from step {done}\n")
    for step in range(done + 1, script["steps"] + 1):
        time.sleep(script.get("step_seconds", 0))
        is_lost = any(m["what"] == "nan" and m["at_step"] == step for m in mishaps)
        value = math.nan if is_lost else loss(seed, rate, step)
        evaluated = {"val_loss_nats": value} if step == pause_step else {}
        journal.append(_point(step, value, rate, config) | evaluated)
        if is_lost:
            return _end(journal, Outcome(status="diverged", failure_class="diverged", steps=step))
        if step % script.get("checkpoint_every", 10**9) == 0:
            _save(checkpoint_folder, step)
            journal.append({"event": "checkpoint", "step": step})
        for mishap in mishaps:
            if mishap["at_step"] == step:
                MISHAPS[mishap["what"]](config)
        if step == pause_step:
            _save(checkpoint_folder, step)
            journal.append({"event": "stop", "step": step})
            return Outcome(status="stopped", steps=step, val_loss_nats=value)
    seconds = time.perf_counter() - began
    return _end(
        journal,
        Outcome(
            steps=script["steps"],
            tokens=script["steps"] * config.batch.tokens,
            init_loss_nats=8.0,
            val_loss_nats=loss(seed, rate, script["steps"]),
            val_loss_se=0.01,
            val_bits_per_byte=loss(seed, rate, script["steps"]) / 3,
            train_loss_nats=loss(seed, rate, script["steps"]),
            wall_seconds=seconds,
            device_seconds=seconds,
            peak_memory_bytes=2**20,
        ),
    )


def measure_speed(config, *, seed, data_folder, runtime, steps, warmup_steps):
    """The signature of `orchestrator.trial.measure_speed`."""
    script = Path(os.environ["SEEDFRONT_TEST_SCRIPT"])
    begun = script.with_name("measurements-begun")
    with begun.open("a") as counted:
        counted.write("x")
    if begun.stat().st_size <= json.loads(script.read_text()).get("killed_measurements", 0):
        killed(config)
    return Outcome(
        tokens_per_second=1000.0 + seed,
        step_seconds_median=0.1,
        step_seconds_lower=0.09,
        step_seconds_upper=0.12,
        peak_memory_bytes=2**20,
        device_name="fake",
    )


def _meets(mishap, config, seed, attempt):
    values = {"seed": seed, "lr": config.optimizer.lr, "mixer": config.model.mixer.name}
    # Out of memory only while one pass holds as many windows as at first.
    if mishap["what"] == "out_of_gpu_memory" and mishap.get("fits") == config.batch.micro_windows:
        return False
    wanted = mishap.get("when", {})
    return attempt <= mishap.get("attempts", 10**9) and all(
        values[k] == v for k, v in wanted.items()
    )


def _point(step, value, rate, config):
    return {
        "event": "step",
        "step": step,
        "tokens": step * config.batch.tokens,
        "wall_seconds": 0.01 * step,
        "lr": rate,
        "train_loss_nats": value,
        "grad_norm": 1.0,
    }


def _end(journal, outcome):
    journal.append({"event": "end", "status": outcome.status, **outcome.as_fields()})
    return outcome


def _save(folder, step):
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".partial"
    partial.write_text(str(step))
    partial.replace(folder / "step")


def _resume(folder):
    path = folder / "step"
    return int(path.read_text()) if path.is_file() else 0
