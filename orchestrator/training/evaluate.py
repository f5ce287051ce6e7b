"""Loss on the fixed evaluation set: the same windows for every model, step and seed."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from orchestrator.data import Dataset, EvaluationSet
from orchestrator.training.ranks import ALONE, Ranks
from orchestrator.training.runtime import Runtime


class TokenModel(Protocol):
    """A model that says what each target costs."""

    def token_losses(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of each target in nats, `[B, T]` fp32."""


class LogitModel(Protocol):
    """A model that says which token comes next."""

    def __call__(self, tokens: Tensor) -> Tensor:
        """Logits `[B, T, vocab]` for tokens `[B, T]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """What a model scored on an evaluation set.

    Attributes:
        loss_nats: mean over all targets.
        standard_error: of `loss_nats` over windows; None for a single one.
        bits_per_byte: the summed loss over the UTF-8 bytes that its targets stand for.
        tokens: targets.
    """

    loss_nats: float
    standard_error: float | None
    bits_per_byte: float
    tokens: int

    @property
    def is_finite(self) -> bool:
        """Whether the loss is a number."""
        return math.isfinite(self.loss_nats)


@torch.no_grad()
def evaluate(
    model: TokenModel,
    dataset: Dataset,
    windows: EvaluationSet,
    *,
    windows_per_batch: int,
    runtime: Runtime,
    ranks: Ranks = ALONE,
) -> Evaluation:
    """Scores a model; the sums are taken in float64, so batching changes nothing beyond rounding.

    Args:
        model: on the runtime's device.
        dataset: whose tokens' byte lengths turn nats per token into bits per byte.
        windows: what to read.
        windows_per_batch: windows of one forward pass.
        runtime: device and arithmetic.
        ranks: that share the batches; each returns the same evaluation.
    """
    device = runtime.torch_device
    num_windows, num_bytes = len(windows.window_ids), 0
    means = torch.zeros(num_windows, dtype=torch.float64, device=device)
    for index, (inputs, targets) in enumerate(windows.batches(windows_per_batch)):
        num_bytes += dataset.target_bytes(targets)
        if index % ranks.world_size != ranks.rank:
            continue
        with runtime.autocast():
            losses = model.token_losses(
                torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device)
            )
        first = index * windows_per_batch
        means[first : first + len(inputs)] = losses.double().mean(dim=1)
    ranks.total(means)
    window_means = means.cpu()
    loss = window_means.mean().item()
    tokens = num_windows * windows.seq_len
    spread = window_means.std().item() if num_windows > 1 else None
    return Evaluation(
        loss_nats=loss,
        standard_error=None if spread is None else spread / math.sqrt(num_windows),
        bits_per_byte=loss * tokens / (math.log(2) * num_bytes),
        tokens=tokens,
    )
