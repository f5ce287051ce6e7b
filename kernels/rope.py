"""Rotary positions, non-interleaved: channel i turns with channel i + K/2.

Equation, for position t, channel pair i of K/2 and the angle θ_ti = t · base^(−2i/K):

    out_i         = x_i cos θ − x_{i+K/2} sin θ
    out_{i+K/2}   = x_{i+K/2} cos θ + x_i sin θ

Symbols: x and out `[B, T, H, K]`, K even; positions `[T]` or `[B, T]`, any number ≥ 0; the tables
cos and sin `[..., T, K/2]`, float32.

Source: Su et al., "RoFormer" (arXiv 2104.09864), equations 15 and 34. They pair neighbouring
channels; the two halves, as here, are what most models since use. Angles are computed in float64,
since in float32 the one of position 100,000 is off by 0.004.

Cost: three passes over x; the tables are made once and shared by layers.
"""

import torch
from jaxtyping import Float
from torch import Tensor


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
    first, second = x.float().chunk(2, -1)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(x.dtype)
