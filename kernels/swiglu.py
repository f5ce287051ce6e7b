"""The gated activation of an MLP, from one fused projection.

Equation, for x = (g, u), the two halves of the last axis:

    y = SiLU(g) ∘ u        SiLU(g) = g · σ(g)

Symbols: x `[..., 2F]`, the gate first; y `[..., F]`, as x in dtype.

Source: Shazeer, "GLU Variants Improve Transformer" (arXiv 2002.05202), equation 6. The backward
writes both gradients into one tensor, where autograd would make each half and put them together.

Cost: one pass each way; the backward keeps x and makes SiLU(g) again.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


class _SwiGLU(torch.autograd.Function):
    """See the head of this file."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, -1)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.chunk(2, -1)
        d_x = torch.empty_like(x)
        d_gate, d_up = d_x.chunk(2, -1)
        torch.mul(functional.silu(gate), d_out, out=d_up)
        torch.ops.aten.silu_backward.grad_input(d_out * up, gate, grad_input=d_gate)
        return d_x


def swiglu(x: Float[Tensor, "*axes F2"]) -> Float[Tensor, "*axes F"]:
    """SiLU of the first half of the last axis times the second half.

    Raises:
        ValueError: if the last axis has an odd length.
    """
    if x.shape[-1] % 2:
        raise ValueError(
            f"x has {x.shape[-1]} channels; expected an even number, the gate's and as many again"
        )
    if torch.compiler.is_compiling():
        # The compiler fuses both ways by itself, and breaks its graph at results written into
        # halves of a tensor.
        gate, up = x.chunk(2, -1)
        return functional.silu(gate) * up
    out: Tensor = _SwiGLU.apply(x)
    return out
