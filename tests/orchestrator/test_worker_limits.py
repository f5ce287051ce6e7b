"""What ends a trial from outside, and what is kept of its last words."""

import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import worker
from orchestrator.config import TrialConfig, trial_to_dict
from orchestrator.failures import classify_death, mlflow_status
from orchestrator.job import Job, WorkerRetiredError
from orchestrator.journal import Journal, last_event, opening, read_events
from orchestrator.worker import run_job

TRAINER = Path(__file__).with_name("fake_trainer.py")


@pytest.fixture
def scripted(tmp_path, monkeypatch):
    """A job of a scripted trial in its own folder."""
    monkeypatch.setenv("SEEDFRONT_TEST_TRAINER", str(TRAINER))
    monkeypatch.setenv("SEEDFRONT_TEST_SCRIPT", str(tmp_path / "script.json"))

    def make(*mishaps, attempt=1, **changes):
        (tmp_path / "script.json").write_text(json.dumps({"steps": 4, "mishaps": mishaps}))
        job = Job(
            lane="loss",
            replicate_id="cabc-s0",
            seed=0,
            config=trial_to_dict(TrialConfig()),
            journal=str(tmp_path / f"attempt-{attempt:04d}.jsonl"),
            folder=str(tmp_path),
            data_folder=str(tmp_path),
            device="cpu",
            precision="fp32",
            threads=1,
            steps=2,
            warmup_steps=1,
            micro_windows=None,
            max_seconds=None,
            pause_step=None,
            stamp={},
        )
        return replace(job, **changes)

    return make


def _run(job, grace_seconds):
    worker.HANG_GRACE_SECONDS = grace_seconds
    run_job(job, position=0)


def run_in_a_process(job, grace_seconds=60.0):
    process = multiprocessing.get_context("spawn").Process(target=_run, args=(job, grace_seconds))
    process.start()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def test_a_trial_over_its_time_is_a_timeout(scripted, tmp_path):
    job = scripted({"at_step": 2, "what": "slow"}, max_seconds=0.3)
    with pytest.raises(WorkerRetiredError):
        run_job(job, position=0)
    end = last_event(Path(job.journal))
    assert (end["status"], end["failure_class"]) == ("failed", "timeout")
    assert "longer than 0.3 s" in end["error"]
    assert "in slow" in (tmp_path / "output.log").read_text()


def test_a_trial_within_its_time_is_left_alone(scripted):
    assert run_job(scripted(max_seconds=60.0), position=0) == "completed"


def test_a_trial_that_hangs_outside_python_is_ended_with_its_process(scripted, tmp_path):
    job = scripted({"at_step": 2, "what": "hang"}, max_seconds=0.3)
    assert run_in_a_process(job, grace_seconds=0.5) == 1
    assert last_event(Path(job.journal))["event"] == "step"
    failure, sentence = classify_death(tmp_path)
    assert failure == "timeout"
    assert "output.log" in sentence
    assert "in hang" in (tmp_path / "output.log").read_text()


def test_sigterm_is_journalled_as_preemption(scripted):
    job = scripted({"at_step": 2, "what": "terminated"})
    run_in_a_process(job)
    end = last_event(Path(job.journal))
    assert (end["status"], end["failure_class"]) == ("failed", "preempted")
    assert mlflow_status(end["status"], end["failure_class"]) == "KILLED"


def test_what_a_library_prints_past_python_is_in_the_log(scripted, tmp_path, monkeypatch):
    def print_as_c_does(*arguments, **options):
        os.write(1, b"words of a C library\n")
        os.write(2, b"and its errors\n")
        raise MemoryError

    fake = worker._module_at(str(TRAINER))
    monkeypatch.setattr(fake, "run_trial", print_as_c_does)
    monkeypatch.setattr(worker, "_trainer", lambda: fake)
    with pytest.raises(WorkerRetiredError):
        run_job(scripted(), position=0)
    log = (tmp_path / "output.log").read_text()
    assert log.startswith("attempt-0001: process ")
    assert "words of a C library\n" in log
    assert "and its errors\n" in log
    assert "Traceback" in log


def test_a_smaller_pass_reaches_the_trial_and_its_journal(scripted):
    job = scripted({"at_step": 1, "what": "out_of_gpu_memory", "fits": 8})
    with pytest.raises(WorkerRetiredError):
        run_job(job, position=0)
    assert last_event(Path(job.journal))["failure_class"] == "oom_gpu"
    again = replace(job, journal=job.journal.replace("0001", "0002"), micro_windows=8)
    assert run_job(again, position=0) == "completed"
    assert opening(Path(again.journal))["micro_windows"] == 8


def test_a_journal_that_cannot_be_written_is_no_failure_of_the_trial(scripted, tmp_path):
    job = scripted()
    Path(job.journal).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        run_job(job, position=0)
    assert os.readlink(job.journal) == "/dev/full"


def test_a_disk_that_is_full_for_a_while_loses_only_the_torn_line(tmp_path, monkeypatch):
    path = tmp_path / "attempt-0001.jsonl"
    journal = Journal(path)
    journal.append({"event": "step", "step": 1, "tokens": 512})
    journal.close()
    with path.open("a") as file:  # as much of the next line as there was room for
        file.write('{"time":1,"event":"st')
    journal = Journal(path)
    journal.append({"event": "end", "status": "failed", "failure_class": "node"})
    journal.close()
    assert [event["event"] for event in read_events(path)[0]] == ["step", "end"]
