"""Forward kernels of the delta rule with decay per channel (Kimi delta rule, gated delta rule 2).

Equation, for a chunk of C tokens with the memory S entering it and G the log decay summed inside
the chunk, inclusive:

    L_ij = Σ_c erase_ic k_ic k_jc e^{G_ic − G_jc}    (j < i)
    P_ij = scale Σ_c q_ic k_jc e^{G_ic − G_jc}        (j ≤ i)
    R   = (I + L)^-1 (write∘v − (erase∘k∘e^G) S)               the residuals u of the chunk
    out = (scale·q∘e^G) S + P R
    S'  = Diag(e^{G_C}) S + (k∘e^{G_C − G})ᵀ R

Symbols: as in `kernels.reference`; the names of what passes between the kernels are listed in
`channel_delta_launch.Prepared`, the dialect of their code in `kernels.blocks`. How the decay
between two tokens becomes factors of rows: `kernels.intervals`.

Source: Kimi Linear (arXiv 2510.26692) and "Linear Attention Architectures" (arXiv 2607.07953).
They apply the inverse to both operands (W, U) and form R = U − W S; we apply it once, to the
difference, so that W and U are neither formed nor stored. fla (kernels of the same papers) keeps
the decay as a tensor of running sums and needs three ways to exponentiate differences of it.

Cost per token and value head: 6·K·V + 4·C·(K + V) FLOPs. The operands stored between the kernels
take (3·K + 2·C) numbers of the input's dtype per token and head; training also stores K·V numbers
per chunk and head (the memory entering it).
"""

import triton
import triton.language as tl

from kernels.blocks import first_chunk, locate_chunk, sequence_bounds
from kernels.intervals import (
    base_2,
    interval_sums,
    is_later,
    separated_below,
    unit_lower_inverse,
)


