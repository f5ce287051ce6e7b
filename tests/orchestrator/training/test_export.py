"""An exported model comes back as it was, with its card, and into nothing but itself."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file

from orchestrator.config import CheckpointConfig, TrialConfig
from orchestrator.training.checkpoint import CheckpointMismatchError
from orchestrator.training.export import load_exported
from orchestrator.training.journal import ListJournal, NullJournal
from orchestrator.training.runtime import Runtime
from orchestrator.training.session import open_session
from orchestrator.trial import run_trial


def exporting(tiny_trial) -> TrialConfig:
    return tiny_trial(
        mixer="gated_deltanet",
        stack="hybrid",
        steps=4,
        checkpoint=CheckpointConfig(every_steps=3, export=True),
    )


@pytest.fixture
def trained(tiny_trial, data_folder, tmp_path):
    """A finished trial with an exported model: its configuration, folder and last event."""
    journal = ListJournal()
    config = exporting(tiny_trial)
    run_trial(
        config,
        seed=3,
        data_folder=data_folder,
        runtime=Runtime(),
        journal=journal,
        checkpoint_folder=tmp_path / "checkpoints",
    )
    return config, tmp_path / "model", journal.events[-1]


def test_an_exported_model_scores_what_its_trial_scored(trained, data_folder):
    config, folder, end = trained
    exported = load_exported(folder)
    assert exported.config == config
    assert (exported.seed, exported.results["val_loss_nats"]) == (3, end["val_loss_nats"])
    session = open_session(config, seed=0, data_folder=data_folder, runtime=Runtime())
    assert exported.data_id == session.dataset.data_id
    scored = dataclasses.replace(session, model=exported.model).evaluate()
    assert scored.loss_nats == end["val_loss_nats"]
    assert exported.tokenizer is not None
    assert exported.tokenizer.read_bytes() == (data_folder / "tokenizer.json").read_bytes()


def test_the_folder_holds_weights_configuration_and_card(trained):
    _, folder, end = trained
    assert sorted(path.name for path in folder.iterdir()) == [
        "README.md", "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    weights = load_file(folder / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    card = (folder / "README.md").read_text()
    total = sum(tensor.numel() for tensor in weights.values())
    assert f"# gated_deltanet, hybrid, {total:,} parameters" in card
    assert f"| validation loss, nats per token | {end['val_loss_nats']:.4f} |" in card
    assert json.loads((folder / "config.json").read_text())["weights_sha256"] in card
    assert "; windows across document ends" in card
    assert not (folder.parent / ".model.partial").exists()
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1


def test_another_architecture_or_data_is_refused_with_the_difference(trained):
    config, folder, _ = trained
    wider = dataclasses.replace(config.model, ffn_dim=48)
    with pytest.raises(CheckpointMismatchError, match=r"model.ffn_dim is 32 there and 48 here"):
        load_exported(folder, expected=wider)
    data_id = load_exported(folder, expected=config.model).data_id
    with pytest.raises(CheckpointMismatchError, match=f"data_id is '{data_id}' there and 'other'"):
        load_exported(folder, data_id="other")
    recomputing = dataclasses.replace(config.model, recompute=True, impl="reference")
    assert load_exported(folder, expected=recomputing).model.config == recomputing


def test_damaged_weights_and_foreign_folders_are_refused(trained, tmp_path):
    _, folder, _ = trained
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x7f")
    with pytest.raises(ValueError, match=r"model.safetensors is damaged"):
        load_exported(folder)
    with pytest.raises(ValueError, match="is no exported model"):
        load_exported(tmp_path)
    (tmp_path / "config.json").write_text('{"format": 99}')
    with pytest.raises(ValueError, match="has format 99, this version reads 1"):
        load_exported(tmp_path)


def test_a_model_without_a_folder_to_go_to_is_refused_at_the_start(tiny_trial, data_folder):
    with pytest.raises(ValueError, match=r"checkpoint.export=true needs export_folder"):
        run_trial(
            exporting(tiny_trial),
            seed=0,
            data_folder=data_folder,
            runtime=Runtime(),
            journal=NullJournal(),
        )


def test_a_trial_that_was_not_asked_exports_nothing(tiny_trial, data_folder, tmp_path):
    run_trial(
        tiny_trial(steps=2),
        seed=0,
        data_folder=data_folder,
        runtime=Runtime(),
        journal=NullJournal(),
        checkpoint_folder=tmp_path / "checkpoints",
    )
    assert not (tmp_path / "model").exists()
