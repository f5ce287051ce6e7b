"""The chunked delta rule from the factors of its chunks on: what every rule of the family shares.

Equation, for one chunk of C tokens and one value head; G is the log decay summed inside the chunk
up to a token, b and w the strengths of erasing and writing, and S the state that enters:

    L_ij = Σ_c b_ic k_ic k_jc exp(G_ic − G_jc)            j < i, else 0
    P_ij = scale Σ_c q_ic k_jc exp(G_ic − G_jc)           j ≤ i, else 0
    Kb = b ∘ k ∘ exp(G)        Qg = scale q ∘ exp(G)        Kt = k ∘ exp(G_C − G)
    X = w ∘ v                  γ = exp(G_C)

    R  = (I + L)⁻¹ (X − Kb S)        the residuals u of the C tokens
    O  = Qg S + P R                  the reads
    S' = Diag(γ) S + Ktᵀ R           the state after the chunk

Symbols: L, P `[Z, C, C]`; Kb, Qg, Kt `[Z, C, K]`; X, R, O `[Z, C, V]`; γ `[Z, K, 1]`, or
`[Z, 1, 1]`, or None for 1; Z counts the chunks of all sequences times heads.

Source: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484),
section 3.2 and "Gated Delta Networks" (arXiv 2412.06464), section 3.3, where U = (I + L)⁻¹ X and
W = (I + L)⁻¹ Kb. We solve for both at once, and since R = U − W S, a chunk maps its state by the
K × K matrix A = Diag(γ) − Ktᵀ W and adds Ktᵀ U: the chain over chunks is one product a step, and
all else runs for all chunks at once.

The backward needs one solve of V columns. With dS' the gradient of the state after a chunk:

    dR = dR_out + Pᵀ dO + Kt dS'        dX = (I + L)⁻ᵀ dR
    dL = −dX Rᵀ (j < i)   dKb = −dX Sᵀ   dP = dO Rᵀ (j ≤ i)   dQg = dO Sᵀ   dKt = R dS'ᵀ
    dS = Aᵀ dS' + Qgᵀ dO − Wᵀ (dR_out + Pᵀ dO)                dγ = Σ_V dS' ∘ S

Cost: C·(K + 3·V) + 2·K² + 6·K·V + 2·K²·V/C FLOPs per token, about twice that backward; kept for it
are L, P, W, R, Kt, Qg, A and S.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.state_scan import scan_backward, scan_forward


class ChunkFactors(NamedTuple):
    """What a rule makes of its inputs, or the gradients of these.

    Attributes:
        erase: L; its diagonal and what lies above are never read and get no gradient.
        read: P.
        targets: X.
        erase_keys: Kb.
        queries: Qg.
        write_keys: Kt.
        retention: γ, or None where nothing decays.
    """

    erase: Tensor
    read: Tensor
    targets: Tensor
    erase_keys: Tensor
    queries: Tensor
    write_keys: Tensor
    retention: Tensor | None


class KeptChunks(NamedTuple):
    """What the backward reads.

    Attributes:
        erase: L.
        read: P.
        queries: Qg.
        write_keys: Kt.
        retention: γ, or None.
        solved_keys: W.
        transitions: A.
        entering: S.
        residuals: R.
    """

    erase: Tensor
    read: Tensor
    queries: Tensor
    write_keys: Tensor
    retention: Tensor | None
    solved_keys: Tensor
    transitions: Tensor
    entering: Tensor
    residuals: Tensor


def _solved(erase: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
    """(I + L)⁻¹ right, or (I + L)⁻ᵀ right, written over `right`.

    Neither L's diagonal nor what lies above it is read. The transposed equation is solved, with the
    unknowns on the left: rows of C are columns to the solver, which then copies nothing and took a
    third to a half of the time on a processor (32 matrices of 32 × 32 for 64 and 32 columns).
    """
    matrix = erase if transposed else erase.mT
    torch.linalg.solve_triangular(
        matrix, right.mT, upper=not transposed, left=False, unitriangular=True, out=right.mT
    )
    return right


def chunks_forward(
    factors: ChunkFactors, initial: Tensor, active: Sequence[int]
) -> tuple[Tensor, Tensor, KeptChunks]:
    """Outputs `[Z, C, V]`, final states `[active[0], K, V]`, and what `chunks_backward` reads.

    Args:
        factors: of all chunks.
        initial: the first state of every chain `[active[0], K, V]`.
        active: number of chains at each step; see `scan_forward`.
    """
    erase, read, targets, erase_keys, queries, write_keys, retention = factors
    V, K = targets.shape[-1], erase_keys.shape[-1]
    solved = _solved(erase, torch.cat([targets, erase_keys], -1))
    values, keys = solved.split((V, K), -1)
    identity = torch.eye(K, dtype=solved.dtype, device=solved.device)
    diagonal = identity if retention is None else retention * identity
    transitions = torch.baddbmm(diagonal, write_keys.mT, keys, alpha=-1)
    entering, final = scan_forward(transitions, write_keys.mT @ values, initial, active)
    residuals = torch.baddbmm(values, keys, entering, alpha=-1)
    out = (queries @ entering).baddbmm_(read, residuals)
    kept = KeptChunks(
        erase, read, queries, write_keys, retention, keys, transitions, entering, residuals
    )
    return out, final, kept


def chunks_backward(
    kept: KeptChunks,
    d_out: Tensor | None,
    d_final: Tensor | None,
    d_residuals: Tensor | None,
    active: Sequence[int],
) -> tuple[ChunkFactors, Tensor]:
    """Gradients of the factors and of the initial states; None stands for a gradient of zeros."""
    erase, read, queries, write_keys, retention, keys, transitions, entering, residuals = kept
    d_out = torch.zeros_like(residuals) if d_out is None else d_out
    d_final = torch.zeros_like(entering[: active[0]]) if d_final is None else d_final
    d_local = read.mT @ d_out
    if d_residuals is not None:
        d_local += d_residuals
    d_entering = (queries.mT @ d_out).baddbmm_(keys.mT, d_local, alpha=-1)
    d_leaving, d_initial = scan_backward(transitions, d_entering, d_final, active)
    d_targets = _solved(erase, d_local.baddbmm_(write_keys, d_leaving), transposed=True)
    d_retention = None
    if retention is not None:
        d_retention = (d_leaving * entering).sum_to_size(retention.shape)
    gradients = ChunkFactors(
        erase=(d_targets @ residuals.mT).tril_(-1).neg_(),
        read=(d_out @ residuals.mT).tril_(),
        targets=d_targets,
        erase_keys=(d_targets @ entering.mT).neg_(),
        queries=d_out @ entering.mT,
        write_keys=residuals @ d_leaving.mT,
        retention=d_retention,
    )
    return gradients, d_initial


class _DeltaChunks(torch.autograd.Function):
    """See `delta_chunks` and the head of this file."""

    @staticmethod
    def forward(
        ctx: Any, initial: Tensor, active: Sequence[int], *factors: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        out, final, kept = chunks_forward(ChunkFactors(*factors), initial, active)
        ctx.save_for_backward(*kept)
        ctx.active = active
        ctx.set_materialize_grads(False)
        return out, final, kept.residuals

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_out: Tensor | None, d_final: Tensor | None, d_residuals: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        kept = KeptChunks(*ctx.saved_tensors)
        gradients, d_initial = chunks_backward(kept, d_out, d_final, d_residuals, ctx.active)
        return d_initial, None, *gradients


def delta_chunks(
    factors: ChunkFactors, initial: Tensor, active: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `[Z, C, V]`, final states `[active[0], K, V]` and residuals `[Z, C, V]`.

    The arguments are those of `chunks_forward`.
    """
    out, final, residuals = _DeltaChunks.apply(initial, active, *factors)
    return out, final, residuals
