"""Rotary positions, non-interleaved: channel i turns with channel i + K/2.

Equation, for position t, channel pair i of K/2 and the angle θ_ti = t · base^(−2i/K):

    out_i         = x_i cos θ − x_{i+K/2} sin θ
    out_{i+K/2}   = x_{i+K/2} cos θ + x_i sin θ

Symbols: x and out `[B, T, H, K]`, K even; positions `[T]` or `[B, T]`, any number ≥ 0; the tables
cos and sin `[..., T, K/2]`, float32.

Source: Su et al., "RoFormer" (arXiv 2104.09864), equations 15 and 34. They pair neighbouring
channels; the two halves, as here, are what most models since use. Angles are computed in float64,
since in float32 the one of position 100,000 is off by 0.004.

The backward turns the gradient by −θ.

Cost: two passes over x; the tables are made once and shared by layers.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable


def rope_tables(
    positions: Tensor, dim: int, *, base: float
) -> tuple[Float[Tensor, "*positions half"], Float[Tensor, "*positions half"]]:
    """The cosines and sines of every position and channel pair.

    Args:
        positions: positions of the tokens, `[T]` or `[B, T]`.
        dim: K.
        base: the slowest pair turns by about 1 / base a token.

    Raises:
        ValueError: if `dim` is odd or `base` isn't above 1.
    """
    if dim % 2:
        raise ValueError(f"{dim=} is odd; rotary positions turn pairs of channels")
    if base <= 1:
        raise ValueError(f"{base=}; expected more than 1")
    pairs = torch.arange(0, dim, 2, dtype=torch.float64, device=positions.device)
    angles = positions[..., None].double() * base ** (-pairs / dim)
    return angles.cos().float(), angles.sin().float()


def _turned(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    """What turning x by θ gives, or by −θ for sign −1."""
    half = cos.shape[-1]
    out = torch.empty_like(x)
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=sign)
    return out


class _Rope(torch.autograd.Function):
    """See the head of this file."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turned(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turned(d_out, cos, sin, -1), None, None


def rope(
    x: Float[Tensor, "B T H K"],
    cos: Float[Tensor, "*positions half"],
    sin: Float[Tensor, "*positions half"],
) -> Float[Tensor, "B T H K"]:
    """Turns x by the angles of its positions; float32 inside, out in x's dtype.

    Raises:
        ValueError: if the tables don't hold one row for each token and one column for each pair.
    """
    B, T, _, K = x.shape
    if tuple(cos.shape) not in ((T, K // 2), (B, T, K // 2)) or cos.shape != sin.shape:
        raise ValueError(
            f"cos has shape {list(cos.shape)}, sin {list(sin.shape)}; expected {[T, K // 2]} or "
            f"{[B, T, K // 2]} for x of shape {list(x.shape)}"
        )
    turned: Tensor = _Rope.apply(x.float(), cos.unsqueeze(-2), sin.unsqueeze(-2))
    return turned.to(x.dtype)
