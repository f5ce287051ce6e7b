"""What is settled before anything runs: whether something is left to do, and the sweep's data.

Imports neither torch nor Ray nor MLflow, so that the data can be prepared while those start.
"""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from rich.console import Console

from orchestrator.data.batches import evaluation_set
from orchestrator.data.dataset import open_dataset
from orchestrator.data.preparation import prepare
from orchestrator.errors import ConfigError
from orchestrator.identity import digest
from orchestrator.plan import Plan, unprepared


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM, and the end of the terminal, interrupt a `with` block as Ctrl-C does."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    # What nohup made ignored stays so.
    caught = [n for n in numbers if signal.getsignal(n) is not signal.SIG_IGN]
    before = [(number, signal.signal(number, interrupt)) for number in caught]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def require_writable(root: Path) -> None:
    """Refuse a root in which nothing can be kept.

    Raises:
        ConfigError: it cannot be made, or a file in it cannot be written.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ConfigError(
            f"--root {root} cannot be written ({error.strerror}); make room or give permission "
            "there, or name another folder"
        ) from None


def nothing_is_left(plan: Plan) -> bool:
    """Whether the last call of this very sweep ended with nothing left to do."""
    if plan.to_run or plan.to_time or not plan.ledger.exists:
        return False
    return plan.ledger.spec().get("complete") == completeness(plan)


def completeness(plan: Plan) -> str:
    """Digest of the desired set and of what the ledger says about it."""
    return digest({name: [s.status, len(s.attempts)] for name, s in plan.states.items()})


@contextmanager
def preparing(plan: Plan, console: Console) -> Iterator[Callable[[], Plan]]:
    """Readies the data of a plan while the `with` block does something else.

    Data that is there already, or that cannot be prepared here, is looked at before the block.

    Yields:
        A function that waits for the data and gives the plan with it; raises as `with_data` does.
    """
    if plan.data_folder is not None or not plan.data.is_embedded:
        ready = with_data(plan, console)
        yield lambda: ready
        return
    with ThreadPoolExecutor(1, thread_name_prefix="data") as pool:
        yield pool.submit(with_data, plan, console).result


def with_data(plan: Plan, console: Console) -> Plan:
    """The plan with its data prepared and checked.

    Raises:
        ConfigError: data that has to be prepared by its own command, that does not match its
            manifest, or that is too short for a window.
    """
    folder = plan.data_folder
    try:
        if folder is None:
            if not plan.data.is_embedded:
                raise ConfigError(unprepared(plan.sweep, plan.data))
            console.print(f"preparing the data set {plan.data.name}")
            folder = prepare(plan.data, plan.root).folder
    except ValueError as error:
        raise ConfigError(str(error)) from None
    plan = replace(plan, data_folder=folder)
    refuse_unfit_data(plan)
    return plan


def refuse_unfit_data(plan: Plan) -> None:
    """Refuse prepared data that has fewer windows than some cell asks for.

    Raises:
        ConfigError: that, or data that does not match its manifest.
    """
    assert plan.data_folder is not None, "prepare it first"
    try:
        dataset = open_dataset(plan.data_folder)
        for seq_len, windows in {
            (cell.config.seq_len, cell.config.eval.windows) for cell in plan.sweep.cells
        }:
            dataset.train.num_windows(seq_len)
            evaluation_set(dataset, seq_len, windows)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def refuse_other_data(plan: Plan) -> None:
    """Refuse to train on other tokens than the replicates that the ledger has."""
    assert plan.data_folder is not None
    known = plan.ledger.spec().get("data_id") if plan.ledger.exists else None
    now = open_dataset(plan.data_folder).data_id
    if known and known != now and plan.ledger.replicate_ids():
        raise ConfigError(
            f"sweep {plan.spec.name} has replicates trained on data {known[:8]}, but this call "
            f"would use {now[:8]}; restore that data, or use another name"
        )
