"""Recall tasks: the drawn examples, their rules on many draws, scores of knowing models."""

import inspect
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.configs import DeltaNetConfig, HeadLayout, ModelConfig
from models.lm import build_model
from orchestrator.training.optim.build import build_optimizer
from orchestrator.training.optim.configs import AdamWConfig
from orchestrator.training.probes import (
    FILLER,
    NO_ANSWER,
    RecallTask,
    associative_recall,
    needle,
    recall_loss,
    score_needles,
    score_recall,
    two_hop,
)
from orchestrator.training.runtime import Runtime
from orchestrator.training.session import named_generator


class LooksUp:
    """Answers with the token after the newest earlier occurrence, followed `hops` times."""

    def __init__(self, vocab_size: int, hops: int = 1, window: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.hops = hops
        self.window = window

    def __call__(self, tokens: Tensor) -> Tensor:
        answers = torch.zeros_like(tokens)
        for row, own in zip(tokens.tolist(), answers, strict=True):
            for position, token in enumerate(row):
                first = 0 if self.window is None else max(0, position - self.window)
                own[position] = self.found(row[first:position], token)
        return F.one_hot(answers, self.vocab_size).float() * 20

    def found(self, past: list[int], token: int) -> int:
        for _ in range(self.hops):
            places = [i for i, other in enumerate(past[:-1]) if other == token]
            if not places:
                return FILLER
            token = past[places[-1] + 1]
        return token


@pytest.mark.parametrize("task", [associative_recall, needle, two_hop], ids=lambda t: t.__name__)
def test_the_drawn_example_is_what_the_call_returns(task):
    text = " ".join(inspect.getdoc(task).split("\n"))
    call = re.search(r"`(\w+\(np.*?\))`", text)[1]
    drawn = {
        name: [NO_ANSWER if cell == "." else int(cell) for cell in cells.split()]
        for name, cells in re.findall(r"^ +(input|target) +(.*)$", inspect.getdoc(task), re.M)
    }
    made = eval(call, {"np": np, task.__name__: task})
    assert made.inputs.tolist() == [drawn["input"]]
    assert made.targets.tolist() == [drawn["target"]]


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_pairs=st.integers(1, 6),
    spare=st.integers(0, 20),
    gap_power=st.floats(0.01, 1.0),
)
def test_every_key_is_asked_once_after_all_pairs(seed, num_pairs, spare, gap_power):
    task = associative_recall(
        np.random.default_rng(seed),
        num_sequences=3,
        num_pairs=num_pairs,
        seq_len=3 * num_pairs + spare,
        vocab_size=2 * num_pairs + 2,
        gap_power=gap_power,
    )
    for inputs, targets in zip(task.inputs, task.targets, strict=True):
        pairs = dict(inputs[: 2 * num_pairs].reshape(-1, 2).tolist())
        asked = np.flatnonzero(targets != NO_ANSWER)
        assert len(pairs) == len(asked) == num_pairs
        assert asked.min() >= 2 * num_pairs
        assert {int(inputs[i]): int(targets[i]) for i in asked} == pairs
        rest = np.setdiff1d(np.arange(2 * num_pairs, len(inputs)), asked)
        assert (inputs[rest] == FILLER).all()
        assert not set(pairs) & set(pairs.values())


def test_most_questions_come_soon_and_uniform_ones_do_not():
    def median_gap(gap_power: float) -> float:
        task = associative_recall(
            np.random.default_rng(0),
            num_sequences=300,
            num_pairs=1,
            seq_len=202,
            vocab_size=8,
            gap_power=gap_power,
        )
        return float(np.median(np.nonzero(task.targets != NO_ANSWER)[1] - 1))

    assert median_gap(0.01) < 25
    assert 80 < median_gap(1.0) < 120


@pytest.mark.parametrize(("depth", "position"), [(0.0, 0), (0.5, 30), (1.0, 60)])
def test_the_needle_lies_at_its_depth_and_nowhere_else(depth, position):
    task = needle(
        np.random.default_rng(0), num_sequences=50, seq_len=63, depth=depth, vocab_size=31
    )
    assert (task.inputs[:, position] == task.inputs[:, -1]).all()
    assert (task.inputs[:, position + 1] == task.targets[:, -1]).all()
    assert ((task.inputs == task.inputs[:, -1:]).sum(axis=1) == 2).all()
    assert (task.targets[:, :-1] == NO_ANSWER).all()


def test_a_chain_is_answered_by_two_look_ups_and_not_by_one():
    task = two_hop(np.random.default_rng(1), num_sequences=50, num_chains=4, vocab_size=31)

    def accuracy(hops: int) -> float:
        return score_recall(_TwoSided(31, hops), task, runtime=Runtime()).accuracy

    assert accuracy(2) == 1.0
    assert accuracy(1) == 0.0


class _TwoSided(LooksUp):
    """Looks a token up among the pairs, where it may stand second in one and first in another."""

    def found(self, past: list[int], token: int) -> int:
        pairs = dict(zip(past[::2], past[1::2], strict=False))
        for _ in range(self.hops):
            token = pairs.get(token, FILLER)
        return token


