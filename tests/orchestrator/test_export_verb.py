"""`export` writes the model that a trial kept, or says in one sentence why it cannot."""

import json
from contextlib import closing

import pytest
import torch

from models.lm import LanguageModel
from orchestrator.cli import main
from orchestrator.config import TrialConfig
from orchestrator.journal import Journal
from orchestrator.training.export import export_model, load_exported

VOCAB = 32
DONE = "c0123456789ab-s0"


@pytest.fixture
def root(tmp_path):
    """A root with the ledger of one sweep of five replicates; the completed one kept its model."""
    root = tmp_path / "runs"
    for name, status in (
        (DONE, "completed"),
        ("c0123456789ab-s1", "failed"),
        ("c0123456789ab-s2", "diverged"),
        ("cfedcba987654-s0", "completed"),
        ("cfedcba987654-s1", None),
    ):
        folder = root / "small" / "replicates" / name
        folder.mkdir(parents=True)
        if status is not None:
            with closing(Journal(folder / "attempt-0001.jsonl")) as journal:
                journal.append({"event": "end", "status": status})
    (root / "small" / "spec.json").write_text("{}")
    config = TrialConfig()
    model = LanguageModel(config.model, VOCAB)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, generator=generator)
    data = tmp_path / "data"
    data.mkdir()
    (data / "tokenizer.json").write_text('{"a": 1}')
    export_model(
        root / "small" / "replicates" / DONE / "model",
        model,
        config,
        seed=0,
        data_folder=data,
        data_id="d0",
        results={"val_loss_nats": 2.5},
    )
    return root


@pytest.fixture
def export(root, tmp_path, capsys):
    """Runs the verb into `out`; its exit code and what it said on stderr."""

    def run(replicate=DONE, sweep="small", out="out"):
        code = main(["export", sweep, replicate, str(tmp_path / out), "--root", str(root)])
        return code, capsys.readouterr().err

    return run


def test_the_exported_folder_is_the_kept_model_with_its_card(export, root, tmp_path):
    assert export(out="new/model") == (0, "")
    kept, out = root / "small" / "replicates" / DONE / "model", tmp_path / "new" / "model"
    names = ["README.md", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    for name in ("README.md", "config.json", "tokenizer.json"):
        assert (out / name).read_bytes() == (kept / name).read_bytes()
    before, after = load_exported(kept).model, load_exported(out).model
    for name, weight in before.named_parameters():
        assert torch.equal(weight, after.get_parameter(name))
    assert [path.name for path in out.parent.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("replicate", "parts"),
    [
        ("c0123456789ac-s0", ["no replicate c0123456789ac-s0", f"nearest: {DONE}, "]),
        ("../../small", ["no replicate ../../small"]),
        ("c0123456789ab-s1", ["is failed", "only a completed trial"]),
        ("c0123456789ab-s2", ["has diverged"]),
        ("cfedcba987654-s1", ["is pending", "only a completed trial"]),
        ("cfedcba987654-s0", ["checkpoint.export=true", "/models/cfedcba987654-s0", "`train`"]),
    ],
    ids=["unknown", "outside", "failed", "diverged", "pending", "not kept"],
)
def test_a_replicate_without_a_model_is_one_sentence(export, tmp_path, replicate, parts):
    code, said = export(replicate)
    assert code == 2
    assert said.count("\n") == 1
    for part in parts:
        assert part in said
    assert not (tmp_path / "out").exists()


def test_an_unknown_sweep_is_one_sentence(export):
    code, said = export(sweep="smal")
    assert (code, said.count("\n")) == (2, 1)
    assert "no sweep 'smal'" in said


@pytest.mark.parametrize("kind", ["folder", "file", "link to nowhere"])
def test_a_target_that_is_there_stays_as_it_is(export, tmp_path, kind):
    out = tmp_path / "out"
    if kind == "folder":
        out.mkdir()
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "nowhere")
    before = (out.is_dir(), out.is_file(), out.is_symlink())
    code, said = export()
    assert (code, said) == (2, f"{out} is there already; name a folder that is not\n")
    assert (out.is_dir(), out.is_file(), out.is_symlink()) == before


def test_a_target_that_cannot_be_made_is_one_sentence(export, tmp_path):
    (tmp_path / "file").write_text("")
    code, said = export(out="file/model")
    assert (code, said.count("\n")) == (2, 1)
    assert "cannot be written (Not a directory)" in said


@pytest.mark.parametrize("damage", ["weights", "no weights", "configuration"])
def test_a_damaged_model_is_not_exported(export, root, tmp_path, damage):
    kept = root / "small" / "replicates" / DONE / "model"
    if damage == "weights":
        data = bytearray((kept / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (kept / "model.safetensors").write_bytes(data)
    elif damage == "no weights":
        (kept / "model.safetensors").unlink()
    else:
        (kept / "config.json").write_text(json.dumps({"format": 0}))
    code, said = export()
    assert (code, said.count("\n")) == (2, 1)
    assert f"the model in {kept} cannot be exported" in said
    assert not (tmp_path / "out").exists()


def test_weights_that_cannot_be_written_leave_nothing_behind(export, tmp_path, monkeypatch):
    def fill(*arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("orchestrator.training.export.save_file", fill)
    code, said = export(out="deep/model")
    assert code == 2
    assert "No space left on device" in said
    assert list((tmp_path / "deep").iterdir()) == []
