"""Journals: what a process that dies at any moment leaves is read as what it is."""

import json
import math
from dataclasses import replace

import pandas as pd
import pytest

from orchestrator.errors import LedgerError
from orchestrator.journal import Journal, damaged_lines, last_event, read_events
from orchestrator.leases import process_facts
from orchestrator.ledger import Ledger
from orchestrator.records import CURVE_COLUMNS, TRIAL_COLUMNS, TrialRecord


def planned(name="cabc-s0", seed=0):
    return TrialRecord(
        sweep="demo",
        cell_id=name.split("-")[0],
        arm_id="aabc",
        replicate_id=name,
        seed=seed,
        mixer="deltanet",
        stack="pure",
        optimizer="adamw",
        lr=0.001,
        size="nano",
        match="params",
        data_seed=seed,
        seq_len=256,
        batch_tokens=512,
        tokens=1024,
        steps=2,
        config_json="{}",
    )


def write(path, *events):
    journal = Journal(path)
    for event in events:
        journal.append(event)
    journal.close()


def step(number, loss=1.0):
    return {
        "event": "step",
        "step": number,
        "tokens": 512 * number,
        "wall_seconds": 0.1 * number,
        "train_loss_nats": loss,
    }


@pytest.fixture
def ledger(tmp_path):
    ledger = Ledger(tmp_path, "demo")
    ledger.describe(planned())
    return ledger


@pytest.mark.parametrize("cut", range(1, 40, 6))
def test_a_torn_last_line_is_ignored(tmp_path, cut):
    path = tmp_path / "attempt-0001.jsonl"
    write(path, step(1), step(2))
    path.write_bytes(path.read_bytes()[:-cut])
    events, _ = read_events(path)
    assert [event["step"] for event in events] == [1]
    assert last_event(path)["step"] == 1


def test_a_line_after_a_torn_one_is_whole(tmp_path):
    path = tmp_path / "attempt-0001.jsonl"
    write(path, step(1), step(2))
    path.write_bytes(path.read_bytes()[:-5])
    write(path, step(3))
    assert [event["step"] for event in read_events(path)[0]] == [1, 3]


def test_a_corrupt_line_loses_only_itself(tmp_path):
    path = tmp_path / "attempt-0001.jsonl"
    write(path, step(1), step(2), step(3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00\xff garbage\n" + lines[2])
    assert [event["step"] for event in read_events(path)[0]] == [1, 3]


def test_damage_is_told_from_what_a_killed_process_tore(tmp_path):
    path = tmp_path / "attempt-0001.jsonl"
    write(path, step(1), step(2), step(3))
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert damaged_lines(path) == []
    write(path, {"event": "end", "status": "failed"})
    assert damaged_lines(path) == []
    lines = whole.splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"event":"step","st\n' + lines[2])
    assert damaged_lines(path) == [2]


def test_a_step_without_its_number_is_damage(tmp_path):
    path = tmp_path / "attempt-0001.jsonl"
    write(path, step(1), {"event": "step", "stap": 2}, step(3))
    assert [event["step"] for event in read_events(path)[0]] == [1, 3]
    assert damaged_lines(path) == [2]


def test_reading_goes_on_where_it_stopped(tmp_path):
    path = tmp_path / "attempt-0001.jsonl"
    write(path, step(1))
    _, offset = read_events(path)
    write(path, step(2))
    assert [event["step"] for event in read_events(path, offset)[0]] == [2]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_survive_as_json(tmp_path, value):
    path = tmp_path / "attempt-0001.jsonl"
    write(path, step(1, value))
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"bare {name}"))
    found = last_event(path)["train_loss_nats"]
    assert found == value or (math.isnan(found) and math.isnan(value))


def test_a_replicate_without_a_journal_is_pending(ledger):
    assert ledger.state("cabc-s0").status == "pending"


def test_a_living_writer_is_running_and_a_dead_one_is_not(ledger):
    write(ledger.next_attempt("cabc-s0"), {"event": "claim", **process_facts()}, step(1))
    assert ledger.state("cabc-s0").status == "running"
    dead = {**process_facts(), "process_started": "another boot:1"}
    write(ledger.next_attempt("cabc-s0"), {"event": "claim", **dead}, step(1))
    state = ledger.state("cabc-s0")
    assert state.status == "pending"
    assert len(state.attempts) == 2
    assert not state.is_result


@pytest.mark.parametrize(
    ("end", "status", "is_result"),
    [
        ({"status": "completed"}, "completed", True),
        ({"status": "diverged", "failure_class": "diverged"}, "diverged", True),
        ({"status": "failed", "failure_class": "user_bug"}, "failed", False),
    ],
    ids=["completed", "diverged", "failed"],
)
def test_the_last_attempt_decides(ledger, end, status, is_result):
    write(ledger.next_attempt("cabc-s0"), {"event": "end", "status": "failed"})
    write(ledger.next_attempt("cabc-s0"), {"event": "end", **end})
    state = ledger.state("cabc-s0")
    assert (state.status, state.is_result) == (status, is_result)