def test_a_model_that_looks_up_scores_all_and_a_forgetful_one_only_what_is_near():
    task = associative_recall(
        np.random.default_rng(2), num_sequences=70, num_pairs=4, seq_len=40, vocab_size=40
    )
    perfect = score_recall(LooksUp(40), task, runtime=Runtime(), tokens_per_batch=32 * 40)
    assert perfect.accuracy == 1.0
    assert perfect.questions == 280
    assert perfect.loss_nats < 1e-6
    forgetful = score_recall(LooksUp(40, window=8), task, runtime=Runtime())
    assert 0.05 < forgetful.accuracy < 0.95
    assert forgetful.loss_nats > 1


def test_a_needle_table_shows_how_far_back_a_model_sees():
    cells = score_needles(
        LooksUp(40, window=20),
        np.random.default_rng(0),
        seq_lens=[16, 64],
        depths=[0.0, 0.5, 1.0],
        vocab_size=40,
        num_sequences=10,
        runtime=Runtime(),
    )
    assert [(c.seq_len, c.depth, c.score.accuracy) for c in cells] == [
        (16, 0.0, 1.0),
        (16, 0.5, 1.0),
        (16, 1.0, 1.0),
        (64, 0.0, 0.0),
        (64, 0.5, 0.0),
        (64, 1.0, 1.0),
    ]


def test_the_loss_counts_questions_only():
    task = RecallTask(np.array([[1, 2, 1]]), np.array([[NO_ANSWER, NO_ANSWER, 2]]))
    logits = torch.zeros(1, 3, 4)
    logits[0, 2, 2] = 1.0
    expected = -torch.log_softmax(logits[0, 2], 0)[2].item()
    loss = recall_loss(
        lambda tokens: logits, torch.from_numpy(task.inputs), torch.from_numpy(task.targets)
    )
    assert loss.item() == pytest.approx(expected)
    scored = score_recall(lambda tokens: logits, task, runtime=Runtime())
    assert scored.loss_nats == pytest.approx(expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda g: associative_recall(
                g, num_sequences=1, num_pairs=4, seq_len=11, vocab_size=20
            ),
            "seq_len=11 must hold num_pairs=4",
        ),
        (
            lambda g: associative_recall(g, num_sequences=1, num_pairs=4, seq_len=12, vocab_size=8),
            "vocab_size=8 must be at least 9",
        ),
        (
            lambda g: needle(g, num_sequences=1, seq_len=2, depth=0.5, vocab_size=9),
            "seq_len=2 must hold",
        ),
        (
            lambda g: needle(g, num_sequences=1, seq_len=9, depth=1.5, vocab_size=9),
            r"depth=1.5 must lie in \[0, 1\]",
        ),
        (
            lambda g: needle(g, num_sequences=0, seq_len=9, depth=0.5, vocab_size=9),
            "num_sequences=0 must be at least 1",
        ),
        (
            lambda g: two_hop(g, num_sequences=1, num_chains=3, vocab_size=9),
            "vocab_size=9 must be at least 10",
        ),
        (
            lambda g: two_hop(g, num_sequences=1, num_chains=0, vocab_size=9),
            "num_chains=0 must be at least 1",
        ),
    ],
)
def test_tasks_that_cannot_be_drawn_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(np.random.default_rng(0))


def accuracy_after(
    config: ModelConfig, num_pairs: int, vocab_size: int, *, steps: int, rows: int, lr: float
) -> float:
    """Of associative recall, three tokens a pair, after training on it; each step draws anew."""
    model = build_model(config, vocab_size, named_generator(0, "init"))
    optimizer = build_optimizer(AdamWConfig(lr=lr, weight_decay=0.0), model)
    generator = np.random.default_rng(0)

    def draw(num_sequences: int) -> RecallTask:
        return associative_recall(
            generator,
            num_sequences=num_sequences,
            num_pairs=num_pairs,
            seq_len=3 * num_pairs,
            vocab_size=vocab_size,
            gap_power=1.0,
        )

    for step in range(1, steps + 1):
        warmup = min(1.0, step / 50)
        optimizer.set_lr_ratio(warmup, warmup_ratio=warmup)
        task = draw(rows)
        optimizer.zero_grad()
        recall_loss(model, *map(torch.from_numpy, (task.inputs, task.targets))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return score_recall(model, draw(64), runtime=Runtime()).accuracy


@pytest.mark.slow
def test_a_small_delta_rule_learns_to_recall():
    """From chance, 1 in 16, to nearly all of four pairs."""
    heads = HeadLayout(key_heads=2, value_heads=2, key_dim=16, value_dim=16)
    config = ModelConfig(mixer=DeltaNetConfig(), num_layers=2, d_model=32, ffn_dim=64, heads=heads)
    trained = {"num_pairs": 4, "vocab_size": 33, "rows": 32, "lr": 5e-3}
    assert accuracy_after(config, steps=0, **trained) < 0.15
    assert accuracy_after(config, steps=400, **trained) > 0.9
