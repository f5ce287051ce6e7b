"""The layout of chunks: where each token of a batch or of packed sequences stands.

A row of T tokens is cut into chunks of C. Everything inside the chunks is done for all chunks,
batch rows and heads at once, in batched products; only the states that enter the chunks form a
chain.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.arguments import state_dtype
from kernels.norm import l2_norm

# Axis letters: B batch, T time, H heads, HV value heads, K key dim, V value dim, C position in a
# chunk, N chunks of all sequences, Z = N · HV.


def chunk_size(key_dim: int) -> int:
    """C for heads of this key dim: the largest power of two up to K, from 16 to 64.

    Inside a chunk the work per token grows with C, between chunks with K² / C, so that they balance
    near C = K; beyond 64 the triangular solve outgrows everything else.
    """
    return min(64, max(16, 1 << (key_dim.bit_length() - 1)))


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
        token_of_slot: the token in each slot of packed sequences `[N · C]`, T where there is none.
        slot_of_token: the slot of each packed token `[T]`.
    """

    size: int
    length: int
    active: tuple[int, ...]
    order: Tensor | None = None
    token_of_slot: Tensor | None = None
    slot_of_token: Tensor | None = None

    @classmethod
    def of(cls, batch: int, length: int, cu_seqlens: Tensor | None, max_size: int) -> "ChunkLayout":
        """The layout of `batch` rows of `length` tokens, or of the sequences packed into one row.

        C is `max_size`, or the power of two that holds the longest sequence, if that is less.
        """
        longest = length if cu_seqlens is None else int(cu_seqlens.diff().max())
        size = min(max_size, 1 << (longest - 1).bit_length())
        if cu_seqlens is None:
            return cls(size, length, (batch,) * -(-length // size))
        return cls._of_packed(cu_seqlens, size)

    @classmethod
    def _of_packed(cls, cu_seqlens: Tensor, size: int) -> "ChunkLayout":
        bounds = cu_seqlens.cpu().long()
        lengths, order = bounds.diff().sort(descending=True, stable=True)
        starts, ends = bounds[:-1][order], bounds[1:][order]
        num_chunks = (lengths + size - 1) // size
        active = tuple(int((num_chunks > step).sum()) for step in range(int(num_chunks[0])))
        first = torch.cat([starts[:count] + step * size for step, count in enumerate(active)])
        end = torch.cat([ends[:count] for count in active])
        token = first[:, None] + torch.arange(size)
        is_used, length = token < end[:, None], int(bounds[-1])
        slot_of_token = torch.empty(length, dtype=torch.int64)
        slot_of_token[token[is_used]] = is_used.flatten().nonzero()[:, 0]
        token_of_slot = token.masked_fill(~is_used, length).flatten()
        device = cu_seqlens.device
        indices = (x.to(device) for x in (order, token_of_slot, slot_of_token))
        return cls(size, length, active, *indices)

    def split(self, x: Tensor) -> Tensor:
        """`[B, T, H, D]` as chunks `[N · H, C, D]`, zero where a slot holds no token."""
        B, T, H, D = x.shape
        if self.token_of_slot is not None:
            padded = torch.cat([x[0], x.new_zeros(1, H, D)])
            slots = padded.index_select(0, self.token_of_slot).view(-1, self.size, H, D)
            return slots.transpose(1, 2).reshape(-1, self.size, D)
        missing = len(self.active) * self.size - T
        if missing:
            x = functional.pad(x, (0, 0, 0, 0, 0, missing))
        x = x.reshape(B, -1, self.size, H, D).permute(1, 0, 3, 2, 4)
        return x.reshape(-1, self.size, D)

    def join(self, x: Tensor, heads: int) -> Tensor:
        """The inverse of `split`: chunks `[N · H, C, D]` as `[B, T, H, D]`."""
        D, batch = x.shape[-1], self.active[0]
        if self.slot_of_token is not None:
            slots = x.view(-1, heads, self.size, D).transpose(1, 2).reshape(-1, heads, D)
            return slots.index_select(0, self.slot_of_token)[None]
        x = x.view(-1, batch, heads, self.size, D).permute(1, 0, 3, 2, 4)
        return x.reshape(batch, -1, heads, D)[:, : self.length]

    def sort_states(self, states: Tensor) -> Tensor:
        """States of the sequences, one a row, in the order of the scan."""
        return states if self.order is None else states.index_select(0, self.order)

    def unsort_states(self, states: Tensor) -> Tensor:
        """States in the order of the scan, one a row, in the order of the sequences again."""
        return states if self.order is None else states.index_select(0, self.order.argsort())


@dataclass(frozen=True, slots=True)
class HeadChunks:
    """The chunks of one call for each value head; a `join` undoes its `split` and is its adjoint.

    Attributes:
        layout: where the tokens go.
        heads: HV.
        group: value heads of each key head.
    """

    layout: ChunkLayout
    heads: int
    group: int

    @classmethod
    def of(cls, q: Tensor, v: Tensor, cu_seqlens: Tensor | None, size: int | None) -> "HeadChunks":
        """Of q `[B, T, H, K]` and v `[B, T, HV, V]`, in chunks of `size` or `chunk_size(K)`."""
        (B, T, H, K), HV = q.shape, v.shape[2]
        layout = ChunkLayout.of(B, T, cu_seqlens, chunk_size(K) if size is None else size)
        return cls(layout, HV, HV // H)

    @property
    def active(self) -> list[int]:
        """Number of chains of the scan at each step: sequences times value heads."""
        return [count * self.heads for count in self.layout.active]

    def split(self, x: Tensor) -> Tensor:
        """`[B, T, HV, D]` or a gate `[B, T, HV]` as chunks `[Z, C, D or 1]`."""
        return self.layout.split(x[..., None] if x.ndim == 3 else x)

    def join(self, x: Tensor) -> Tensor:
        """Chunks `[Z, C, D]` as `[B, T, HV, D]`."""
        return self.layout.join(x, self.heads)

    def per_value_head(self, x: Tensor) -> Tensor:
        """`[N · H, ...]` as `[Z, ...]`: that of its key head for each value head."""
        return x if self.group == 1 else x.repeat_interleave(self.group, 0)

    def split_keys(self, x: Tensor) -> Tensor:
        """Queries or keys `[B, T, H, K]` as chunks `[Z, C, K]`."""
        return self.per_value_head(self.layout.split(x))

    def join_key_gradients(self, d_x: Tensor) -> Tensor:
        """Gradients `[Z, C, K]` as `[B, T, H, K]`, those of a key head's value heads summed."""
        if self.group > 1:
            d_x = d_x.unflatten(0, (-1, self.group)).sum(1)
        return self.layout.join(d_x, self.heads // self.group)

    def split_states(self, states: Tensor) -> Tensor:
        """States `[sequences, HV, K, V]` as `[sequences · HV, K, V]`, in the order of the scan."""
        return self.layout.sort_states(states).flatten(0, 1)

    def join_states(self, states: Tensor) -> Tensor:
        """States `[sequences · HV, K, V]` as `[sequences, HV, K, V]`, in the caller's order."""
        return self.layout.unsort_states(states.unflatten(0, (-1, self.heads)))


@dataclass(frozen=True, slots=True)
class ChunkedInputs:
    """q, k and v of one call, cut into chunks, in the dtype of the arithmetic.

    Attributes:
        chunks: where the tokens went.
        q: the scaled queries `[N · H, C, K]`.
        k: the keys `[N · H, C, K]`.
        v: the values `[Z, C, V]`.
        initial: the states at the start `[sequences · HV, K, V]`, in the order of the scan.
    """

    chunks: HeadChunks
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
        size: int | None,
    ) -> "ChunkedInputs":
        """Cuts q, k `[B, T, H, K]` and v `[B, T, HV, V]`; an absent initial state is zero."""
        dtype, chunks = state_dtype(v.dtype), HeadChunks.of(q, v, cu_seqlens, size)
        q, k, v = (chunks.layout.split(x.to(dtype)) for x in (q, k, v))
        if qk_l2norm:
            q, k = l2_norm(q), l2_norm(k)
        if initial_state is None:
            initial = v.new_zeros(chunks.active[0], q.shape[-1], v.shape[-1])
        else:
            initial = chunks.split_states(initial_state)
        return cls(chunks, q * scale, k, v, initial)

    def split_gate(self, gate: Tensor) -> Tensor:
        """A gate `[B, T, HV]` or `[B, T, HV, D]` as chunks `[Z, C, 1 or D]`."""
        return self.chunks.split(gate.to(self.v.dtype))

    def per_value_head(self, x: Tensor) -> Tensor:
        """`[N · H, ...]` as `[Z, ...]`: that of its key head for each value head."""
        return self.chunks.per_value_head(x)

    def join(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Chunks `[Z, C, V]` as `[B, T, HV, V]` of `dtype`."""
        return self.chunks.join(x).to(dtype)
