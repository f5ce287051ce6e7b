"""What is shown while a sweep runs: on a terminal and in a log."""

import io
import re
import subprocess

import pytest
from rich.console import Console

from orchestrator import hardware, watch
from orchestrator.compose import load_sweep
from orchestrator.hardware import GpuUse, gpu_use
from orchestrator.journal import Journal
from orchestrator.leases import process_facts
from orchestrator.plan import make_plan
from orchestrator.watch import SHOWN_TRIALS, Watch, trial_table

SWEEP = """
name: small
base: {size: nano, data: sotu, budget.tokens: 51200, batch.tokens: 512}
axes:
  optimizer.lr: [1e-3, 3e-3]
seeds: [0, 1]
"""
STEP = {"event": "step", "step": 40, "tokens": 20480, "wall_seconds": 4.0, "train_loss_nats": 5.25}


@pytest.fixture
def plan(tmp_path):
    (tmp_path / "small.yaml").write_text(SWEEP)
    return make_plan(load_sweep("small.yaml", [], tmp_path), tmp_path / "runs", tmp_path)


def journal(plan, name, *events):
    plan.ledger.describe(plan.desired[name])
    journal = Journal(plan.ledger.next_attempt(name))
    for event in ({"event": "claim", **process_facts()}, *events):
        journal.append(event)
    journal.close()


def shown(plan, *, is_terminal):
    """A console, and what it was written to."""
    file = io.StringIO()
    return Console(file=file, force_terminal=is_terminal, width=120, highlight=False), file


def test_a_terminal_shows_running_trials_with_loss_speed_and_progress(plan):
    console, file = shown(plan, is_terminal=True)
    ended, running, *_ = plan.desired
    journal(plan, running, STEP, {"event": "checkpoint", "step": 48})
    journal(plan, ended, {"event": "end", "status": "completed", "val_loss_nats": 4.5})
    with Watch(plan, console) as display:
        display.update(plan.ledger.states(plan.desired))
        text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert "softmax pure adamw lr=0.003 seed 0  40 of 100      5.2500     5,120" in text
    assert "1/4 done, 1 running, 2 waiting, ETA" in text
    assert "[1/4] completed softmax pure adamw lr=0.001 seed 0 loss 4.5000 nats" in text


def test_a_log_gets_plain_lines_and_no_table(plan, monkeypatch):
    console, file = shown(plan, is_terminal=False)
    ended, running, *_ = plan.desired
    journal(plan, running, STEP)
    with Watch(plan, console) as display:
        display.update(plan.ledger.states(plan.desired))
        display.update(plan.ledger.states(plan.desired))
        assert [line[9:] for line in file.getvalue().splitlines()] == [
            "0/4 done, 1 running, 3 waiting, ETA 0 s"
        ]
        journal(plan, ended, {"event": "end", "status": "failed", "error": "no [room] left"})
        display.update(plan.ledger.states(plan.desired))
        monkeypatch.setattr(watch, "LOG_SECONDS", -1)
        display.update(plan.ledger.states(plan.desired))
    _, said, counts = (line[9:] for line in file.getvalue().splitlines())
    assert said == "[1/4] failed softmax pure adamw lr=0.001 seed 0 no [room] left"
    assert counts.startswith("1/4 done, 1 failed, 1 running, 2 waiting, ETA ")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_measurements_of_speed_are_counted_between_them(plan, is_terminal, monkeypatch):
    monkeypatch.setattr(watch, "LOG_SECONDS", -1)
    console, file = shown(plan, is_terminal=is_terminal)
    with Watch(plan, console) as display:
        for done in range(3):
            display.measured(done, 2, what="pilots")
        for done in range(3):
            display.measured(done, 2)
    assert "pilots: 1/2 measured, one at a time, ETA 0 s" in file.getvalue()
    assert "speed: 1/2 measured, one at a time, ETA 0 s" in file.getvalue()
    assert "0/2" not in file.getvalue()
    assert "2/2" not in file.getvalue()


def test_rows_beyond_a_screen_are_counted_and_gpus_stand_below(plan):
    console, file = shown(plan, is_terminal=False)
    name = next(iter(plan.desired))
    journal(plan, name, STEP)
    trial = watch.running_trial(plan.desired[name], plan.ledger.states([name])[name])
    gpu = GpuUse(index=1, busy_percent=97, used_bytes=3 * 2**30, total_bytes=141 * 2**30)
    console.print(trial_table([trial] * (SHOWN_TRIALS + 4), (gpu,)))
    lines = file.getvalue().splitlines()
    assert len(lines) == 1 + SHOWN_TRIALS + 2
    assert lines[-2].strip() == "… and 4 more"
    assert lines[-1].strip() == "GPU 1: 97 % busy, 3.0 of 141.0 GiB"


def test_use_of_gpus_is_what_the_driver_says(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "0, 97, 3072, 143771"\necho "1, [N/A], [N/A], [N/A]"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert gpu_use() == (GpuUse(0, 97, 3072 * 2**20, 143771 * 2**20),)


def test_a_driver_that_does_not_answer_leaves_the_gpus_out(monkeypatch):
    def run(*arguments, timeout, **options):
        raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setattr(hardware.shutil, "which", lambda name: name)
    monkeypatch.setattr(hardware.subprocess, "run", run)
    assert gpu_use() == ()
