"""Orthogonalisation by Newton–Schulz: matrices to nearly their polar factors, batched.

With X₀ = G / ‖G‖, each step is X ← aX + (bA + cA²)X with A = XXᵀ: an odd polynomial of the singular
values, which leaves the singular vectors alone and drives the values towards 1. A few steps suffice
for training; small singular values stay small. Only products and no decomposition, so it runs in
bf16 on tensor cores.

Source: Jordan et al., "Muon" (2024), and the sets named in `NEWTON_SCHULZ`. Jordan divides by
‖G‖ + 1e-7 where we, as torch.optim.Muon, divide by max(‖G‖, 1e-7).
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from orchestrator.training.optim.configs import NEWTON_SCHULZ, Triple

# A matrix below this Frobenius norm is noise or zero; it stays as small as it is.
NORM_FLOOR = 1e-7

# Polar Express was derived for norms of at most 1/1.02: rounding in bf16 can lift the largest
# singular value past 1, where its first polynomial diverges.
NORM_MARGINS = {"polar_express": 1.02}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def coefficients_per_step(name: str, num_steps: int) -> tuple[Triple, ...]:
    """The triples of `num_steps` steps: those of the named set, its last one repeated."""
    triples = NEWTON_SCHULZ[name]
    return triples + triples[-1:] * (num_steps - len(triples))


def orthogonalize(
    matrices: Float[Tensor, "n rows cols"],
    triples: Sequence[Triple],
    *,
    norm_margin: float = 1.0,
    arithmetic: str = "fp32",
) -> Float[Tensor, "n rows cols"]:
    """Nearly the polar factor of each matrix, in fp32; the input is left as it is.

    Args:
        matrices: any fp32 matrices of one shape.
        triples: coefficients (a, b, c), one per step.
        norm_margin: factor on the norm that each matrix is divided by.
        arithmetic: `fp32` or `bf16`, of the products only; the norm is taken in fp32.
    """
    norms: Tensor = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True) * norm_margin
    x = (matrices / norms.clamp_min(NORM_FLOOR)).to(DTYPES[arithmetic])
    # A has the smaller side's size when the matrix is wide.
    is_tall = x.shape[-2] > x.shape[-1]
    if is_tall:
        x = x.mT
    for a, b, c in triples:
        gram = torch.bmm(x, x.mT)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    x = x.mT if is_tall else x
    return x.float()
