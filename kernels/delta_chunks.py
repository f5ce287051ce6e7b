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
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.state_scan import scan_backward, scan_forward


def _unit_triangular_solve(matrix: Tensor, right: Tensor, *, upper: bool) -> Tensor:
    """(I + matrix)⁻¹ right; neither the diagonal nor the other triangle is read."""
    solved: Tensor = torch.linalg.solve_triangular(matrix, right, upper=upper, unitriangular=True)
    return solved


class _DeltaChunks(torch.autograd.Function):
    """See `delta_chunks` and the head of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        erase: Tensor,
        read: Tensor,
        targets: Tensor,
        erase_keys: Tensor,
        queries: Tensor,
        write_keys: Tensor,
        retention: Tensor | None,
        initial: Tensor,
        active: Sequence[int],
    ) -> tuple[Tensor, Tensor, Tensor]:
        V, K = targets.shape[-1], erase_keys.shape[-1]
        # Columns lie together, which is the order that the solver works in.
        right = targets.new_empty(len(targets), V + K, targets.shape[1]).mT
        right[..., :V], right[..., V:] = targets, erase_keys
        solved = _unit_triangular_solve(erase, right, upper=False)
        values, keys = solved.split((V, K), -1)
        updates, forgotten = (write_keys.mT @ solved).split((V, K), -1)
        identity = torch.eye(K, dtype=solved.dtype, device=solved.device)
        kept = identity if retention is None else retention * identity
        transitions = kept - forgotten
        entering, final = scan_forward(transitions, updates, initial, active)
        residuals = torch.baddbmm(values, keys, entering, alpha=-1)
        out = torch.baddbmm(queries @ entering, read, residuals)
        ctx.save_for_backward(
            erase, read, queries, write_keys, retention, keys, transitions, entering, residuals
        )
        ctx.active = active
        ctx.set_materialize_grads(False)
        return out, final, residuals

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_out: Tensor | None, d_final: Tensor | None, d_residuals: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        erase, read, queries, write_keys, retention, keys, transitions, entering, residuals = (
            ctx.saved_tensors
        )
        d_out = torch.zeros_like(residuals) if d_out is None else d_out
        d_final = torch.zeros_like(entering[: ctx.active[0]]) if d_final is None else d_final
        d_local = read.mT @ d_out
        if d_residuals is not None:
            d_local += d_residuals
        d_entering = torch.baddbmm(queries.mT @ d_out, keys.mT, d_local, alpha=-1)
        d_leaving, d_initial = scan_backward(transitions, d_entering, d_final, ctx.active)
        d_local = d_local.baddbmm_(write_keys, d_leaving)
        d_targets = _unit_triangular_solve(erase.mT, d_local, upper=True)
        d_retention = None
        if retention is not None:
            d_retention = (d_leaving * entering).sum_to_size(retention.shape)
        return (
            (d_targets @ residuals.mT).tril_(-1).neg_(),
            (d_out @ residuals.mT).tril_(),
            d_targets,
            (d_targets @ entering.mT).neg_(),
            d_out @ entering.mT,
            residuals @ d_leaving.mT,
            d_retention,
            d_initial,
            None,
        )


def delta_chunks(
    *,
    erase: Tensor,
    read: Tensor,
    targets: Tensor,
    erase_keys: Tensor,
    queries: Tensor,
    write_keys: Tensor,
    retention: Tensor | None,
    initial: Tensor,
    active: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `[Z, C, V]`, final states `[active[0], K, V]` and residuals `[Z, C, V]`.

    Args:
        erase: L; its diagonal and what lies above are never read and get no gradient.
        read: P.
        targets: X.
        erase_keys: Kb.
        queries: Qg.
        write_keys: Kt.
        retention: γ, or None where nothing decays.
        initial: the first state of every chain `[active[0], K, V]`.
        active: number of chains at each step; see `scan_forward`.
    """
    out, final, residuals = _DeltaChunks.apply(
        erase, read, targets, erase_keys, queries, write_keys, retention, initial, active
    )
    return out, final, residuals
