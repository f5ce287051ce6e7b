"""Which error a delta rule hands on: what it wrote, or what the memory got wrong.

With S_{t−1} the memory before token t, α_t its decay, k_t a unit key and β_t the write strength:

    written   u_t = β_t (v_t − α_t S_{t−1}ᵀ k_t)
    decayed   v_t − α_t S_{t−1}ᵀ k_t
    paper     v_t − S_{t−1}ᵀ k_t

arXiv 2607.07953 defines routing by the last one; its public code, and so its numbers, route the
first, which differs wherever β ≠ 1 or α ≠ 1.

The last two need S_{t−1}ᵀ k_t, which no rule returns. Dividing u by β and α would lose it where
either is small, so it is read again: the memory is additive in u, hence S_{t−1}ᵀ k_t is what linear
attention over keys k and values u returns at t − 1 for the query k_t.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kernels import l2_norm, linear_attention


def reads_before(
    k: Float[Tensor, "B T H K"],
    written: Float[Tensor, "B T HV V"],
    *,
    log_decay: Float[Tensor, "B T HV"] | None,
    memory: Float[Tensor, "B HV K V"] | None,
    impl: str,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> Float[Tensor, "B T HV V"]:
    """S_{t−1}ᵀ k_t for every token of a sequence, or of every part of a packed row.

    Args:
        k: keys before their scaling to unit length.
        written: u.
        log_decay: of the rule; None where it has none.
        memory: S before the first token; None for an empty one.
        impl: implementation of linear attention.
        cu_seqlens: where the parts of one row (B = 1) begin, each with an empty memory.
    """
    k = l2_norm(k)
    if cu_seqlens is not None:
        return _packed_reads_before(k, written, log_decay, cu_seqlens, impl)
    first = read_before(k[:, 0], memory) if memory is not None else torch.zeros_like(written[:, 0])
    if k.shape[1] == 1:
        return first[:, None]
    later, _ = linear_attention(
        k[:, 1:],
        k[:, :-1],
        written[:, :-1],
        log_decay=None if log_decay is None else log_decay[:, :-1],
        feature_map="identity",
        normalize=False,
        scale=1.0,
        initial_state=memory,
        impl=impl,
    )
    return torch.cat([first[:, None].to(later.dtype), later], dim=1)


def _packed_reads_before(
    k: Tensor, written: Tensor, log_decay: Tensor | None, cu_seqlens: Tensor, impl: str
) -> Tensor:
    """As `reads_before`, for unit keys: each token writes what the one before it wrote.

    The first token of a part writes nothing, so that the parts keep their lengths.
    """
    starts = cu_seqlens[:-1]

    def delayed(x: Tensor) -> Tensor:
        return x.roll(1, dims=1).index_fill(1, starts, 0)

    read, _ = linear_attention(
        k,
        delayed(k),
        delayed(written),
        log_decay=None if log_decay is None else delayed(log_decay),
        feature_map="identity",
        normalize=False,
        scale=1.0,
        cu_seqlens=cu_seqlens,
        impl=impl,
    )
    return read


def read_before(
    unit_k: Float[Tensor, "B H K"], memory: Float[Tensor, "B HV K V"]
) -> Float[Tensor, "B HV V"]:
    """Sᵀ k for one token, in float32; value head h reads with key head h // (HV / H)."""
    repeats = memory.shape[1] // unit_k.shape[1]
    per_value_head = unit_k.to(memory.dtype).repeat_interleave(repeats, dim=1)
    return torch.einsum("bhkv,bhk->bhv", memory, per_value_head)


def plain_error(
    v: Float[Tensor, "... HV V"],
    read: Float[Tensor, "... HV V"],
    *,
    log_decay: Float[Tensor, "... HV"] | None,
    residual: str,
) -> Float[Tensor, "... HV V"]:
    """`decayed` or `paper` from the value and what the memory before the token returns.

    Args:
        v: values to store.
        read: S_{t−1}ᵀ k_t.
        log_decay: of the rule; None where it has none.
        residual: `decayed` or `paper`.
    """
    if residual == "decayed" and log_decay is not None:
        read = read * log_decay.exp()[..., None]
    return v - read.to(v.dtype)
