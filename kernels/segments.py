"""Joining the segments of a split sequence: from what each does alone to where each starts.

A segment maps memory by S -> Π S + E. Walking the segments in order from the initial memory gives
the memory each starts from; walking them in reverse with Πᵀ does the same for gradients. The map is
exact, so a split changes rounding only. Cost: one K × K by K × V product per segment and head.
Additive memory, whose Π is I, needs no kernel for its sum: `linear_attention_scan`.
"""

import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch_kernel
from kernels.tiles import tile_width


@triton.jit
def join_segments_kernel(
    local_end,
    transition,
    initial,
    start,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BJ: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HV: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Writes `start` `[N, SEGMENTS, HV, K, V]` from `local_end` (same shape) and `transition`.

    Grid: sequences × HV × value blocks. The memory passes through `start` between two segments, so
    that a product can take it in slices of BJ channels; each program reads only what it wrote.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0).to(tl.int64)
    i_v = (i_program % BLOCKS).to(tl.int32)
    i_h = i_program // BLOCKS % HV
    i_n = i_program // (BLOCKS * HV)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_kv = (o_k < K)[:, None] & m_v[None, :]
    o_kv = o_k[:, None] * V + o_v[None, :]
    b_state = tl.zeros([BK, BV], tl.float32)
    if HAS_INITIAL:
        b_state = tl.load(initial + (i_n * HV + i_h) * K * V + o_kv, mask=m_kv, other=0.0)
    for i in range(SEGMENTS):
        i_s = SEGMENTS - 1 - i if REVERSE else i
        i_state = (i_n * SEGMENTS + i_s) * HV + i_h
        tl.store(start + i_state * K * V + o_kv, b_state, mask=m_kv)
        if i < SEGMENTS - 1:
            # Every thread of the program must see the whole memory before it is read in slices.
            tl.debug_barrier()
            b_state = tl.load(local_end + i_state * K * V + o_kv, mask=m_kv, other=0.0)
            for i_j in range((K + BJ - 1) // BJ):
                o_j = i_j * BJ + tl.arange(0, BJ)
                if REVERSE:
                    o_kj = o_k[:, None] + o_j[None, :] * K
                else:
                    o_kj = o_k[:, None] * K + o_j[None, :]
                m_kj = (o_k < K)[:, None] & (o_j < K)[None, :]
                m_jv = (o_j < K)[:, None] & m_v[None, :]
                b_map = tl.load(transition + i_state * K * K + o_kj, mask=m_kj, other=0.0)
                b_part = tl.load(
                    start + i_state * K * V + o_j[:, None] * V + o_v[None, :], mask=m_jv, other=0.0
                )
                b_state = tl.dot(b_map, b_part, b_state, input_precision="tf32x3")


def join_segments(
    local_end: Tensor,
    transition: Tensor,
    initial: Tensor | None,
    start: Tensor,
    *,
    reverse: bool = False,
) -> None:
    """Writes the memory that each segment starts from, or the gradient behind it, into `start`.

    Args:
        local_end: what each segment leaves of an empty memory `[N, S, HV, K, V]`, float32; the
            segment that is walked last is not read.
        transition: what each segment does to memory `[N, S, HV, K, K]`.
        initial: where the walk starts `[N, HV, K, V]`; None for an empty memory.
        start: shaped as `local_end`.
        reverse: walk from the last segment to the first, through the transposed transitions.
    """
    count, segments, HV, K, V = local_end.shape
    block_v = 64
    launch_kernel(
        join_segments_kernel,
        count * HV * -(-V // block_v),
        local_end=local_end,
        transition=transition,
        initial=initial,
        start=start,
        K=K,
        V=V,
        BK=tile_width(K),
        BV=block_v,
        BJ=64,
        SEGMENTS=segments,
        HV=HV,
        HAS_INITIAL=initial is not None,
        REVERSE=reverse,
        num_warps=8,
        num_stages=1,
    )
