"""Normalisations of the last axis: by root mean square, with an output gate, to unit length.

Equations, for a vector x of D channels and a gain w of D numbers:

    rms_norm(x)           x / sqrt(mean(x²) + eps) ∘ w
    rms_norm_gated(x, z)  rms_norm(x) ∘ a(z), a = SiLU or sigmoid
    l2_norm(x)            x / sqrt(Σ x² + eps)

Symbols: x and z `[..., D]` of one dtype; w `[D]`; out as x. eps 1e-5 and 1e-6 by default.

Sources: Zhang & Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467), equation 4;
the gated form as in "Gated Delta Networks" (arXiv 2412.06464), normalised before the gate. The
l2 norm adds eps inside the root, where torch's `normalize` takes a maximum: smooth at zero.

Backward, with y = x / rms(x), r = 1 / rms(x) and d the gradient of the result:

    rms_norm    dw = Σ d ∘ y        dx = r (w ∘ d − y · mean(w ∘ d ∘ y))
    l2_norm     dx = r (d − y · Σ d ∘ y)        with y the result and r = 1 / sqrt(Σ x² + eps)

Cost: one pass; float32 arithmetic (float64 for float64 inputs), rounded once at the end. On CUDA
`rms_norm` is torch's own fused kernel; elsewhere torch would keep four intermediates and take twice
as long as the two functions here.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from kernels.arguments import state_dtype

GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


class _RMSNorm(torch.autograd.Function):
    """`rms_norm` in the arithmetic's own dtype; see the head of this file."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        inverse = (x.square().mean(-1, keepdim=True) + eps).rsqrt_()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        products = (d_out * normed).reshape(-1, weight.numel())
        mean = (products @ weight / weight.numel()).view(inverse.shape)
        d_x = (d_out * weight).addcmul_(normed, mean, value=-1).mul_(inverse)
        return d_x, products.sum(0), None


def unit_vectors(x: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    """`l2_norm` of x in its own dtype, and r `[..., 1]`."""
    inverse = (x.square().sum(-1, keepdim=True) + eps).rsqrt_()
    return x * inverse, inverse


def unit_gradient(d_unit: Tensor, unit: Tensor, inverse: Tensor) -> Tensor:
    """The gradient of what `unit_vectors` took, from that of its result."""
    along = (d_unit * unit).sum(-1, keepdim=True)
    return torch.addcmul(d_unit, unit, along, value=-1).mul_(inverse)


class _L2Norm(torch.autograd.Function):
    """`l2_norm` in the arithmetic's own dtype; see the head of this file."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        unit, inverse = unit_vectors(x, eps)
        ctx.save_for_backward(unit, inverse)
        return unit

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_unit: Tensor) -> tuple[Tensor, None]:
        return unit_gradient(d_unit, *ctx.saved_tensors), None


def _rms_normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if x.is_cuda:
        return functional.rms_norm(x, weight.shape, weight, eps)
    normed: Tensor = _RMSNorm.apply(x, weight, eps)
    return normed


def rms_norm(
    x: Float[Tensor, "*axes D"], weight: Float[Tensor, " D"], *, eps: float = 1e-5
) -> Float[Tensor, "*axes D"]:
    """The quotient of x and its root mean square, times the gain.

    Raises:
        ValueError: if `weight` isn't one number for each channel of x.
    """
    _check_gain(x, weight)
    dtype = state_dtype(x.dtype)
    return _rms_normed(x.to(dtype), weight.to(dtype), eps).to(x.dtype)


def rms_norm_gated(
    x: Float[Tensor, "*axes D"],
    gate: Float[Tensor, "*axes D"],
    weight: Float[Tensor, " D"],
    *,
    activation: str,
    eps: float = 1e-5,
) -> Float[Tensor, "*axes D"]:
    """`rms_norm` of x times the activated gate.

    Args:
        x: what is normalised.
        gate: the gate before its activation.
        weight: the gain.
        activation: `silu` or `sigmoid`.
        eps: added to the mean square.

    Raises:
        ValueError: if the shapes don't fit, or the activation is none of the two.
    """
    _check_gain(x, weight)
    if gate.shape != x.shape:
        raise ValueError(f"gate has shape {list(gate.shape)}; expected x's {list(x.shape)}")
    if activation not in GATE_ACTIVATIONS:
        raise ValueError(f"{activation=} is none of {', '.join(GATE_ACTIVATIONS)}")
    dtype = state_dtype(x.dtype)
    normed = _rms_normed(x.to(dtype), weight.to(dtype), eps)
    return (normed * GATE_ACTIVATIONS[activation](gate.to(dtype))).to(x.dtype)


def l2_norm(x: Float[Tensor, "*axes D"], *, eps: float = 1e-6) -> Float[Tensor, "*axes D"]:
    """The quotient of x and its length, of unit length where x is well above eps."""
    unit: Tensor = _L2Norm.apply(x.to(state_dtype(x.dtype)), eps)
    return unit.to(x.dtype)


def _check_gain(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; expected one gain for each of the "
            f"{x.shape[-1]} channels of x"
        )
