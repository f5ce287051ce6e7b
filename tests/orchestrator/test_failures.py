"""Failure classes: what an exception or a death is, what it is worth, what it makes smaller."""

import errno

import pytest

from orchestrator.config import RetriesConfig
from orchestrator.failures import (
    alike,
    classify,
    classify_death,
    grants_retry,
    smaller_pass,
    traceback_id,
)
from orchestrator.ledger import ReplicateState


def raised(function, *arguments):
    with pytest.raises((ZeroDivisionError, KeyError)) as caught:
        function(*arguments)
    return caught.value


def divide(by):
    return 1 / by


def look_up(key):
    return {}[key]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("CUDA error: out of memory"), "oom_gpu"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "oom_gpu"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"), "oom_host"),
        (OSError(errno.ENOSPC, "No space left on device"), "node"),
        (OSError(errno.EROFS, "Read-only file system"), "node"),
        (FileNotFoundError(errno.ENOENT, "No such file"), "user_bug"),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), "user_bug"),
    ],
    ids=["cuda", "cublas", "host", "full", "read-only", "missing", "illegal access"],
)
def test_words_of_an_error_decide_its_class(error, expected):
    assert classify(error) == expected


def test_one_path_through_the_code_has_one_id_whatever_the_message():
    same = [traceback_id(raised(look_up, key)) for key in ("a", "b")]
    assert same[0] == same[1]
    assert traceback_id(raised(divide, 0)) != same[0]


def failed(error, failure="user_bug"):
    end = {"event": "end", "status": "failed", "traceback_id": traceback_id(error)}
    return ReplicateState(status="failed", failure_class=failure, end=end)


def test_equal_bugs_are_alike_and_nothing_else_is():
    bug, other = raised(divide, 0), raised(look_up, "a")
    states = {"a": failed(bug), "b": failed(other), "c": failed(bug), "d": failed(other, "timeout")}
    assert alike(states, 2) == ["a", "c"]
    assert alike(states, 3) == []
    assert alike(states, None) == []


def test_what_says_nothing_about_the_trial_uses_up_its_own_allowance_alone():
    retries = RetriesConfig(preempted=2, node=1, oom_host=1)
    assert grants_retry(retries, ["node", "preempted", "preempted"])
    assert not grants_retry(retries, ["node", "preempted", "node"])
    assert grants_retry(retries, ["preempted", "node", "oom_host"])
    assert not grants_retry(retries, ["timeout", "oom_host"])


@pytest.mark.parametrize(
    ("windows", "micro", "expected"),
    [(256, None, 128), (256, 128, 64), (20, None, 10), (15, None, 5), (15, 5, 1), (7, None, 1)],
)
def test_a_smaller_pass_divides_the_step_and_halves_at_least(windows, micro, expected):
    assert smaller_pass(windows, micro) == expected
    assert windows % expected == 0


@pytest.mark.parametrize(("windows", "micro"), [(1, None), (8, 1)])
def test_one_window_cannot_be_made_less(windows, micro):
    assert smaller_pass(windows, micro) is None


def test_a_process_that_ended_for_hanging_says_so_in_its_newest_words(tmp_path):
    assert classify_death(tmp_path)[0] == "oom_host"
    log = tmp_path / "output.log"
    log.write_text("attempt-0001: process 7\nTimeout (0:00:05)!\nThread 0x1\n")
    assert classify_death(tmp_path)[0] == "timeout"
    with log.open("a") as file:
        file.write("attempt-0002: process 8\nstep 1\n")
    assert classify_death(tmp_path)[0] == "oom_host"
