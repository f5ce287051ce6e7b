"""What the chunked forms share: the layout of chunks, the scan over states, the delta rule's core.

A row of T tokens is cut into chunks of C. Everything inside the chunks, for all chunks, batch rows
and heads at once, is a handful of batched products; only the states that enter the chunks form a
chain, of T / C steps with one product each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.norm import l2_norm

# Axis letters: B batch, T time, H heads, K key dim, V value dim, C position in a chunk,
# N chunks (those of all sequences, see `ChunkLayout`), Z = N · heads.


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Where each token of `[B, T, ...]` stands in a list of N chunks of C slots.

    The list starts with the first chunk of every sequence, goes on with every second chunk, and so
    on: what one step of the state scan needs lies together. Packed sequences have unequal numbers
    of chunks; they are sorted by length, longest first, so that those still running at any step are
    a prefix. Slots beyond a sequence's end hold zeros, which write nothing and forget nothing.

    Attributes:
        size: C.
        length: T.
        active: number of sequences at each step of the scan; never increases.
        order: the packed sequences, longest first; None for a batch of equal lengths.
        token_of_slot: the token in each slot of packed sequences, T where there is none; N × C.
        slot_of_token: the slot of each packed token.
    """

    size: int
    length: int
    active: tuple[int, ...]
    order: Tensor | None = None
    token_of_slot: Tensor | None = None
    slot_of_token: Tensor | None = None

    @classmethod
    def of_batch(cls, batch: int, length: int, size: int) -> "ChunkLayout":
        """The layout of `batch` sequences of equal length."""
        return cls(size, length, (batch,) * -(-length // size))

    @classmethod
    def of_packed(cls, cu_seqlens: Tensor, size: int) -> "ChunkLayout":
        """The layout of the sequences between the boundaries `cu_seqlens` `[N + 1]`."""
        bounds = cu_seqlens.cpu()
        lengths, order = bounds.diff().sort(descending=True, stable=True)
        num_chunks = (lengths + size - 1) // size
        active = tuple(int((num_chunks > step).sum()) for step in range(int(num_chunks[0])))
        starts = bounds[:-1][order]
        first = torch.cat([starts[:count] + i * size for i, count in enumerate(active)])
        end = torch.cat([(starts + lengths)[:count] for count in active])
        token = first[:, None] + torch.arange(size)
        length = int(bounds[-1])
        is_used = token < end[:, None]
        slot_of_token = torch.empty(length, dtype=torch.int64)
        slot_of_token[token[is_used]] = is_used.flatten().nonzero()[:, 0]
        device = cu_seqlens.device
        token_of_slot = token.where(is_used, torch.tensor(length)).flatten()
        return cls(
            size,
            length,
            active,
            order.to(device),
            token_of_slot.to(device),
            slot_of_token.to(device),
        )

    @classmethod
    def of(cls, q: Tensor, cu_seqlens: Tensor | None, size: int) -> "ChunkLayout":
        """The layout of tokens as in q `[B, T, ...]`, in chunks of at most `size`.

        Chunks are no longer than the longest sequence needs, rounded up to a power of two.
        """
        longest = q.shape[1] if cu_seqlens is None else int(cu_seqlens.diff().max())
        size = min(size, 1 << (longest - 1).bit_length())
        if cu_seqlens is None:
            return cls.of_batch(q.shape[0], q.shape[1], size)
        return cls.of_packed(cu_seqlens, size)

    def split(self, x: Tensor) -> Tensor:
        """`[B, T, H, D]` as chunks `[N, H, C, D]`, zero where a slot holds no token."""
        B, T, H, D = x.shape
        if self.token_of_slot is not None:
            padded = torch.cat([x[0], x.new_zeros(1, H, D)])
            x = padded.index_select(0, self.token_of_slot)
            return x.view(-1, self.size, H, D).transpose(1, 2).contiguous()
        missing = len(self.active) * self.size - T
        if missing:
            x = torch.nn.functional.pad(x, (0, 0, 0, 0, 0, missing))
        x = (
            x.view(B, -1, self.size, H, D)
            if x.is_contiguous()
            else x.reshape(B, -1, self.size, H, D)
        )
        return x.permute(1, 0, 3, 2, 4).reshape(-1, H, self.size, D)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `split`: chunks `[N, H, C, D]` as `[B, T, H, D]`."""
        N, H, C, D = x.shape
        if self.slot_of_token is not None:
            x = x.transpose(1, 2).reshape(N * C, H, D)
            return x.index_select(0, self.slot_of_token)[None]
        batch = self.active[0]
        x = x.view(-1, batch, H, C, D).permute(1, 0, 3, 2, 4)
        return x.reshape(batch, -1, H, D)[:, : self.length]

    def sort_states(self, states: Tensor) -> Tensor:
        """States of the sequences `[N, ...]` in the order of the scan."""
        return states if self.order is None else states.index_select(0, self.order)

    def unsort_states(self, states: Tensor) -> Tensor:
        """States in the order of the scan, in the order of the sequences again."""
        return states if self.order is None else states.index_select(0, self.order.argsort())


def _advanced(transition: Tensor, state: Tensor, update: Tensor) -> Tensor:
    """transition · state + update; a transition of one column is a diagonal matrix."""
    if transition.shape[-1] == 1:
        return torch.addcmul(update, transition, state)
    return torch.baddbmm(update, transition, state)


class _StateScan(torch.autograd.Function):
    """S_{n+1} = A_n S_n + B_n along the steps of a layout; see `scan_states`."""

    @staticmethod
    def forward(
        ctx: Any, transitions: Tensor, updates: Tensor, initial: Tensor, active: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        entering, final = torch.empty_like(updates), torch.empty_like(initial)
        state, start = initial, 0
        for count, next_count in zip(active, [*active[1:], 0], strict=True):
            rows = slice(start, start + count)
            entering[rows] = state
            state = _advanced(transitions[rows], state, updates[rows])
            final[next_count:count] = state[next_count:]
            state, start = state[:next_count], start + count
        ctx.save_for_backward(transitions, entering)
        ctx.active = active
        return entering, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_entering: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        transitions, entering = ctx.saved_tensors
        d_updates = torch.empty_like(entering)
        is_diagonal = transitions.shape[-1] == 1
        adjoint = transitions if is_diagonal else transitions.mT
        d_state, end = d_final[:0], entering.shape[0]
        for count in reversed(ctx.active):
            rows = slice(end - count, end)
            # Sequences whose last chunk this is join the reverse scan with their final state.
            if count > d_state.shape[0]:
                d_state = torch.cat([d_state, d_final[d_state.shape[0] : count]])
            d_updates[rows] = d_state
            d_state = _advanced(adjoint[rows], d_state, d_entering[rows])
            end -= count
        if is_diagonal:
            d_transitions = (d_updates * entering).sum_to_size(transitions.shape)
        else:
            d_transitions = d_updates @ entering.mT
        return d_transitions, d_updates, d_state, None


def scan_states(
    transitions: Tensor, updates: Tensor, initial: Tensor, active: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The states that enter the chunks, and the final state of every sequence.

    S_{n+1} = A_n S_n + B_n, one chain for each sequence and head.

    Args:
        transitions: A `[Z, K, K]`, or `[Z, K | 1, 1]` for diagonal ones, in a layout's order.
        updates: B `[Z, K, V]`.
        initial: S_0 of every sequence and head, `[active[0], K, V]`.
        active: number of chains at each step; never increases, sums to Z.

    Returns:
        The entering states `[Z, K, V]` and the final ones `[active[0], K, V]`.
    """
    return _StateScan.apply(transitions, updates, initial, active)


@dataclass(frozen=True, slots=True)
class DeltaChunks:
    """The factors of the chunked delta rule, for every chunk and value head (Z of them).

    With G the log decay summed inside the chunk, inclusive, and S the state that enters:

        R = (I + L)⁻¹ (X − Kb S)        the residuals
        O = Qg S + P R                  the reads
        S' = Diag(γ) S + Ktᵀ R          the state after the chunk

    Attributes:
        erase: L_ij = Σ_c b_ic k_ic k_jc exp(G_ic − G_jc) for j < i `[Z, C, C]`; the diagonal and
            what lies above are never read.
        read: P_ij = scale Σ_c q_ic k_jc exp(G_ic − G_jc) for j ≤ i, else 0 `[Z, C, C]`.
        targets: X = w ∘ v `[Z, C, V]`.
        erase_keys: Kb = b ∘ k ∘ exp(G) `[Z, C, K]`.
        queries: Qg = scale q ∘ exp(G) `[Z, C, K]`.
        write_keys: Kt = k ∘ exp(G_C − G) `[Z, C, K]`.
        retention: γ = exp(G_C) `[Z, K, 1]`, or `[Z, 1, 1]`, or None for no decay.
    """

    erase: Tensor
    read: Tensor
    targets: Tensor
    erase_keys: Tensor
    queries: Tensor
    write_keys: Tensor
    retention: Tensor | None

    def run(self, initial: Tensor, active: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs `[Z, C, V]`, final states `[active[0], K, V]` and residuals `[Z, C, V]`.

        One triangular solve serves X and Kb together. With U and W its two parts, R = U − W S, so
        a chunk maps its state by the K × K matrix A = Diag(γ) − Ktᵀ W and adds Ktᵀ U: the chain
        over chunks is one product a step, and all else is parallel.
        """
        V, K = self.targets.shape[-1], self.erase_keys.shape[-1]
        solved = torch.linalg.solve_triangular(
            self.erase,
            torch.cat([self.targets, self.erase_keys], -1),
            upper=False,
            unitriangular=True,
        )
        values, keys = solved.split((V, K), -1)
        updates, forgotten = (self.write_keys.mT @ solved).split((V, K), -1)
        identity = torch.eye(K, dtype=solved.dtype, device=solved.device)
        kept = identity if self.retention is None else self.retention * identity
        entering, final = scan_states(kept - forgotten, updates, initial, active)
        residuals = torch.baddbmm(values, keys, entering, alpha=-1)
        out = torch.baddbmm(self.queries @ entering, self.read, residuals)
        return out, final, residuals


@dataclass(frozen=True, slots=True)
class ChunkedInputs:
    """q, k and v of one call, cut into chunks, in the dtype of the arithmetic.

    Attributes:
        layout: where the tokens went.
        q: the scaled queries `[N, H, 1, C, K]`.
        k: the keys `[N, H, 1, C, K]`.
        v: the values `[N, H, G, C, V]`, G value heads for each key head.
        initial: the states at the start `[sequences · HV, K, V]`.
    """

    layout: ChunkLayout
    q: Tensor
    k: Tensor
    v: Tensor
    initial: Tensor

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        scale: float,
        initial_state: Tensor | None,
        cu_seqlens: Tensor | None,
        qk_l2norm: bool,
        size: int,
    ) -> "ChunkedInputs":
        """Cuts q, k `[B, T, H, K]` and v `[B, T, HV, V]`; an absent initial state is zero."""
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        if qk_l2norm:
            q, k = l2_norm(q), l2_norm(k)
        layout = ChunkLayout.of(q, cu_seqlens, size)
        H, K = q.shape[2:]
        HV, V = v.shape[2:]
        if initial_state is None:
            initial = v.new_zeros(layout.active[0] * HV, K, V)
        else:
            initial = layout.sort_states(initial_state).reshape(-1, K, V)
        return cls(
            layout,
            layout.split(q * scale).unsqueeze(2),
            layout.split(k).unsqueeze(2),
            layout.split(v).unflatten(1, (H, HV // H)),
            initial,
        )

    def split_gate(self, gate: Tensor) -> Tensor:
        """A gate `[B, T, HV]` or `[B, T, HV, D]` as `[N, H, G, C, 1 or D]`."""
        gate = gate[..., None] if gate.ndim == 3 else gate
        return self.layout.split(gate.to(self.v.dtype)).unflatten(1, self.v.shape[1:3])

    @property
    def active(self) -> list[int]:
        """Number of chains of the scan at each step: sequences times value heads."""
        heads = self.v.shape[1] * self.v.shape[2]
        return [count * heads for count in self.layout.active]

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Chunks `[Z, C, V]` as `[B, T, HV, V]` of `dtype`."""
        N, H, G, C, _ = self.v.shape
        return self.layout.join(x.view(N, H * G, C, -1)).to(dtype)

    def join_states(self, states: Tensor) -> Tensor:
        """States `[sequences · HV, K, V]` as `[sequences, HV, K, V]`, in the caller's order."""
        heads = self.v.shape[1] * self.v.shape[2]
        return self.layout.unsort_states(states.unflatten(0, (-1, heads)))
