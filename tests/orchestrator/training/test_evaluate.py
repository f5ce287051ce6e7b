"""Evaluation against sums by hand, and its independence of batching."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from orchestrator.data import evaluation_set, open_dataset
from orchestrator.training.evaluate import evaluate
from orchestrator.training.runtime import Runtime


class HashedLosses:
    """A model whose loss at a target is a fixed number in [0, 8) made from target and input."""

    def token_losses(self, inputs: Tensor, targets: Tensor, documents=None) -> Tensor:
        return ((inputs * 31 + targets * 17) % 64).float() / 8


class ConstantLosses:
    """A model that finds every target equally likely."""

    def __init__(self, loss: float) -> None:
        self.loss = loss

    def token_losses(self, inputs: Tensor, targets: Tensor, documents=None) -> Tensor:
        return torch.full(targets.shape, self.loss)


def score(model, folder, *, windows=8, windows_per_batch=4):
    dataset = open_dataset(folder)
    return evaluate(
        model,
        dataset,
        evaluation_set(dataset, 16, windows),
        windows_per_batch=windows_per_batch,
        runtime=Runtime(),
    )


def test_loss_error_and_bits_equal_sums_by_hand(data_folder):
    dataset = open_dataset(data_folder)
    windows = evaluation_set(dataset, 16, 8)
    inputs, targets, *_ = dataset.val.batch(windows.window_ids, 16)
    losses = ((inputs * 31 + targets * 17) % 64) / 8
    means = losses.mean(axis=1)
    result = score(HashedLosses(), data_folder)
    assert result.tokens == 8 * 16
    assert result.loss_nats == pytest.approx(losses.mean(), rel=1e-12)
    assert result.standard_error == pytest.approx(np.std(means, ddof=1) / 8**0.5, rel=1e-12)
    num_bytes = dataset.token_bytes[targets].sum()
    assert result.bits_per_byte == pytest.approx(losses.sum() / math.log(2) / num_bytes, rel=1e-12)


@pytest.mark.parametrize("windows_per_batch", [1, 3, 8, 100])
def test_batching_does_not_change_the_score(data_folder, windows_per_batch):
    scored = score(HashedLosses(), data_folder, windows_per_batch=windows_per_batch)
    assert scored == score(HashedLosses(), data_folder, windows_per_batch=8)


def test_a_uniform_model_scores_the_logarithm_of_the_vocabulary(data_folder):
    result = score(ConstantLosses(math.log(300)), data_folder)
    assert result.loss_nats == pytest.approx(math.log(300))
    assert result.standard_error == pytest.approx(0.0, abs=1e-12)


def test_a_single_window_has_no_standard_error(data_folder):
    assert score(ConstantLosses(1.0), data_folder, windows=1).standard_error is None


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_told(data_folder, loss):
    assert not score(ConstantLosses(loss), data_folder).is_finite
    assert score(ConstantLosses(1.0), data_folder).is_finite


def test_no_gradient_is_recorded(data_folder):
    parameter = torch.ones(1, requires_grad=True)

    class Scaled:
        def token_losses(self, inputs: Tensor, targets: Tensor, documents=None) -> Tensor:
            losses = parameter * torch.ones(targets.shape)
            assert not losses.requires_grad
            return losses

    assert score(Scaled(), data_folder).loss_nats == 1.0
