"""A store that is away for a while, or answers too late, ends up with every point once."""

import shutil
import sqlite3
import threading

import pytest
from mlflow.exceptions import MlflowException

from orchestrator.journal import Journal
from orchestrator.ledger import Ledger
from orchestrator.provenance import Provenance
from orchestrator.records import TrialRecord
from orchestrator.store_uri import tracking_uri
from orchestrator.tracking import MlflowView, TrackingError

PROVENANCE = Provenance(
    git_commit="abc",
    git_dirty=False,
    git_diff="",
    code_digest="0" * 64,
    command="python -m orchestrator sweep conf=demo",
    user="someone",
    python="3.11",
    platform="linux",
    host="here",
    gpus=[],
    packages={},
)
DEAD = {"host": "here", "pid": 1, "process_created": 0.0}
RECORD = TrialRecord(
    sweep="demo",
    cell_id="cabc",
    arm_id="aabc",
    replicate_id="cabc-s0",
    seed=0,
    mixer="deltanet",
    stack="pure",
    optimizer="adamw",
    lr=0.001,
    size="nano",
    match="params",
    data_seed=0,
    seq_len=256,
    batch_tokens=512,
    tokens=51_200,
    steps=100,
    config_json='{"optimizer":{"lr":0.001}}',
)
CALLS = ("create_run", "log_batch", "log_artifact", "set_tag", "set_terminated", "update_run")
CALLS_PER_TRIAL = 6
"""Of those, how many show a trial that has ended."""


class FlakyClient:
    """An MLflow client one of whose calls fails, before or after the store has done it."""

    def __init__(self, client, failing_call, *, is_done_first):
        self._client = client
        self._left = failing_call
        self._is_done_first = is_done_first

    def __getattr__(self, name):
        method = getattr(self._client, name)
        if name not in CALLS:
            return method

        def call(*arguments, **options):
            self._left -= 1
            if self._left:
                return method(*arguments, **options)
            if self._is_done_first:
                method(*arguments, **options)
            raise MlflowException("API request failed: connection refused")

        return call


@pytest.fixture
def world(tmp_path, empty_store):
    """A finished trial, half of which a view has already shown."""
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    ledger = Ledger(tmp_path, "demo")
    ledger.describe(RECORD)
    view = MlflowView(tracking_uri(None, tmp_path), tmp_path, "demo")
    view.open({"purpose": "compare"}, PROVENANCE)
    journal = Journal(ledger.next_attempt(RECORD.replicate_id))
    journal.append({"event": "claim", **DEAD})
    for step in range(5):
        point = {"step": step, "tokens": step, "wall_seconds": 1.0, "train_loss_nats": 9.0}
        journal.append({"event": "step", **point})
    journal.append({"event": "end", "status": "completed", "val_loss_nats": 8.0})
    journal.close()
    return ledger, view


def sync(view, ledger):
    records = {RECORD.replicate_id: RECORD}
    view.sync(ledger, records, ledger.states(records), PROVENANCE)


@pytest.mark.parametrize("is_done_first", [False, True], ids=["not done", "done, reply lost"])
@pytest.mark.parametrize("failing_call", range(1, CALLS_PER_TRIAL + 1))
def test_whichever_call_fails_the_next_look_makes_up_for_it(world, failing_call, is_done_first):
    ledger, view = world
    client = view._client
    view._client = FlakyClient(client, failing_call, is_done_first=is_done_first)
    with pytest.raises(TrackingError, match="connection refused"):
        sync(view, ledger)
    view._client = client
    sync(view, ledger)
    assert view.differences(ledger, {RECORD.replicate_id: RECORD}) == []
    (run,) = list(view._search("tags.kind = 'replicate'"))
    assert run.info.status == "FINISHED"
    assert run.data.params["optimizer.lr"] == "0.001"


def test_every_call_of_a_replicate_was_made_to_fail(world):
    ledger, view = world
    counting = FlakyClient(view._client, -1, is_done_first=False)
    view._client = counting
    sync(view, ledger)
    assert -counting._left - 1 == CALLS_PER_TRIAL


def test_a_reader_who_holds_the_store_is_waited_for(world, tmp_path):
    ledger, view = world
    reader = sqlite3.connect(tmp_path / "mlflow.db", check_same_thread=False)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM runs").fetchall()
    release = threading.Timer(1.0, reader.close)
    release.start()
    sync(view, ledger)
    release.join()
    assert view.differences(ledger, {RECORD.replicate_id: RECORD}) == []
