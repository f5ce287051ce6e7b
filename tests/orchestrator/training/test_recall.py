"""Recall probes at the end of a trial: the same for every cell, scored, recorded, refused."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.configs import RoutingConfig
from orchestrator.config import EvalConfig, trial_from_dict, trial_to_dict
from orchestrator.records import TRIAL_COLUMNS
from orchestrator.training.journal import ListJournal
from orchestrator.training.recall import accuracies, ask_recall
from orchestrator.training.recall_config import RecallConfig
from orchestrator.training.runtime import Runtime
from orchestrator.trial import run_trial

SMALL = RecallConfig(num_sequences=3, pairs=[2, 5], lengths=[9], depths=[0.0, 1.0], chains=[2])


class Recites:
    """Answers with what followed the token when it last stood in the sequence."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.seen: list[list[list[int]]] = []

    def __call__(self, tokens: Tensor) -> Tensor:
        self.seen.append(tokens.tolist())
        answers = torch.zeros_like(tokens)
        for row, own in zip(tokens.tolist(), answers, strict=True):
            for position, token in enumerate(row):
                places = [i for i in range(position) if row[i] == token]
                own[position] = row[places[-1] + 1] if places else 0
        return 9.0 * F.one_hot(answers, self.vocab_size)


def test_each_task_is_asked_and_scored_beside_its_chance():
    results = ask_recall(Recites(41), SMALL, 41, Runtime())
    asked = [(r.kind, r.size, r.depth, r.questions) for r in results]
    assert asked == [
        ("recall", 2, None, 6),
        ("recall", 5, None, 15),
        ("needle", 9, 0.0, 3),
        ("needle", 9, 1.0, 3),
        ("two_hop", 2, None, 3),
    ]
    assert [r.chance for r in results] == [1 / 20, 1 / 20, 1 / 13, 1 / 13, 1 / 13]
    found = accuracies(results)
    assert found["recall_accuracy"] == found["needle_accuracy"] == 1.0
    # One look-up finds the middle of a chain, which is no answer.
    assert found["two_hop_accuracy"] == 0.0
    assert set(found) <= set(TRIAL_COLUMNS)


def test_every_model_is_asked_the_same():
    first, second = Recites(41), Recites(41)
    np.random.default_rng(5).random(3)
    ask_recall(first, SMALL, 41, Runtime())
    ask_recall(second, SMALL, 41, Runtime())
    assert first.seen == second.seen


def test_nothing_is_asked_unless_told():
    assert ask_recall(Recites(5), RecallConfig(), 5, Runtime()) == []
    assert set(accuracies([]).values()) == {None}


def run_with_recall(tiny_trial, data_folder, **model):
    config = tiny_trial(mixer="deltanet", steps=2, eval=EvalConfig(windows=4, recall=SMALL))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, **model))
    config = trial_from_dict(json.loads(json.dumps(trial_to_dict(config))))
    journal = ListJournal()
    outcome = run_trial(config, seed=0, data_folder=data_folder, runtime=Runtime(), journal=journal)
    return outcome, journal


def test_a_trial_ends_with_its_recall(tiny_trial, data_folder):
    outcome, journal = run_with_recall(tiny_trial, data_folder)
    end = journal.events[-1]
    json.dumps(end, allow_nan=False)
    assert [row["kind"] for row in end["recall"]] == ["recall"] * 2 + ["needle"] * 2 + ["two_hop"]
    mean = sum(row["accuracy"] for row in end["recall"][:2]) / 2
    assert outcome.recall_accuracy == end["recall_accuracy"] == mean
    again, _ = run_with_recall(tiny_trial, data_folder)
    assert again.recall == outcome.recall


def test_a_routed_trial_tells_how_much_it_routes(tiny_trial, data_folder):
    _, journal = run_with_recall(tiny_trial, data_folder, routing=RoutingConfig(kind="clvr"))
    first, last = journal.of("step")
    assert first["routing_norms"] == []
    assert [norms["layer"] for norms in last["routing_norms"]] == [0, 1]
    assert all(norms["projection"] > 0 for norms in last["routing_norms"])
    _, plain = run_with_recall(tiny_trial, data_folder)
    assert plain.of("step")[-1]["routing_norms"] == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_sequences": -1}, "eval.recall.num_sequences=-1 must be at least 0"),
        ({"pairs": [3, 0]}, "eval.recall.pairs=[3, 0] must each be at least 1"),
        ({"lengths": [2]}, "eval.recall.lengths=[2] must each be at least 3"),
        ({"chains": [0]}, "eval.recall.chains=[0] must each be at least 1"),
        ({"depths": [1.5]}, "eval.recall.depths=[1.5] must each lie in [0, 1]"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        RecallConfig(**fields)


def test_more_pairs_than_tokens_are_refused_before_anything_starts(tiny_trial):
    recall = RecallConfig(num_sequences=1, pairs=[4, 20_000], chains=[1])
    with pytest.raises(ValueError, match=r"eval.recall.pairs=\[4, 20000\] needs 40001 different"):
        tiny_trial(eval=EvalConfig(recall=recall))
