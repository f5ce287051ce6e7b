"""Checkpoints on disk: whole or not at all, checked on reading, refused for another trial."""

import json
from pathlib import Path

import pytest
import torch

from orchestrator.training.checkpoint import (
    STATE_FILE,
    TENSORS_FILE,
    CheckpointMismatchError,
    differing_keys,
    load_newest,
    save_checkpoint,
)

IDENTITY = {"config": {"optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]}}, "seed": 0, "data_id": "ab"}


def tensors(value: float) -> dict[str, torch.Tensor]:
    return {
        "model/w": torch.full((3, 2), value),
        "optimizer/updates/w": torch.tensor(value),
        "model/low": torch.tensor([value], dtype=torch.bfloat16),
    }


def save(folder: Path, step: int, identity=IDENTITY) -> Path:
    return save_checkpoint(
        folder, step=step, tensors=tensors(step), facts={"loss": 1 / 3}, identity=identity
    )


def test_what_was_saved_comes_back_bit_for_bit(tmp_path):
    save(tmp_path, 40)
    checkpoint = load_newest(tmp_path, IDENTITY)
    assert checkpoint.step == 40
    assert checkpoint.facts == {"loss": 1 / 3}
    assert checkpoint.notes == ()
    for name, tensor in tensors(40).items():
        assert checkpoint.tensors[name].dtype == tensor.dtype
        assert torch.equal(checkpoint.tensors[name], tensor)
    assert set(checkpoint.part("model")) == {"w", "low"}
    assert set(checkpoint.part("optimizer")) == {"updates/w"}


def test_a_view_of_a_larger_tensor_is_saved_alone(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    parts = {"model/a": whole[:, 1], "model/b": whole[1]}
    save_checkpoint(tmp_path, step=1, tensors=parts, facts={}, identity=IDENTITY)
    loaded = load_newest(tmp_path, IDENTITY).tensors
    assert torch.equal(loaded["model/a"], whole[:, 1])
    assert torch.equal(loaded["model/b"], whole[1])


@pytest.mark.parametrize("folder", ["missing", "."])
def test_without_a_checkpoint_there_is_none(tmp_path, folder):
    assert load_newest(tmp_path / folder, IDENTITY) is None


def test_the_newest_is_used_and_the_last_two_are_kept(tmp_path):
    for step in (10, 20, 30, 40):
        save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000030", "step-00000040"]
    assert load_newest(tmp_path, IDENTITY).step == 40


def truncate(path: Path) -> None:
    data = (path / TENSORS_FILE).read_bytes()
    (path / TENSORS_FILE).write_bytes(data[: len(data) // 2])


def flip_a_bit(path: Path) -> None:
    data = bytearray((path / TENSORS_FILE).read_bytes())
    data[-1] ^= 1
    (path / TENSORS_FILE).write_bytes(data)


def remove_tensors(path: Path) -> None:
    (path / TENSORS_FILE).unlink()


def tear_state(path: Path) -> None:
    text = (path / STATE_FILE).read_text()
    (path / STATE_FILE).write_text(text[: len(text) // 2])


def lose_a_key(path: Path) -> None:
    state = json.loads((path / STATE_FILE).read_text())
    del state["tensors_sha256"]
    (path / STATE_FILE).write_text(json.dumps(state))


def claim_another_step(path: Path) -> None:
    state = json.loads((path / STATE_FILE).read_text())
    (path / STATE_FILE).write_text(json.dumps(state | {"step": 7}))


def claim_another_format(path: Path) -> None:
    state = json.loads((path / STATE_FILE).read_text())
    (path / STATE_FILE).write_text(json.dumps(state | {"format": 99}))


DAMAGES = [
    truncate,
    flip_a_bit,
    remove_tensors,
    tear_state,
    lose_a_key,
    claim_another_step,
    claim_another_format,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_skipped_with_a_note(tmp_path, damage):
    save(tmp_path, 10)
    damage(save(tmp_path, 20))
    checkpoint = load_newest(tmp_path, IDENTITY)
    assert checkpoint.step == 10
    assert len(checkpoint.notes) == 1
    assert checkpoint.notes[0].startswith("skipped step-00000020: ")


def test_with_every_checkpoint_damaged_there_is_none(tmp_path):
    for step in (10, 20):
        truncate(save(tmp_path, step))
    assert load_newest(tmp_path, IDENTITY) is None


def test_a_damaged_checkpoint_is_replaced_when_its_step_comes_again(tmp_path):
    truncate(save(tmp_path, 20))
    save(tmp_path, 20)
    assert load_newest(tmp_path, IDENTITY).step == 20


def test_an_interrupted_write_is_neither_read_nor_kept(tmp_path):
    save(tmp_path, 10)
    partial = tmp_path / ".step-00000020.partial"
    partial.mkdir()
    (partial / TENSORS_FILE).write_bytes(b"half")
    assert load_newest(tmp_path, IDENTITY).step == 10
    save(tmp_path, 20)
    assert not partial.exists()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            IDENTITY | {"config": {"optimizer": {"lr": 3e-3, "betas": [0.9, 0.95]}}},
            r"config.optimizer.lr is 0.001 there and 0.003 here",
        ),
        (IDENTITY | {"data_id": "cd"}, "data_id is 'ab' there and 'cd' here"),
        (IDENTITY | {"seed": 1}, "seed is 0 there and 1 here"),
        (IDENTITY | {"extra": True}, "extra is None there and True here"),
    ],
)
def test_another_trial_is_refused_by_the_keys_that_differ(tmp_path, other, message):
    save(tmp_path, 10)
    with pytest.raises(CheckpointMismatchError, match=message):
        load_newest(tmp_path, other)


@pytest.mark.parametrize("group", ["log", "checkpoint", "data"])
def test_keys_that_change_no_number_may_change(tmp_path, group):
    save(tmp_path, 10, IDENTITY | {"config": {group: {"every_steps": 10}}})
    assert load_newest(tmp_path, IDENTITY | {"config": {group: {"every_steps": 5}}}).step == 10


def test_differing_keys_are_dotted_paths():
    ours = {"a": {"b": 1, "c": 2}, "d": 3}
    theirs = {"a": {"b": 1, "c": 4}, "e": None}
    assert differing_keys(ours, theirs) == ["a.c", "d", "e"]
