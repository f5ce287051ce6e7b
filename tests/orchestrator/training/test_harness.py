"""The lm-evaluation-harness runs a local task on an exported model; needs the extra `eval`."""

import importlib
import json
from types import SimpleNamespace

import pytest

from orchestrator.config import CheckpointConfig
from orchestrator.data import DataConfig
from orchestrator.training.export import load_exported
from orchestrator.training.journal import NullJournal
from orchestrator.training.runtime import Runtime
from orchestrator.trial import run_trial

pytest.importorskip("lm_eval", reason="needs the extra `eval`")
harness = importlib.import_module("orchestrator.training.harness")

# Of the harness and what it imports.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def folder(tiny_trial, data_folder, tmp_path):
    """A model that has learnt which word follows which in the training text."""
    config = tiny_trial(
        mixer="deltanet",
        steps=150,
        data=DataConfig(name="chains", vocab_size=300),
        checkpoint=CheckpointConfig(every_steps=None, export=True),
    )
    run_trial(
        config,
        seed=0,
        data_folder=data_folder,
        runtime=Runtime(),
        journal=NullJournal(),
        export_folder=tmp_path / "model",
    )
    return tmp_path / "model"


def words_in_order(data_folder) -> list[str]:
    return (data_folder.parents[1] / "00.txt").read_text(encoding="utf-8").split()


def task(tmp_path, documents: list[dict[str, object]]) -> dict[str, object]:
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return {
        "task": "next_word",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": " ",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }


def test_a_local_task_is_scored_by_the_harness(folder, data_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    words = words_in_order(data_folder)
    documents = []
    for i in range(20):
        choices = [words[i + 4], words[i + 9]]
        answer = i % 2
        choices = choices[::-1] if answer else choices
        context = " ".join(words[i : i + 4])
        documents.append({"context": context, "choices": choices, "answer": answer})
    exported = load_exported(folder)
    scores = harness.score_tasks(exported, [task(tmp_path, documents)], runtime=Runtime())
    found = scores["next_word"]["acc,none"]
    model = harness.HarnessModel(exported, Runtime())
    right = 0
    for document in documents:
        pairs = [model._encode_pair(document["context"], f" {c}") for c in document["choices"]]
        logs = [score for score, _ in model._loglikelihood_tokens([(None, *p) for p in pairs])]
        right += logs.index(max(logs)) == document["answer"]
    assert found == right / len(documents)
    assert found > 0.8


def test_a_rolling_likelihood_is_the_sum_over_all_tokens(folder, data_folder):
    model = harness.HarnessModel(load_exported(folder), Runtime())
    text = " ".join(words_in_order(data_folder)[:12])
    tokens = model.tok_encode(text)
    room = model._max_length
    assert room < len(tokens) <= 2 * room
    # The first window starts after the document's token; the last is full and scores its end only.
    rest = len(tokens) - room
    pairs = [([model.eot_token_id], tokens[:room]), (tokens[-room - 1 : -rest], tokens[-rest:])]
    expected = sum(score for score, _ in model._loglikelihood_tokens([(None, *p) for p in pairs]))
    (total,) = model.loglikelihood_rolling([SimpleNamespace(args=(text,))])
    assert total == pytest.approx(expected, rel=1e-5)


def test_tasks_that_generate_are_refused(folder):
    model = harness.HarnessModel(load_exported(folder), Runtime())
    with pytest.raises(NotImplementedError, match="tasks that score continuations"):
        model.generate_until([])


def test_a_folder_without_a_model_exits_with_2(tmp_path, capsys):
    assert harness.main([str(tmp_path), "--tasks", "hellaswag"]) == 2
    assert "is no exported model" in capsys.readouterr().err
