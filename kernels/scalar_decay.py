"""Decay factors between the tokens of a chunk, for one decay per head."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScalarDecays:
    """What the tokens of a chunk still see of each other; G is the log decay summed up to a token.

    Attributes:
        before: exp(G_i − G_j) for j < i, else 0 `[..., C, C]`.
        until: the same with ones on the diagonal.
        entering: exp(G_i), what is left of the entering state `[..., C, 1]`.
        leaving: exp(G_C − G_j), what is left of a token's write at the end `[..., C, 1]`.
    """

    before: Tensor
    until: Tensor
    entering: Tensor
    leaving: Tensor

    @classmethod
    def of(cls, log_decay: Tensor) -> "ScalarDecays":
        """The factors of a chunk with these log decays `[..., C]`, at most 0.

        Sums are float64: a difference of float32 sums loses the digits of a weak decay that
        follows a strong one. Factors whose exponent is zero (a token with itself) are the constant
        1 and never exp(G_i − G_i), or their two gradients, which cancel, would drown those of all
        others where the decay is strong. What lies above the diagonal has a positive exponent,
        which is replaced before it can overflow.
        """
        size, dtype, device = log_decay.shape[-1], log_decay.dtype, log_decay.device
        total = log_decay.double().cumsum(-1)
        exponent = total[..., :, None] - total[..., None, :]
        is_masked = torch.ones(size, size, dtype=torch.bool, device=device).triu()
        before = exponent.masked_fill(is_masked, -torch.inf).to(dtype).exp()
        until = before + torch.eye(size, dtype=dtype, device=device)
        return cls(before, until, total.to(dtype).exp()[..., None], until[..., -1, :, None])
