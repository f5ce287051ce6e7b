"""What the tokens of a chunk still see of each other, for one decay per head.

Equation, with G_i the log decay summed from the start of the chunk up to token i:

    between_ij = exp(G_i − G_j) for j ≤ i, else 0      entering_i = exp(G_i)

Sums are float64: a difference of float32 sums loses the digits of a weak decay that follows a
strong one. The diagonal of `between` is the constant 1 and never exp(G_i − G_i): the two gradients
of such an entry cancel, and where the decay is strong their rounding would drown those of all
others. Exponents above the diagonal are positive and are replaced before they can overflow.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Axis letters: C position in a chunk; Z chunks of all sequences · heads.


def decay_factors(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """`between` `[Z, C, C]` and `entering` `[Z, C, 1]` of chunks with log decays `[Z, C]` ≤ 0.

    The last row of `between` is what is left of each token's write at the end of the chunk, the
    last entry of `entering` what is left of the entering state there.
    """
    total = log_decay.double().cumsum(-1)
    between = (total[:, :, None] - total[:, None, :]).to(log_decay.dtype).exp_().tril_()
    return between, total.to(log_decay.dtype).exp_()[..., None]


def decay_gradient(d_exponent: Tensor, d_total: Tensor) -> Tensor:
    """The gradient of the log decays `[Z, C]`.

    Args:
        d_exponent: of G_i − G_j `[Z, C, C]`, of which only j < i counts.
        d_total: of G_i itself `[Z, C]`.
    """
    size = d_exponent.shape[-1]
    # Token t's decay is in the exponents with j < t ≤ i. Summing rows i ≥ t first and columns
    # j < t afterwards adds just those; sums over rows less sums over columns would add all
    # with i, j ≥ t as well, twice with opposite signs.
    since = torch.ones(size, size, dtype=d_exponent.dtype, device=d_exponent.device).triu()
    from_row = torch.bmm(since.expand_as(d_exponent), d_exponent)
    return from_row.tril_(-1).sum(-1) + d_total.flip(-1).cumsum(-1).flip(-1)


class _ScalarFactors(torch.autograd.Function):
    """See `scalar_factors`."""

    @staticmethod
    def forward(ctx: Any, log_decay: Tensor) -> tuple[Tensor, Tensor]:
        between, entering = decay_factors(log_decay)
        ctx.save_for_backward(between, entering)
        return between, entering

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_between: Tensor, d_entering: Tensor) -> Tensor:
        between, entering = ctx.saved_tensors
        return decay_gradient(d_between * between, (d_entering * entering)[..., 0])


def scalar_factors(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """`decay_factors` with gradients."""
    between, entering = _ScalarFactors.apply(log_decay)
    return between, entering
