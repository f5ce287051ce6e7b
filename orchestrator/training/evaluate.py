"""Loss on the fixed evaluation set: the same windows for every model, step and seed."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from models.documents import Documents
from orchestrator.data import Batch, Dataset, EvaluationSet
from orchestrator.training.ranks import ALONE, Ranks
from orchestrator.training.runtime import Runtime
from orchestrator.training.windows import on_device


class TokenModel(Protocol):
    """A model that says what each target costs."""

    def token_losses(
        self, inputs: Tensor, targets: Tensor, documents: Documents | None = None
    ) -> Tensor:
        """Cross-entropy of each target in nats, `[B, T]` fp32; see `LanguageModel.loss`."""


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

    Where some targets don't count, windows weigh by how many of theirs do. The standard error is
    then that of a ratio, from each window's distance to the mean times its weight.

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
    counts = torch.full((num_windows,), windows.seq_len, dtype=torch.float64)
    for index, batch in enumerate(windows.batches(windows_per_batch)):
        first = index * windows_per_batch
        own = slice(first, first + len(batch.inputs))
        if batch.counted is None:
            num_bytes += dataset.target_bytes(batch.targets)
        else:
            num_bytes += dataset.target_bytes(batch.targets[batch.counted])
            counts[own] = torch.from_numpy(batch.counted.sum(1)).double()
        if index % ranks.world_size == ranks.rank:
            means[own] = _window_means(model, batch, runtime)
    ranks.total(means)
    window_means, weights = means.cpu(), counts / counts.mean()
    loss = (window_means * weights).mean().item()
    tokens = int(counts.sum())
    # Weights of one leave the means as they are, bit for bit.
    around = window_means * weights - (weights - 1) * loss
    spread = around.std().item() if num_windows > 1 else None
    return Evaluation(
        loss_nats=loss,
        standard_error=None if spread is None else spread / math.sqrt(num_windows),
        bits_per_byte=loss * tokens / (math.log(2) * num_bytes),
        tokens=tokens,
    )


def _window_means(model: TokenModel, batch: Batch, runtime: Runtime) -> Tensor:
    """Mean loss of each window over its targets that count, `[W]` float64; 0 where none does."""
    tensors = on_device(batch, runtime.torch_device)
    with runtime.autocast():
        losses = model.token_losses(tensors.inputs, tensors.targets, tensors.documents).double()
    if batch.counted is None:
        return losses.mean(dim=1)
    counted = torch.from_numpy(batch.counted).to(losses.device)
    return losses.masked_fill(~counted, 0).sum(1) / counted.sum(1).clamp(min=1)
