"""`bench` measures what it is asked for, keeps it, and refuses what cannot be measured."""

import csv
import json
import shutil
from pathlib import Path

import pytest

from orchestrator.cli import main

TINY = ["conf=quickstart", "model.mixer=softmax", "optimizer=adamw", "seeds=[0]"]
FEW_STEPS = ["lanes.speed.steps=2", "lanes.speed.warmup_steps=1", "batch.tokens=256"]


def test_training_steps_of_every_cell_are_timed_and_kept(
    tmp_path: Path, empty_store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(empty_store, tmp_path)
    text = tmp_path / "text.jsonl"
    text.write_text("\n".join(json.dumps({"text": f"line {n} " * 40}) for n in range(200)))
    data = ["data=files", f"data.sources=[{text}]", "data.vocab_size=260", "eval.windows=1"]
    cell = [*TINY, "--root", str(tmp_path), *data]
    assert main(["data", "prepare", *cell]) == 0
    assert main(["bench", "train", *cell, *FEW_STEPS]) == 0
    (path,) = (tmp_path / "bench").glob("train-*.csv")
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["optimizer.lr"]) for row in rows] == [3e-3, 5e-3]
    for row in rows:
        seconds = float(row["step_seconds_median"])
        assert float(row["tokens_per_second"]) == pytest.approx(256 / seconds)
    assert list((tmp_path / "artifacts" / "bench").rglob(path.name))
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert str(path) in printed.replace("\n", "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["kernels", "conf=quickstart"], "bench kernels takes no conf"),
        (["train"], "bench train takes conf=NAME"),
        (["kernels", "--op", "delta"], "'delta' is none of"),
        (["kernels", "--tune", "--op", "delta"], "'delta' is none of"),
        (["kernels", "--shape", "8x4096"], "'8x4096' is not of the form BxTxHxHVxKxV"),
        (["decode", "--op", "delta"], "'delta' is none of"),
        (["context", *TINY, "--length", "300"], "length 300: batch.tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments, "--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert sentence in error
    assert error.count("\n") == 1
    assert not (tmp_path / "bench").exists()


def test_overrides_may_follow_an_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "conf=quickstart", "--root", str(tmp_path), "seeds=[7]"]) == 0
    assert "20 cells × 1 seeds" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "conf=quickstart", "--rot", str(tmp_path)])