@triton.jit
def row_norms(x, rows, m, stride, K: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(Σ_K x² + 1e-6) of the rows of one head: [C] float32."""
    squares = tl.zeros_like(rows).to(tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        at = rows[:, None] * stride + o_k[None, :]
        b_x = tl.load(x + at, mask=m[:, None] & (o_k < K)[None, :], other=0.0).to(tl.float32)
        squares += tl.sum(b_x * b_x, 1)
    return 1.0 / tl.sqrt_rn(squares + 1e-6)


@triton.jit
def channel_delta_prepare_kernel(
    q,
    k,
    log_decay,
    erase,
    q_norm,
    k_norm,
    q_read,
    k_erase,
    k_write,
    solve,
    scores,
    strength,
    chunk_total,
    masks,
    cu_seqlens,
    chunk_offsets,
    chunk_owners,
    T,
    num_sequences,
    stride_q,
    stride_k,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    EXACT: tl.constexpr,
    ONE_CUT_TOTAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (chunks · HV). All that the scans need of q, k, log_decay and erase, chunk by chunk."""
    i_hv = tl.program_id(0).to(tl.int64) % HV
    i_chunk = tl.program_id(0).to(tl.int64) // HV
    i_h = i_hv // (HV // H)
    i_n, i_c = locate_chunk(chunk_owners, chunk_offsets, i_chunk, T, C, PACKED)
    if i_n >= num_sequences:
        return
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    start = i_first + i_c * C
    rows = tl.arange(0, C)
    m = rows < num_tokens - i_c * C
    # from here on pointers stand at the chunk's first token and this head
    first = start * HV + i_hv
    q += start * stride_q + i_h * K
    k += start * stride_k + i_h * K

    if UNIT:
        b_q_norm = row_norms(q, rows, m, stride_q, K, BK)
        b_k_norm = row_norms(k, rows, m, stride_k, K, BK)
        if i_hv % (HV // H) == 0:
            tl.store(q_norm + start * H + i_h + rows * H, b_q_norm, mask=m)
            tl.store(k_norm + start * H + i_h + rows * H, b_k_norm, mask=m)
    if not CHANNEL_GATES:
        b_beta = tl.load(erase + first + rows * HV, mask=m, other=0.0).to(tl.float32)
        tl.store(strength + first + rows * HV, b_beta, mask=m)

    b_P = tl.zeros([C, C], tl.float32)
    b_L = tl.zeros([C, C], tl.float32)
    b_diagonal = tl.zeros([C], tl.float32)
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = m[:, None] & (o_k < K)[None, :]
        at_k = rows[:, None] * (HV * K) + o_k[None, :]
        b_g = base_2(tl.load(log_decay + first * K + at_k, mask=m_k, other=0.0))
        b_q = tl.load(q + rows[:, None] * stride_q + o_k[None, :], mask=m_k, other=0.0)
        b_k = tl.load(k + rows[:, None] * stride_k + o_k[None, :], mask=m_k, other=0.0)
        dtype = b_q.dtype
        b_q = b_q.to(tl.float32)
        b_k = b_k.to(tl.float32)
        if UNIT:
            b_q *= b_q_norm[:, None]
            b_k *= b_k_norm[:, None]
        if CHANNEL_GATES:
            b_bk = b_k * tl.load(erase + first * K + at_k, mask=m_k, other=0.0).to(tl.float32)
        else:
            b_bk = b_k * b_beta[:, None]
        b_diagonal += tl.sum(b_q * b_k, 1)

        # rows beyond the last token decay no further
        b_total = tl.sum(b_g, 0)
        tl.store(chunk_total + (i_chunk * HV + i_hv) * K + o_k, b_total, mask=o_k < K)
        b_sum = tl.cumsum(b_g, 0)
        if tl.min(b_total) >= ONE_CUT_TOTAL:
            # relative to half of the chunk's decay; what lies above the diagonal is dropped below
            b_sum -= 0.5 * b_total[None, :]
            b_half = tl.math.exp2(0.5 * b_total)[None, :]
            b_in = tl.math.exp2(b_sum)
            b_out = tl.math.exp2(-b_sum)
            b_x = tl.trans((b_k * b_out).to(dtype))
            b_P = tl.dot((b_q * b_in).to(dtype), b_x, b_P, input_precision=PRECISION)
            b_L = tl.dot((b_bk * b_in).to(dtype), b_x, b_L, input_precision=PRECISION)
            b_in *= b_half
            b_out *= b_half
        else:
            at_mask = rows[:, None] * C + rows[None, :]
            for level in range(LEVELS):
                later = is_later(rows, level)[:, None]
                pairs = separated_below(rows, level)
                b_mask = tl.load(masks + level * C * C + at_mask)
                b_E = tl.math.exp2(interval_sums(b_mask, b_g, EXACT, PRECISION))
                # rows behind a cut are queries there, rows before it keys; one tile holds both
                b_x = (tl.where(later, b_q, b_k) * b_E).to(dtype)
                b_x = tl.dot(b_x, tl.trans(b_x), input_precision=PRECISION)
                b_P += tl.where(pairs, b_x, 0.0)
                b_x = (tl.where(later, b_bk, b_k) * b_E).to(dtype)
                b_x = tl.dot(b_x, tl.trans(b_x), input_precision=PRECISION)
                b_L += tl.where(pairs, b_x, 0.0)
            b_in = tl.math.exp2(b_sum)
            b_out = tl.math.exp2(tl.cumsum(b_g, 0, reverse=True) - b_g)

        tl.store(q_read + first * K + at_k, (b_q * b_in * scale).to(dtype), mask=m_k)
        tl.store(k_erase + first * K + at_k, (b_bk * b_in).to(dtype), mask=m_k)
        tl.store(k_write + first * K + at_k, (b_k * b_out).to(dtype), mask=m_k)

    below = rows[:, None] > rows[None, :]
    b_diagonal = tl.where(rows[:, None] == rows[None, :], b_diagonal[:, None], 0.0)
    b_P = tl.where(below, b_P, b_diagonal) * scale
    b_L = tl.where(below, b_L, 0.0)
    at_c = rows[:, None] * (HV * C) + rows[None, :]
    tl.store(scores + first * C + at_c, b_P.to(scores.dtype.element_ty), mask=m[:, None])
    b_M = unit_lower_inverse(b_L, rows, LEVELS, PRECISION)
    tl.store(solve + first * C + at_c, b_M.to(solve.dtype.element_ty), mask=m[:, None])


@triton.jit
def channel_delta_scan_kernel(
    q_read,
    k_erase,
    k_write,
    solve,
    scores,
    strength,
    chunk_total,
    v,
    write,
    start,
    out,
    residual,
    chunk_state,
    end,
    transition,
    cu_seqlens,
    chunk_offsets,
    T,
    stride_v,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PACKED: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    HAS_START: tl.constexpr,
    SUMMARY: tl.constexpr,
    STORE_STATES: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (sequences · SEGMENTS · HV · column tiles). Walks the chunks of a segment in order.

    `start` [N, SEGMENTS, HV, K, V] is the memory entering each segment, `end` [N, HV, K, V] that
    behind the sequence.

    A SUMMARY finds what a segment does to any memory entering it, S ↦ A S + Z: Z is the memory
    after the segment from an empty one; the columns of A follow the same rule from the columns of
    the identity, with nothing written. Column tiles beyond those of V are A's. Then `end` is Z
    [N, SEGMENTS, HV, K, V] and `transition` A [N, SEGMENTS, HV, K, K].
    """
    TILES_V: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = TILES_V + ((K + BV - 1) // BV if SUMMARY else 0)
    i_program = tl.program_id(0).to(tl.int64)
    i_tile = (i_program % TILES).to(tl.int32)
    i_state = i_program // TILES
    i_hv = i_state % HV
    i_s = (i_state // HV % SEGMENTS).to(tl.int32)
    i_n = i_state // (HV * SEGMENTS)
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    i_chunk0 = first_chunk(chunk_offsets, i_n, T, C, PACKED)
    num_chunks = tl.cdiv(num_tokens, C)
    segment = tl.cdiv(num_chunks, SEGMENTS)

    rows = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    o_v = i_tile * BV + tl.arange(0, BV)
    o_A = o_v - TILES_V * BV
    m_v = o_v < V
    at_k = rows[:, None] * (HV * K) + o_k[None, :]
    at_c = rows[:, None] * (HV * C) + rows[None, :]
    at_v = rows[:, None] * (HV * V) + o_v[None, :]
    at_state = o_k[:, None] * V + o_v[None, :]
    m_state = (o_k < K)[:, None] & m_v[None, :]
    b_S = tl.zeros([KP, BV], tl.float32)
    if HAS_START:
        b_S = tl.load(start + i_state * K * V + at_state, mask=m_state, other=0.0)
    if SUMMARY:
        b_S += tl.where(o_k[:, None] == o_A[None, :], 1.0, 0.0)

    for i_c in tl.range(
        i_s * segment, tl.minimum(i_s * segment + segment, num_chunks), num_stages=STAGES
    ):
        t = i_first + i_c * C
        m = rows < num_tokens - i_c * C
        m_k = m[:, None] & (o_k < K)[None, :]
        m_tile = m[:, None] & m_v[None, :]
        first = t * HV + i_hv
        i_memory = (i_chunk0 + i_c) * HV + i_hv
        # asked for first, since it is not copied ahead as tiles are
        b_total = tl.load(chunk_total + i_memory * K + o_k, mask=o_k < K, other=0.0)
        b_ke = tl.load(k_erase + first * K + at_k, mask=m_k, other=0.0)
        b_kw = tl.load(k_write + first * K + at_k, mask=m_k, other=0.0)
        b_M = tl.load(solve + first * C + at_c, mask=m[:, None], other=0.0)
        at = rows[:, None] * stride_v + o_v[None, :]
        b_v = tl.load(v + t * stride_v + i_hv * V + at, mask=m_tile, other=0.0)
        if CHANNEL_GATES:
            b_w = tl.load(write + first * V + at_v, mask=m_tile, other=0.0).to(tl.float32)
        else:
            b_w = tl.load(strength + first + rows * HV, mask=m, other=0.0)[:, None]

        # operand copy; the running memory stays float32
        b_So = b_S.to(b_ke.dtype)
        if STORE_STATES:
            tl.store(chunk_state + i_memory * K * V + at_state, b_So, mask=m_state)
        b_Y = b_v.to(tl.float32) * b_w - tl.dot(b_ke, b_So, input_precision=PRECISION)
        b_R = tl.dot(b_M, b_Y.to(b_ke.dtype), input_precision=PRECISION).to(b_ke.dtype)
        if not SUMMARY:
            b_q = tl.load(q_read + first * K + at_k, mask=m_k, other=0.0)
            b_P = tl.load(scores + first * C + at_c, mask=m[:, None], other=0.0)
            b_o = tl.dot(b_q, b_So, input_precision=PRECISION)
            b_o = tl.dot(b_P, b_R, b_o, input_precision=PRECISION)
            tl.store(out + first * V + at_v, b_o.to(out.dtype.element_ty), mask=m_tile)
            tl.store(residual + first * V + at_v, b_R, mask=m_tile)
        b_S *= tl.math.exp2(b_total)[:, None]
        b_S = tl.dot(tl.trans(b_kw), b_R, b_S, input_precision=PRECISION)

    if SUMMARY:
        tl.store(end + i_state * K * V + at_state, b_S, mask=m_state)
        at_A = i_state * K * K + o_k[:, None] * K + o_A[None, :]
        m_A = (o_k < K)[:, None] & ((o_A >= 0) & (o_A < K))[None, :]
        tl.store(transition + at_A, b_S, mask=m_A)
    elif i_s == SEGMENTS - 1:
        tl.store(end + (i_n * HV + i_hv) * K * V + at_state, b_S, mask=m_state)