def test_damage_is_said_with_its_file_and_line(ledger):
    path = ledger.next_attempt("cabc-s0")
    write(path, step(1), step(2), step(3))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    (sentence,) = ledger.damages(ledger.states(["cabc-s0"]))
    assert sentence.startswith(f"{path}: damaged in line 2;")
    curve = ledger.curve("cabc-s0", ledger.state("cabc-s0").attempts)
    assert [point.step for point in curve] == [1, 3]


def test_a_journal_that_was_taken_away_gives_its_number_to_no_other(ledger):
    for _ in range(3):
        write(ledger.next_attempt("cabc-s0"), step(1))
    (ledger.replicate_folder("cabc-s0") / "attempt-0002.jsonl").unlink()
    assert ledger.next_attempt("cabc-s0").name == "attempt-0004.jsonl"


def test_a_speed_that_was_measured_once_is_never_missing(ledger):
    write(ledger.next_attempt("cabc-s0"), {"event": "end", "status": "completed"})
    assert ledger.state("cabc-s0").needs_speed
    speed = {"event": "end", "status": "completed", "tokens_per_second": 5.0, "exclusive": True}
    write(ledger.next_attempt("cabc-s0", "speed"), speed)
    write(ledger.next_attempt("cabc-s0", "speed"), {"event": "end", "status": "failed"})
    state = ledger.state("cabc-s0")
    assert not state.needs_speed
    assert ledger.record(planned(), state).tokens_per_second == 5.0


def test_each_step_stands_once_over_all_attempts(ledger):
    write(ledger.next_attempt("cabc-s0"), *(step(n, 10.0 - n) for n in range(51)))
    write(ledger.next_attempt("cabc-s0"), *(step(n, 10.0 - n) for n in range(41, 100)))
    curve = ledger.curve("cabc-s0", ledger.state("cabc-s0").attempts)
    assert [point.step for point in curve] == list(range(100))
    assert [point.attempt for point in curve] == [1] * 51 + [2] * 49


def test_the_loss_trial_never_fills_the_speed_columns(ledger):
    write(
        ledger.next_attempt("cabc-s0"),
        {"event": "start", "device_name": "cpu", "kernel_impl": "chunked"},
        {"event": "end", "status": "completed", "tokens_per_second": 9.0, "val_loss_nats": 6.0},
    )
    record = ledger.record(planned(), ledger.state("cabc-s0"))
    assert record.tokens_per_second is None
    assert (record.val_loss_nats, record.kernel_impl) == (6.0, "chunked")


def test_parquet_has_every_column_typed_even_when_all_of_it_is_null(ledger):
    write(ledger.next_attempt("cabc-s0"), step(1, math.inf))
    states = ledger.states(["cabc-s0"])
    ledger.compact([ledger.record(planned(), states["cabc-s0"])], states)
    trials = pd.read_parquet(ledger.folder / "trials.parquet")
    curves = pd.read_parquet(ledger.folder / "curves.parquet")
    assert tuple(trials.columns) == TRIAL_COLUMNS
    assert tuple(curves.columns) == CURVE_COLUMNS
    assert str(trials["val_loss_nats"].dtype) == "float64"
    assert curves["train_loss_nats"].tolist() == [math.inf]
    assert not list(ledger.folder.glob(".*partial"))


def test_parquet_is_the_same_bytes_whatever_order_its_replicates_come_in(ledger):
    other = replace(planned(), replicate_id="cabc-s1", seed=1)
    for name in ("cabc-s0", "cabc-s1"):
        write(ledger.next_attempt(name), step(1), {"event": "end", "status": "completed"})
    states = ledger.states(["cabc-s0", "cabc-s1"])
    records = [ledger.record(r, states[r.replicate_id]) for r in (planned(), other)]
    paths = [ledger.folder / "trials.parquet", ledger.folder / "curves.parquet"]
    ledger.compact(records, states)
    before = [path.read_bytes() for path in paths]
    ledger.compact(records[::-1], states)
    assert [path.read_bytes() for path in paths] == before
    assert pd.read_parquet(paths[0])["replicate_id"].tolist() == ["cabc-s0", "cabc-s1"]


def test_a_finished_replicates_description_is_never_rewritten(ledger):
    path = ledger.replicate_folder("cabc-s0") / "config.json"
    before = path.read_bytes(), path.stat().st_mtime_ns
    ledger.describe(planned())
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


def test_an_unreadable_description_is_named(ledger):
    path = ledger.replicate_folder("cabc-s0") / "config.json"
    path.write_text("{")
    with pytest.raises(LedgerError, match=r"config\.json cannot be read"):
        ledger.planned("cabc-s0")


def test_a_sweep_that_is_not_there_is_named_beside_those_that_are(tmp_path):
    with pytest.raises(LedgerError, match=r"no sweep 'wide' under .*, nor any other$"):
        Ledger(tmp_path, "wide").spec()
    for name in ("wide", "narrow"):
        Ledger(tmp_path, name).write_spec({})
    with pytest.raises(LedgerError, match=r"no sweep 'wdie' under .*; there is wide$"):
        Ledger(tmp_path, "wdie").spec()
    with pytest.raises(LedgerError, match=r"; there is wide; a sweep is named without conf=$"):
        Ledger(tmp_path, "conf=wide").spec()
