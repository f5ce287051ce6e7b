"""Normalisations of the last axis: by root mean square, with an output gate, to unit length.

Equations, for a vector x of D channels and a gain w of D numbers:

    rms_norm(x)           x / sqrt(mean(x²) + eps) ∘ w
    rms_norm_gated(x, z)  rms_norm(x) ∘ a(z), a = SiLU or sigmoid
    l2_norm(x)            x / sqrt(Σ x² + eps)

Symbols: x and z `[..., D]` of one dtype; w `[D]`; out as x. eps 1e-5 and 1e-6 by default.

Sources: Zhang & Sennrich, "Root Mean Square Layer Normalization" (arXiv 1910.07467), equation 4;
the gated form as in "Gated Delta Networks" (arXiv 2412.06464), normalised before the gate. The
l2 norm adds eps inside the root, where torch's `normalize` takes a maximum: smooth at zero.

Cost: one pass; float32 arithmetic (float64 for float64 inputs), rounded once at the end.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from kernels.arguments import state_dtype

GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
}


def rms_norm(
    x: Float[Tensor, "*axes D"], weight: Float[Tensor, " D"], *, eps: float = 1e-5
) -> Float[Tensor, "*axes D"]:
    """The quotient of x and its root mean square, times the gain.

    Raises:
        ValueError: if `weight` isn't one number for each channel of x.
    """
    _check_gain(x, weight)
    dtype = state_dtype(x.dtype)
    return functional.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps).to(x.dtype)


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
    normed = functional.rms_norm(x.to(dtype), weight.shape, weight.to(dtype), eps)
    return (normed * GATE_ACTIVATIONS[activation](gate.to(dtype))).to(x.dtype)


def l2_norm(x: Float[Tensor, "*axes D"], *, eps: float = 1e-6) -> Float[Tensor, "*axes D"]:
    """The quotient of x and its length, of unit length where x is well above eps."""
    wide = x.to(state_dtype(x.dtype))
    return (wide * (wide.square().sum(-1, keepdim=True) + eps).rsqrt()).to(x.dtype)


def _check_gain(x: Tensor, weight: Tensor) -> None:
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; expected one gain for each of the "
            f"{x.shape[-1]} channels of x"
        )
