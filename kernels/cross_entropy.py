"""Cross-entropy of a linear head, without ever holding the logits of all tokens.

Equation, for token n with features x_n and target y_n:

    logits_n = W x_n       loss_n = log Σ_v exp(logits_nv) − logits_{n, y_n}
    d loss_n / d logits_n = softmax(logits_n) − onehot(y_n)

Symbols: x `[N, D]`; W `[vocab, D]`; targets `[N]`, integers in [0, vocab); losses `[N]` in nats, or
their mean, float32 (float64 for float64 inputs).

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (arXiv 2411.09009),
for the aim; Hsu et al., "Liger Kernel" (arXiv 2410.10989), section 3.2, for the way: rows are taken
in slices, and for the mean the gradients of x and W are made slice by slice in the forward, while
the slice's logits are there. Unlike theirs, the gradient of W is summed in float32, and losses per
token are differentiable too: those recompute the logits in the backward, since the incoming
gradient of each token is needed before the sum over tokens.

Cost: 6·D·vocab FLOPs per token for value and gradients, 8·D·vocab with losses per token; memory of
one slice of logits beside the gradients.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.arguments import state_dtype

LOGITS_PER_SLICE = 1 << 22
"""Largest number of logits held at once: 16 MiB in float32 (assumed, not tuned)."""

REDUCTIONS = ("mean", "none")


def _slices(num_rows: int, vocab: int, slice_rows: int | None) -> list[slice]:
    rows = slice_rows or max(1, LOGITS_PER_SLICE // vocab)
    return [slice(start, min(start + rows, num_rows)) for start in range(0, num_rows, rows)]


def _log_probabilities(x: Tensor, weight: Tensor) -> Tensor:
    """Log-softmax of the logits of some rows; the product in the inputs' dtype, the rest wide."""
    return torch.log_softmax(x @ weight.T, -1, dtype=state_dtype(x.dtype))


def _to_logit_gradient(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Writes softmax − onehot over the log-probabilities."""
    gradient = log_probs.exp_()
    gradient[torch.arange(len(targets), device=targets.device), targets] -= 1
    return gradient


def _losses(log_probs: Tensor, targets: Tensor) -> Tensor:
    return -log_probs.gather(1, targets[:, None])[:, 0]


class _MeanLoss(torch.autograd.Function):
    """The mean loss; its gradients are made in the forward and scaled in the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        slices: list[slice],
        grad_enabled: bool,  # noqa: FBT001 (`apply` takes no keywords)
    ) -> Tensor:
        needs_x, needs_weight = (grad_enabled and needed for needed in ctx.needs_input_grad[:2])
        dtype = state_dtype(x.dtype)
        d_x = torch.empty_like(x) if needs_x else None
        d_weight = torch.zeros_like(weight, dtype=dtype) if needs_weight else None
        total = torch.zeros((), dtype=dtype, device=x.device)
        for rows in slices:
            log_probs = _log_probabilities(x[rows], weight)
            total += _losses(log_probs, targets[rows]).sum()
            if not (needs_x or needs_weight):
                continue
            d_logits = _to_logit_gradient(log_probs, targets[rows]).to(x.dtype)
            if d_x is not None:
                d_x[rows] = d_logits @ weight
            if d_weight is not None:
                d_weight += d_logits.T @ x[rows]
        ctx.save_for_backward(d_x, d_weight)
        ctx.weight_dtype, ctx.num_rows = weight.dtype, len(x)
        return total / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight = ctx.saved_tensors
        if d_x is not None:
            d_x = (d_x * (d_loss / ctx.num_rows)).to(d_x.dtype)
        if d_weight is not None:
            d_weight = (d_weight * (d_loss / ctx.num_rows)).to(ctx.weight_dtype)
        return d_x, d_weight, None, None, None


class _TokenLosses(torch.autograd.Function):
    """The loss of every token; the backward makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, slices: list[slice]
    ) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.slices = slices
        losses = [_losses(_log_probabilities(x[rows], weight), targets[rows]) for rows in slices]
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        d_x = torch.empty_like(x) if needs_x else None
        d_weight = torch.zeros_like(weight, dtype=d_losses.dtype) if needs_weight else None
        for rows in ctx.slices:
            log_probs = _log_probabilities(x[rows], weight)
            d_logits = _to_logit_gradient(log_probs, targets[rows])
            d_logits = d_logits.mul_(d_losses[rows, None]).to(x.dtype)
            if d_x is not None:
                d_x[rows] = d_logits @ weight
            if d_weight is not None:
                d_weight += d_logits.T @ x[rows]
        return d_x, None if d_weight is None else d_weight.to(weight.dtype), None, None


def linear_cross_entropy(
    x: Float[Tensor, "N D"],
    weight: Float[Tensor, "vocab D"],
    targets: Int[Tensor, " N"],
    *,
    reduction: str = "mean",
    slice_rows: int | None = None,
) -> Tensor:
    """The cross-entropy in nats of every token `[N]`, or its mean.

    Args:
        x: features.
        weight: the head, one row for each token of the vocabulary.
        targets: the true tokens.
        reduction: `mean` or `none`.
        slice_rows: rows whose logits are held at once; None for as many as `LOGITS_PER_SLICE`.

    Raises:
        ValueError: if shapes or dtypes don't fit, or the reduction is none of the two.
    """
    if x.ndim != 2 or weight.ndim != 2 or x.shape[1] != weight.shape[1] or not len(x):
        raise ValueError(
            f"x has shape {list(x.shape)} and weight {list(weight.shape)}; expected [N, D], N at "
            "least 1, and [vocab, D]"
        )
    if targets.shape != x.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets has shape {list(targets.shape)} and dtype {targets.dtype}; expected "
            f"{list(x.shape[:1])} and torch.int64"
        )
    if weight.dtype != x.dtype:
        raise ValueError(f"weight.dtype is {weight.dtype}; expected {x.dtype} as x")
    if reduction not in REDUCTIONS:
        raise ValueError(f"{reduction=} is none of {', '.join(REDUCTIONS)}")
    slices = _slices(len(x), len(weight), slice_rows)
    loss: Tensor
    if reduction == "none":
        loss = _TokenLosses.apply(x, weight, targets, slices)
    else:
        loss = _MeanLoss.apply(x, weight, targets, slices, torch.is_grad_enabled())
    return loss
