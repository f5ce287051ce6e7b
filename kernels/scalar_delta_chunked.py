"""The delta rule and the gated delta rule over chunks in PyTorch: factors and all gradients.

Equation: that of `delta_chunks`, whose factors for one decay and one strength b per value head are

    B = k kᵀ ∘ D                    L = b ∘ B (j < i)
    P = scale q kᵀ ∘ D (j ≤ i)      X = b ∘ v
    Kb = b e ∘ k        Qg = scale e ∘ q        Kt = l ∘ k        γ = e_C

with D (`between`), its last row l and e (`entering`) from `scalar_decay`, all 1 without a decay.
From the gradients of the factors, with ⟨x, y⟩ the sum of x ∘ y over each row:

    dM = scale dP ∘ D               dq = dM k + scale e ∘ dQg
    dN = b ∘ dL ∘ D                 dk = dMᵀ q + (dN + dNᵀ) k + b e ∘ dKb + l ∘ dKt
    dv = b ∘ dX                     db = ⟨dX, v⟩ + ⟨dL, B⟩ + e ⟨dKb, k⟩

    d(G_i − G_j) = dL ∘ L + dP ∘ P, and in the last row ⟨dKt, Kt⟩_j more
    dG_i = ⟨dKb, Kb⟩ + ⟨dQg, Qg⟩, and in the last row γ dγ more

Symbols: those of `delta_chunks`; b, e, l `[Z, C, 1]`; B, D, M, N `[Z, C, C]`.

In small models an operation costs its call and not its arithmetic, so these lines stand in place of
autograd's, which are twice as many.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.arguments import state_dtype
from kernels.chunk_layout import HeadChunks
from kernels.delta_chunks import ChunkFactors, KeptChunks, chunks_backward, chunks_forward
from kernels.norm import unit_gradient, unit_vectors
from kernels.scalar_decay import decay_factors, decay_gradient

# Axis letters: B batch, T time, H heads, K key dim, V value dim, C position in a chunk, Z chunks
# of all sequences · HV.


class _Inputs(NamedTuple):
    """What the factors are made of, by the letters of the equations.

    Attributes:
        q: `[Z, C, K]`.
        k: `[Z, C, K]`.
        v: `[Z, C, V]`.
        beta: b.
        gram: B.
        between: D; None without a decay.
        entering: e; None without a decay.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    gram: Tensor
    between: Tensor | None
    entering: Tensor | None

    def factors(self, scale: float) -> ChunkFactors:
        """The factors of `delta_chunks`."""
        read = (self.q @ self.k.mT).mul_(scale)
        if self.between is None or self.entering is None:
            read.tril_()
            write_keys, retention = self.k, None
        else:
            read.mul_(self.between)
            write_keys, retention = self.between[:, -1, :, None] * self.k, self.entering[:, -1:]
        erase_strength, read_strength = self.strengths(scale)
        return ChunkFactors(
            erase=self.beta * self.gram,
            read=read,
            targets=self.beta * self.v,
            erase_keys=erase_strength * self.k,
            queries=read_strength * self.q,
            write_keys=write_keys,
            retention=retention,
        )

    def strengths(self, scale: float) -> tuple[Tensor, Tensor | float]:
        """What multiplies the keys that erase and the queries: b e and scale e."""
        if self.entering is None:
            return self.beta, scale
        return self.beta * self.entering, scale * self.entering

    def gradients(
        self, chunks: KeptChunks, d: ChunkFactors, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Those of q, k, v, beta and log_decay; writes over `d`."""
        q, k, v, beta, gram, between, entering = self
        along_keys = _row_sums(d.erase_keys, k)
        d_beta = _row_sums(d.targets, v).add_(_row_sums(d.erase, gram))
        erase_strength, read_strength = self.strengths(scale)
        d_log_decay = None
        if between is None or entering is None:
            d_beta.add_(along_keys)
        else:
            d_beta.addcmul_(entering, along_keys)
            d_log_decay = _d_log_decay(chunks, d, erase_strength * along_keys)
            d.read.mul_(between)
            d.erase.mul_(between)
            d.write_keys.mul_(between[:, -1, :, None])
        d_products, d_gram = d.read.mul_(scale), d.erase.mul_(beta)
        d_q = d.queries.mul_(read_strength).baddbmm_(d_products, k)
        d_k = d.write_keys.addcmul_(d.erase_keys, erase_strength)
        d_k.baddbmm_(d_products.mT, q).baddbmm_(d_gram + d_gram.mT, k)
        return d_q, d_k, d.targets.mul_(beta), d_beta, d_log_decay


def _row_sums(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩ `[Z, C, 1]`."""
    return (x * y).sum(-1, keepdim=True)


def _d_log_decay(chunks: KeptChunks, d: ChunkFactors, d_total: Tensor) -> Tensor:
    """The gradient of the log decay `[Z, C, 1]`; `d_total` ⟨dKb, Kb⟩, written over."""
    d_exponent = (d.erase * chunks.erase).addcmul_(d.read, chunks.read)
    d_exponent[:, -1].add_((d.write_keys * chunks.write_keys).sum(-1))
    d_total.add_(_row_sums(d.queries, chunks.queries))
    if d.retention is not None and chunks.retention is not None:
        d_total[:, -1:].addcmul_(d.retention, chunks.retention)
    return decay_gradient(d_exponent, d_total[..., 0])[..., None]


class _ScalarDelta(torch.autograd.Function):
    """Outputs, final states and residuals; see the head of this file."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        log_decay: Tensor | None,
        initial_state: Tensor | None,
        places: HeadChunks,
        scale: float,
        qk_l2norm: bool,  # noqa: FBT001 (`apply` takes no keywords)
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, beta = (
            places.split_keys(q),
            places.split_keys(k),
            places.split(v),
            places.split(beta),
        )
        q_inverse = k_inverse = between = entering = None
        if qk_l2norm:
            (q, q_inverse), (k, k_inverse) = unit_vectors(q), unit_vectors(k)
        gram = k @ k.mT
        if log_decay is not None:
            between, entering = decay_factors(places.split(log_decay)[..., 0])
            gram.mul_(between)
        if initial_state is None:
            initial = v.new_zeros(places.active[0], q.shape[-1], v.shape[-1])
        else:
            initial = places.split_states(initial_state)
        inputs = _Inputs(q, k, v, beta, gram, between, entering)
        out, final, chunks = chunks_forward(inputs.factors(scale), initial, places.active)
        ctx.save_for_backward(q_inverse, k_inverse, *inputs, *chunks)
        ctx.places, ctx.scale, ctx.has_initial = places, scale, initial_state is not None
        ctx.set_materialize_grads(False)
        return places.join(out), places.join_states(final), places.join(chunks.residuals)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_out: Tensor | None, d_final: Tensor | None, d_residual: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q_inverse, k_inverse, *saved = ctx.saved_tensors
        inputs, chunks, places = _Inputs(*saved[:7]), KeptChunks(*saved[7:]), ctx.places
        d, d_initial = chunks_backward(
            chunks,
            None if d_out is None else places.split(d_out),
            None if d_final is None else places.split_states(d_final),
            None if d_residual is None else places.split(d_residual),
            places.active,
        )
        d_q, d_k, d_v, d_beta, d_log_decay = inputs.gradients(chunks, d, ctx.scale)
        if q_inverse is not None:
            d_q = unit_gradient(d_q, inputs.q, q_inverse)
            d_k = unit_gradient(d_k, inputs.k, k_inverse)
        return (
            places.join_key_gradients(d_q),
            places.join_key_gradients(d_k),
            places.join(d_v),
            places.join(d_beta)[..., 0],
            None if d_log_decay is None else places.join(d_log_decay)[..., 0],
            places.join_states(d_initial) if ctx.has_initial else None,
            *[None] * 3,
        )


def scalar_delta_chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
    scale: float,
    initial_state: Tensor | None,
    qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, residual) of the gated delta rule, or the delta rule without decay.

    Args:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`.
        beta: write strength `[B, T, HV]`.
        log_decay: natural log of the decay `[B, T, HV]`; None where nothing decays.
        scale: factor of the read.
        initial_state: memory at the start `[sequences, HV, K, V]`; None for an empty one.
        qk_l2norm: scale q and k to unit length first.
        cu_seqlens: boundaries of packed sequences, or None.
        size: tokens of a chunk; None for `chunk_size`.
    """
    dtype, places = state_dtype(v.dtype), HeadChunks.of(q, v, cu_seqlens, size)
    out, final, residual = _ScalarDelta.apply(
        q.to(dtype),
        k.to(dtype),
        v.to(dtype),
        beta.to(dtype),
        None if log_decay is None else log_decay.to(dtype),
        initial_state,
        places,
        scale,
        qk_l2norm,
    )
    return out.to(v.dtype), final, residual.to(v.dtype)
