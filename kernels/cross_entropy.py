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

LOGITS_PER_SLICE = {"cpu": 1 << 19, "cuda": 1 << 26}
"""Largest number of logits held at once, by device type.

On one core of an EPYC, 512 tokens with 64 features and a vocabulary of 4096 take 20 ms with 2^19
and 2^20 logits, 24 ms with 2^17, where the products have too few rows, and 31 ms with 2^22 that are
allocated anew in every call. On a GPU a slice has 256 MiB (assumed, not tuned).
"""

REDUCTIONS = ("mean", "none")


def _slices(x: Tensor, weight: Tensor, slice_rows: int | None) -> list[slice]:
    """Runs of rows whose logits are held at once."""
    num_logits = LOGITS_PER_SLICE.get(x.device.type, LOGITS_PER_SLICE["cpu"])
    rows = slice_rows or max(1, num_logits // len(weight))
    return [slice(start, min(start + rows, len(x))) for start in range(0, len(x), rows)]


def _losses(x: Tensor, weight: Tensor, targets: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
    """Losses `[n]` and probabilities `[n, vocab]` of a few rows.

    The product is in the inputs' dtype, all else in float32 (float64 for float64 inputs). With the
    largest logit m of a row, whose probability is p_m, log Σ exp(logits) is m − log p_m, and p_m is
    at least 1 / vocab: so one pass of exponentials serves value and gradient, and no digits go.

    Args:
        x: of the rows.
        weight: the head.
        targets: of the rows.
        held: memory for the product, overwritten, at least n rows.
    """
    logits = torch.mm(x, weight.T, out=held[: len(x)]).to(state_dtype(x.dtype))
    peak, at_target = logits.amax(1), logits.gather(1, targets[:, None])[:, 0]
    # On a CPU torch goes through a row before it writes it, so that a row may be overwritten, and a
    # second tile would push the first out of the cache.
    out = logits if logits.device.type == "cpu" else None
    probabilities = torch.softmax(logits, 1, out=out)
    return peak - probabilities.amax(1).log() - at_target, probabilities


def _held(x: Tensor, weight: Tensor, slices: list[slice]) -> Tensor:
    """Memory for the logits of the largest slice, in the inputs' dtype."""
    return x.new_empty(slices[0].stop - slices[0].start, len(weight))


def _to_logit_gradient(probabilities: Tensor, targets: Tensor) -> Tensor:
    """Subtracts onehot from the probabilities, in place."""
    minus = probabilities.new_full((len(targets), 1), -1.0)
    return probabilities.scatter_add_(1, targets[:, None], minus)


def _add_gradients(
    d_logits: Tensor,
    x: Tensor,
    weight: Tensor,
    rows: slice,
    d_x: Tensor | None,
    d_weight_T: Tensor | None,
) -> None:
    """Writes the rows' part of d_x, and adds theirs to the wide sum d_weightᵀ, where wanted."""
    narrow = d_logits.to(x.dtype)
    if d_x is not None:
        torch.mm(narrow, weight, out=d_x[rows])
    if d_weight_T is None:
        return
    # Long rows on the left of few columns would take a third more time.
    x_T = x[rows].T.contiguous()
    if d_weight_T.dtype == x.dtype:
        d_weight_T.addmm_(x_T, narrow)
    else:
        d_weight_T += x_T @ narrow


def _zero_gradient(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """d_weightᵀ before any row."""
    return weight.new_zeros(weight.shape[::-1], dtype=dtype)


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
        d_weight_T = _zero_gradient(weight, dtype) if needs_weight else None
        total = torch.zeros((), dtype=dtype, device=x.device)
        held = _held(x, weight, slices)
        for rows in slices:
            losses, probabilities = _losses(x[rows], weight, targets[rows], held)
            total += losses.sum()
            if needs_x or needs_weight:
                d_logits = _to_logit_gradient(probabilities, targets[rows])
                _add_gradients(d_logits, x, weight, rows, d_x, d_weight_T)
        ctx.save_for_backward(d_x, d_weight_T)
        ctx.weight_dtype, ctx.num_rows = weight.dtype, len(x)
        return total / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor) -> tuple[Tensor | None, ...]:
        d_x, d_weight_T = ctx.saved_tensors
        if d_x is not None:
            d_x = (d_x * (d_loss / ctx.num_rows)).to(d_x.dtype)
        d_weight = None
        if d_weight_T is not None:
            # Turned here and scaled in place: autograd would turn a product of strides by itself.
            d_weight = d_weight_T.T.clone(memory_format=torch.contiguous_format)
            d_weight = d_weight.mul_(d_loss / ctx.num_rows).to(ctx.weight_dtype)
        return d_x, d_weight, None, None, None


class _TokenLosses(torch.autograd.Function):
    """The loss of every token; the backward makes the logits again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, slices: list[slice]
    ) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.slices = slices
        held = _held(x, weight, slices)
        return torch.cat([_losses(x[rows], weight, targets[rows], held)[0] for rows in slices])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        d_x = torch.empty_like(x) if needs_x else None
        d_weight_T = _zero_gradient(weight, d_losses.dtype) if needs_weight else None
        held = _held(x, weight, ctx.slices)
        for rows in ctx.slices:
            _, probabilities = _losses(x[rows], weight, targets[rows], held)
            d_logits = _to_logit_gradient(probabilities, targets[rows])
            d_logits.mul_(d_losses[rows, None])
            _add_gradients(d_logits, x, weight, rows, d_x, d_weight_T)
        return d_x, None if d_weight_T is None else d_weight_T.T.to(weight.dtype), None, None


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
    slices = _slices(x, weight, slice_rows)
    loss: Tensor
    if reduction == "none":
        loss = _TokenLosses.apply(x, weight, targets, slices)
    else:
        loss = _MeanLoss.apply(x, weight, targets, slices, torch.is_grad_enabled())
    return loss
