"""Ranks that end before their time: the trial fails as what ended them, and none is left behind."""

import json
import os
import signal
import subprocess
import sys
from multiprocessing import active_children

import psutil
import pytest

from orchestrator.config import LogConfig, trial_to_dict
from orchestrator.failures import RankLostError, class_of_exit, classify, classify_death
from orchestrator.parallel import run_trial_on
from orchestrator.provenance import CHECKOUT
from orchestrator.training.runtime import Runtime
from orchestrator.trial import ListJournal

TWO = [Runtime(), Runtime()]

LEAD = """
import json, os, sys, time
from pathlib import Path
from orchestrator import parallel
from orchestrator.config import trial_from_dict
from orchestrator.training.runtime import Runtime
from orchestrator.trial import ListJournal

class Stuck(ListJournal):
    def append(self, event):
        if event["event"] == "step" and event["step"] == 3:
            sys.stdout.write("stuck\\n")
            sys.stdout.flush()
            time.sleep(300)

if __name__ == "__main__":
    parallel.POLL_SECONDS = parallel.STUCK_SECONDS = 0.2
    config = trial_from_dict(json.loads(sys.argv[1]))
    parallel.run_trial_on(
        [Runtime(), Runtime()], config, seed=0, data_folder=Path(sys.argv[2]), journal=Stuck()
    )
"""


class BreaksAt(ListJournal):
    """Sends a signal to the other rank after the third step."""

    def __init__(self, how):
        super().__init__()
        self._how = how

    def append(self, event):
        super().append(event)
        if event["event"] == "step" and event["step"] == 3:
            (child,) = active_children()
            os.kill(child.pid, self._how)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "failure"), [(signal.SIGKILL, "oom_host"), (signal.SIGTERM, "preempted")]
)
def test_a_lost_rank_fails_the_trial_as_what_ended_it(tiny_trial, data_folder, how, failure):
    config = tiny_trial(log=LogConfig(every_steps=1))
    with pytest.raises(RankLostError, match=f"rank 1 ended with exit code -{how.value}") as lost:
        run_trial_on(TWO, config, seed=0, data_folder=data_folder, journal=BreaksAt(how))
    assert classify(lost.value) == failure
    assert active_children() == []


@pytest.mark.slow
def test_an_error_of_another_rank_has_its_class_and_its_words(tiny_trial, data_folder):
    """It is told to use a device that torch does not know."""
    config = tiny_trial(log=LogConfig(every_steps=1))
    other = Runtime()
    object.__setattr__(other, "device", "nowhere")
    with pytest.raises(RankLostError, match=r"rank 1 failed: RuntimeError: .*nowhere") as lost:
        run_trial_on(
            [Runtime(), other], config, seed=0, data_folder=data_folder, journal=ListJournal()
        )
    assert classify(lost.value) == "user_bug"


@pytest.fixture
def lead(tiny_trial, data_folder, tmp_path):
    """A process that leads a trial of two ranks and sleeps after its third step; its follower."""
    script = tmp_path / "lead.py"
    script.write_text(LEAD)
    config = json.dumps(trial_to_dict(tiny_trial(log=LogConfig(every_steps=1))))
    process = subprocess.Popen(
        [sys.executable, str(script), config, str(data_folder)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "stuck\n", process.stderr.read()
    children = psutil.Process(process.pid).children()
    (follower,) = [child for child in children if "spawn_main" in " ".join(child.cmdline())]
    yield process, follower
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_no_rank_outlives_a_first_one_that_was_killed(lead):
    process, follower = lead
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs([follower], timeout=20)
    assert alive == []


@pytest.mark.slow
def test_a_first_rank_that_cannot_notice_is_ended_and_says_which_was_lost(lead, tmp_path):
    process, follower = lead
    follower.kill()
    _, said = process.communicate(timeout=60)
    assert process.returncode == 1
    (tmp_path / "output.log").write_text(f"attempt-0001: process {process.pid}\n{said}")
    failure, sentence = classify_death(tmp_path)
    assert failure == "oom_host"
    assert sentence.startswith("rank 1 ended with exit code -9")


def test_exit_codes_have_the_class_of_what_sends_such_signals():
    assert class_of_exit(-signal.SIGTERM) == "preempted"
    assert [class_of_exit(code) for code in (-signal.SIGKILL, 1)] == ["oom_host"] * 2
