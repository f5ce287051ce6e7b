"""How a trial can fail, how an exception is classed, and what each class is worth."""

import traceback
from dataclasses import asdict

from orchestrator.config import RetriesConfig


class TrialTerminatedError(Exception):
    """The trial's process was asked to end (SIGTERM)."""


def classify(error: BaseException) -> str:
    """The failure class of an exception that ended a trial."""
    if isinstance(error, TrialTerminatedError):
        return "preempted"
    if isinstance(error, MemoryError):
        return "oom_host"
    # torch is not imported here: this runs in the driver as well.
    if type(error).__name__ == "OutOfMemoryError":
        return "oom_gpu"
    frames = traceback.walk_tb(error.__traceback__)
    rooms = [str(frame.f_globals.get("__name__", "")) for frame, _ in frames]
    if any(room.startswith("orchestrator.data.") for room in rooms):
        return "data"
    return "user_bug"


def grants_retry(retries: RetriesConfig, failure_class: str, failed_before: int) -> bool:
    """Whether a replicate that failed once more may be tried again in this call.

    Args:
        retries: attempts after the first, by class.
        failure_class: class of the last failure.
        failed_before: earlier failures of the replicate in this call, of any class.
    """
    return failed_before < int(asdict(retries).get(failure_class, 0))


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
