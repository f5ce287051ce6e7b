"""How a trial can fail, how an exception is classed, and what each class is worth.

    class      what happened                                   tried again          counted
    diverged   a loss that is not finite or above the cap      never: it is a result
    oom_gpu    device memory ran out                           in smaller passes    yes
    oom_host   host memory ran out, or the process was killed  from its checkpoint  yes
    preempted  the process was asked to end                    from its checkpoint  no
    node       the machine, or its disk, gave way              from its checkpoint  no
    timeout    the attempt took too long                       from its checkpoint  yes
    data       the token files could not be read               not by itself        yes
    user_bug   any other exception                             not by itself        yes

`retries.CLASS` is how often one call tries a replicate again after failures of that class. Failures
that are not counted use up their own allowance alone.
"""

import errno
import hashlib
import signal
import traceback
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from orchestrator.config import RetriesConfig
from orchestrator.ledger import ReplicateState

UNCOUNTED = ("preempted", "node")
"""Classes that say nothing about the trial."""

HANG_GRACE_SECONDS = 15.0
"""Between a trial's time limit, which its Python code notices, and the end of its process."""

HANG_MARK = "Timeout ("
"""How `faulthandler` begins the last words of a process that it ends for hanging."""

LOST_RANK_MARK = "rank lost: "
"""How a trial that waits for a rank that is lost begins its last words: the failure class."""

STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO)
"""A file system that is full, read-only, over its limits, or broken."""

GPU_MEMORY_WORDS = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
HOST_MEMORY_WORDS = ("DefaultCPUAllocator: can't allocate memory",)


class TrialTerminatedError(Exception):
    """The trial's process was asked to end (SIGTERM)."""


class TrialTimeoutError(Exception):
    """The attempt took longer than it may."""


class RankLostError(RuntimeError):
    """Another rank of a trial ended before its time.

    Attributes:
        failure_class: of what ended it.
    """

    def __init__(self, message: str, failure_class: str) -> None:
        super().__init__(message)
        self.failure_class = failure_class


def class_of_exit(code: int) -> str:
    """The failure class of a process that ended without a word, by its exit code."""
    return "preempted" if code == -signal.SIGTERM else "oom_host"


def is_storage_error(error: BaseException) -> bool:
    """Whether an error says that nothing more can be written."""
    return isinstance(error, OSError) and error.errno in STORAGE_ERRORS


def classify(error: BaseException) -> str:
    """The failure class of an exception that ended a trial."""
    if isinstance(error, RankLostError):
        return error.failure_class
    if isinstance(error, TrialTerminatedError):
        return "preempted"
    if isinstance(error, TrialTimeoutError):
        return "timeout"
    if isinstance(error, MemoryError) or any(w in str(error) for w in HOST_MEMORY_WORDS):
        return "oom_host"
    # torch is not imported here: this runs in the driver as well.
    if type(error).__name__ == "OutOfMemoryError" or any(w in str(error) for w in GPU_MEMORY_WORDS):
        return "oom_gpu"
    if is_storage_error(error):
        return "node"
    frames = traceback.walk_tb(error.__traceback__)
    rooms = [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]
    if any(room.startswith("orchestrator.data.") for room in rooms):
        return "data"
    return "user_bug"


def classify_death(folder: Path) -> tuple[str, str]:
    """Failure class and a sentence for an attempt whose process ended without a word.

    Args:
        folder: the replicate's folder, whose log may hold the process's last words.
    """
    log = folder / "output.log"
    attempt = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
    words = attempt.rpartition(": process ")[2]
    if LOST_RANK_MARK in words:
        failure, _, sentence = words.rpartition(LOST_RANK_MARK)[2].partition(": ")
        return failure, sentence.splitlines()[0]
    if HANG_MARK in words:
        return "timeout", "the trial hung and its process was ended; output.log says in which line"
    return "oom_host", "the worker process was killed, for example because memory ran out"


def traceback_id(error: BaseException) -> str:
    """Equal for exceptions of one type that were raised on one path through the code."""
    places = [
        f"{frame.f_code.co_filename}:{line}:{frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    text = "\n".join([type(error).__qualname__, *places])
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def alike(states: Mapping[str, ReplicateState], limit: int | None) -> list[str]:
    """Replicates that failed by a bug with one and the same traceback, if they are `limit` or more.

    Such failures come from the code or the configuration that trials share, so that the ones still
    to come would most likely end alike.

    Args:
        states: of the replicates to look at, by id.
        limit: how many are too many; None for any number is fine.
    """
    if limit is None:
        return []
    groups: dict[str, list[str]] = defaultdict(list)
    for name, state in states.items():
        if state.status == "failed" and state.failure_class in ("user_bug", "data"):
            groups[str(state.end.get("traceback_id"))].append(name)
    return next((names for names in groups.values() if len(names) >= limit), [])


def grants_retry(retries: RetriesConfig, failures: list[str]) -> bool:
    """Whether a replicate that has failed may be tried again in this call.

    Args:
        retries: attempts after the first, by class.
        failures: classes of its failures in this call, the newest last.
    """
    newest, counts = failures[-1], Counter(failures)
    allowed = int(asdict(retries).get(newest, 0))
    if newest in UNCOUNTED:
        return counts[newest] <= allowed
    return sum(n for name, n in counts.items() if name not in UNCOUNTED) <= allowed


def smaller_pass(windows: int, micro_windows: int | None) -> int | None:
    """The next smaller number of windows for one forward pass; None where it is one already.

    The windows of an optimizer step stay the same, so that the result does, up to rounding.

    Args:
        windows: of one optimizer step.
        micro_windows: of one forward pass so far; None for all at once.

    Returns:
        The largest divisor of `windows` that is at most half of what was.
    """
    now = micro_windows or windows
    return next((n for n in range(now // 2, 0, -1) if windows % n == 0), None)


MLFLOW_STATUS = {
    "completed": "FINISHED",
    "diverged": "FINISHED",
    "failed": "FAILED",
    "running": "RUNNING",
    "pending": "KILLED",
}


def mlflow_status(status: str, failure_class: str | None) -> str:
    """The MLflow run status of a replicate; a run that was asked to end is KILLED."""
    if status == "failed" and failure_class == "preempted":
        return "KILLED"
    return MLFLOW_STATUS[status]
