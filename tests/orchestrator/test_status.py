"""What `status` says of a sweep, and how it finds the end of a journal."""

import io
import json
import subprocess
import sys

import pytest

from orchestrator.journal import TAIL_BYTES, Journal, last_event
from orchestrator.leases import process_facts
from orchestrator.ledger import Ledger
from orchestrator.records import TrialRecord
from orchestrator.status import show_status, status_json

END = {"event": "end", "status": "completed", "wall_seconds": 30.0}


def planned(name):
    return TrialRecord(
        sweep="demo",
        cell_id="c1",
        arm_id="a1",
        replicate_id=name,
        seed=int(name[-1]),
        mixer="softmax",
        stack="pure",
        optimizer="adamw",
        lr=1e-3,
        size="nano",
        match="params",
        data_seed=0,
        seq_len=64,
        batch_tokens=512,
        tokens=5120,
        steps=10,
        config_json="{}",
    )


@pytest.fixture
def ledger(tmp_path):
    """Six replicates asked for: two completed, one diverged, one failed, one running at step 4."""
    ledger = Ledger(tmp_path, "demo")
    ledger.write_spec({"replicates": 6})
    step = {"event": "step", "step": 4, "tokens": 2048}
    told = {
        "c1-s0": [END],
        "c1-s1": [END | {"wall_seconds": 50.0}],
        "c1-s2": [END | {"status": "diverged", "wall_seconds": 10.0}],
        "c1-s3": [{"event": "end", "status": "failed", "error": "ValueError: [red]"}],
        "c1-s4": [step],
    }
    for name, events in told.items():
        ledger.describe(planned(name))
        journal = Journal(ledger.next_attempt(name))
        for event in ({"event": "claim", **process_facts()}, *events):
            journal.append(event)
        journal.close()
    return ledger


def test_status_counts_and_names_what_runs_and_what_failed(ledger):
    said = io.StringIO()
    show_status(ledger.folder.parent, "demo", said)
    assert said.getvalue().splitlines() == [
        "demo: 6 replicates asked for, 5 begun (2 completed, 1 diverged, 1 failed, 1 running), "
        "2 without speed",
        "  failed softmax pure adamw lr=0.001 seed 3: ValueError: [red]",
        "  running softmax pure adamw lr=0.001 seed 4: step 4 of 10",
        "ETA 48 s",  # 1.6 trials are left, ended ones took 30 s in the mean, one runs
    ]


def test_status_loads_nothing_that_takes_longer_than_reading_thousands_of_journals(ledger):
    call = f"main(['status', 'demo', '--root', {str(ledger.folder.parent)!r}])"
    code = f"import sys; from orchestrator.cli import main; {call}; print(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    *lines, loaded = said.stdout.splitlines()
    assert lines[0].startswith("demo: 6 replicates asked for, 5 begun")
    assert not {"rich", "psutil", "hydra", "pyarrow", "numpy"} & set(loaded.split())


def test_status_as_json_says_the_same(ledger):
    found = status_json(ledger.folder.parent, "demo")
    assert found["counts"] == {"completed": 2, "diverged": 1, "failed": 1, "running": 1}
    assert found["eta_seconds"] == pytest.approx(48.0)
    assert [row["step"] for row in found["replicates"]] == [None, None, None, None, 4]


@pytest.mark.parametrize("characters", [10, TAIL_BYTES[0] - 60, TAIL_BYTES[0], 20_000])
@pytest.mark.parametrize("torn", ["", '{"event": "st', '"' * 5000])
def test_the_last_whole_event_is_found_however_long_it_is(tmp_path, characters, torn):
    path = tmp_path / "attempt-0001.jsonl"
    long = {"event": "end", "status": "failed", "traceback": "x" * characters}
    path.write_text(json.dumps({"event": "claim"}) + "\n" + json.dumps(long) + "\n" + torn)
    assert last_event(path) == long


def test_a_journal_without_a_whole_event_has_no_last_one(tmp_path):
    path = tmp_path / "attempt-0001.jsonl"
    for data in (b"", b"\n\n", b'{"event": "cl', b"not json\n", b"[1]\n\n", b'{"event": "\xff"}\n'):
        path.write_bytes(data)
        assert last_event(path) is None
