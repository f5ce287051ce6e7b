"""Continuations are scored as each alone, whatever stands beside them, and cut at the front."""

import pytest
import torch

from models.configs import DeltaNetConfig, HeadLayout, ModelConfig
from models.lm import build_model
from orchestrator.training.continuations import score_continuations
from orchestrator.training.runtime import Runtime

VOCAB = 23
HEADS = HeadLayout(softmax_head_dim=8, key_dim=8, value_dim=8)
CONFIG = ModelConfig(mixer=DeltaNetConfig(), num_layers=2, d_model=16, ffn_dim=32, heads=HEADS)
PAIRS = [([3, 5], [7]), ([1], [2, 4, 6, 8]), ([9, 8, 7, 6, 5], [4, 3]), ([11, 12], [13, 14, 15])]


@pytest.fixture(scope="module")
def model():
    return build_model(CONFIG, VOCAB, torch.Generator().manual_seed(0))


def by_hand(model, context, continuation):
    logs = model(torch.tensor([[*context, *continuation]])).log_softmax(-1)[0]
    start = len(context) - 1
    return sum(logs[start + i, token].item() for i, token in enumerate(continuation))


@pytest.mark.parametrize("pairs_per_batch", [1, 3, 8])
def test_scores_are_the_sums_by_hand_in_the_order_of_the_pairs(model, pairs_per_batch):
    scores = score_continuations(
        model, PAIRS, max_length=16, runtime=Runtime(), pairs_per_batch=pairs_per_batch
    )
    expected = [by_hand(model, *pair) for pair in PAIRS]
    assert [score.log_probability for score in scores] == pytest.approx(expected, rel=1e-5)


def test_a_continuation_is_greedy_where_each_token_is_the_most_likely(model):
    context = [3, 5]
    best = model(torch.tensor([context]))[0, -1].argmax().item()
    second = model(torch.tensor([[*context, best]]))[0, -1].argmax().item()
    worst = model(torch.tensor([context]))[0, -1].argmin().item()
    pairs = [(context, [best, second]), (context, [best]), (context, [worst])]
    scores = score_continuations(model, pairs, max_length=8, runtime=Runtime())
    assert [score.is_greedy for score in scores] == [True, True, False]


def test_a_pair_that_is_too_long_loses_its_first_tokens(model):
    pairs = [([1, 2, 9, 8, 7], [6, 5])]
    (cut,) = score_continuations(model, pairs, max_length=3, runtime=Runtime())
    assert cut.log_probability == pytest.approx(by_hand(model, [8, 7], [6, 5]), rel=1e-5)
    assert cut.log_probability != pytest.approx(by_hand(model, [9, 8, 7], [6, 5]), rel=1e-3)


@pytest.mark.parametrize("pair", [([], [1]), ([1], []), ([1], [2] * 9)])
def test_pairs_that_cannot_be_scored_are_refused(model, pair):
    with pytest.raises(ValueError, match="each needs one token, and the continuation at most 8"):
        score_continuations(model, [pair], max_length=8, runtime=Runtime())
