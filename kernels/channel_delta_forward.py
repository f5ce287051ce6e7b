"""Forward kernels of the delta rule with decay per channel (Kimi delta rule, gated delta rule 2).

Equation, for a chunk of C tokens with the memory S entering it and G the log decay summed inside
the chunk, inclusive:

    L_ij = Σ_c erase_ic k_ic k_jc e^{G_ic − G_jc}    (j < i)
    P_ij = scale Σ_c q_ic k_jc e^{G_ic − G_jc}        (j ≤ i)
    R   = (I + L)^-1 (write∘v − (erase∘k∘e^G) S)               the residuals u of the chunk
    out = (scale·q∘e^G) S + P R
    S'  = Diag(e^{G_C}) S + (k∘e^{G_C − G})ᵀ R

Symbols: as in `kernels.reference`; the names of what passes between the kernels are listed in
`Prepared`. All exponents are ≤ 0 (`kernels.intervals`).

Source: Kimi Linear (arXiv 2510.26692) and "Linear Attention Architectures" (arXiv 2607.07953).
They apply the inverse to both operands (W, U) and form R = U − W S; we apply it once, to the
difference, so that W and U are neither formed nor stored. fla (kernels of the same papers) keeps
the decay as a tensor of running sums and needs three ways to exponentiate differences of it.

Cost per token and value head: 6·K·V + 4·C·(K + V) FLOPs and 6·C·K for sums of decays. The operands
stored between the kernels take (3·K + 2·C) numbers of the input's dtype per token and head;
training also stores K·V numbers per chunk and head (the memory entering it).
"""

import triton
import triton.language as tl

from kernels.intervals import (
    interval_sums,
    is_later,
    separated_below,
    split_log_decay,
    unit_lower_inverse,
)
from kernels.rows import chunk_rows, segment_rows

# Dialect of the kernels: i_ program numbers, o_ offsets, m_ masks, b_ values of a tile.


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
    chunk_decay,
    masks,
    chunk_table,
    T,
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
    ONE_CUT_LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (chunks · HV). All that the scans need of q, k, log_decay and erase, chunk by chunk."""
    i_hv = tl.program_id(0).to(tl.int64) % HV
    i_chunk = tl.program_id(0).to(tl.int64) // HV
    i_h = i_hv // (HV // H)
    start, end = chunk_rows(i_chunk, chunk_table, T, C, PACKED)
    rows = tl.arange(0, C)
    m = rows < end - start
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

    b_P = tl.zeros([C, C], tl.float32)
    b_L = tl.zeros([C, C], tl.float32)
    b_diagonal = tl.zeros([C], tl.float32)
    at_mask = rows[:, None] * C + rows[None, :]
    for i_k in range(tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = m[:, None] & (o_k < K)[None, :]
        at_k = rows[:, None] * (HV * K) + o_k[None, :]
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
        b_g = tl.load(log_decay + first * K + at_k, mask=m_k, other=0.0)
        b_diagonal += tl.sum(b_q * b_k, 1)

        b_g, b_high, b_low = split_log_decay(b_g)
        b_mask = tl.load(masks + (LEVELS - 1) * C * C + at_mask)
        b_sum = interval_sums(b_mask, b_g, b_high, b_low, EXACT, PRECISION)
        if tl.min(b_sum) >= ONE_CUT_LIMIT:
            # relative to the middle of the chunk; what lies above the diagonal is dropped below
            b_sum = tl.where(is_later(rows, LEVELS - 1)[:, None], b_sum, -b_sum)
            b_E = tl.math.exp2(b_sum)
            b_x = tl.trans((b_k * tl.math.exp2(-b_sum)).to(dtype))
            b_P = tl.dot((b_q * b_E).to(dtype), b_x, b_P, input_precision=PRECISION)
            b_L = tl.dot((b_bk * b_E).to(dtype), b_x, b_L, input_precision=PRECISION)
        else:
            for level in range(LEVELS):
                later = is_later(rows, level)[:, None]
                pairs = separated_below(rows, level)
                b_mask = tl.load(masks + level * C * C + at_mask)
                b_E = tl.math.exp2(interval_sums(b_mask, b_g, b_high, b_low, EXACT, PRECISION))
                # rows behind a cut are queries there, rows before it keys; one tile holds both
                b_x = (tl.where(later, b_q, b_k) * b_E).to(dtype)
                b_x = tl.dot(b_x, tl.trans(b_x), input_precision=PRECISION)
                b_P += tl.where(pairs, b_x, 0.0)
                b_x = (tl.where(later, b_bk, b_k) * b_E).to(dtype)
                b_x = tl.dot(b_x, tl.trans(b_x), input_precision=PRECISION)
                b_L += tl.where(pairs, b_x, 0.0)

        b_mask = tl.load(masks + LEVELS * C * C + at_mask)
        b_G = tl.math.exp2(interval_sums(b_mask, b_g, b_high, b_low, EXACT, PRECISION))
        b_mask = tl.load(masks + (LEVELS + 1) * C * C + at_mask)
        b_rest = tl.math.exp2(interval_sums(b_mask, b_g, b_high, b_low, EXACT, PRECISION))
        tl.store(q_read + first * K + at_k, (b_q * b_G * scale).to(dtype), mask=m_k)
        tl.store(k_erase + first * K + at_k, (b_bk * b_G).to(dtype), mask=m_k)
        tl.store(k_write + first * K + at_k, (b_k * b_rest).to(dtype), mask=m_k)
        # rows beyond the last token decay no further, so the last row holds the whole chunk's decay
        at_decay = (i_chunk * HV + i_hv) * K + (rows * 0)[:, None] + o_k[None, :]
        m_decay = (rows == C - 1)[:, None] & (o_k < K)[None, :]
        tl.store(chunk_decay + at_decay, b_G, mask=m_decay)

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
    chunk_decay,
    v,
    write,
    state,
    out,
    residual,
    chunk_state,
    end_state,
    transition,
    segment_table,
    T,
    SEGMENTS,
    SEGMENT_CHUNKS,
    stride_v,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    HAS_STATE: tl.constexpr,
    SUMMARY: tl.constexpr,
    TRAIN: tl.constexpr,
    STORE_END: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (segments · HV · column tiles). One program walks the chunks of a segment in order.

    A SUMMARY finds what a segment does to any memory entering it, S ↦ A S + Z: Z is the memory
    after the segment from an empty one; the columns of A follow the same rule from the columns of
    the identity, with nothing written. Column tiles beyond those of V are A's.
    """
    tiles_v: tl.constexpr = (V + BV - 1) // BV
    tiles: tl.constexpr = tiles_v + ((K + BV - 1) // BV if SUMMARY else 0)
    pid = tl.program_id(0).to(tl.int64)
    i_tile = pid % tiles
    i_hv = (pid // tiles) % HV
    i_segment = pid // (tiles * HV)
    start, end, chunk = segment_rows(
        i_segment, segment_table, T, SEGMENTS, SEGMENT_CHUNKS, C, PACKED
    )
    rows = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    o_v = i_tile * BV + tl.arange(0, BV)
    o_A = o_v - tiles_v * BV
    m_v = o_v < V
    at_k = rows[:, None] * (HV * K) + o_k[None, :]
    at_c = rows[:, None] * (HV * C) + rows[None, :]
    at_v = rows[:, None] * (HV * V) + o_v[None, :]
    at_state = o_k[:, None] * V + o_v[None, :]
    m_state = (o_k < K)[:, None] & m_v[None, :]
    this_state = (i_segment * HV + i_hv) * K * V

    if HAS_STATE:
        b_S = tl.load(state + this_state + at_state, mask=m_state, other=0.0)
    else:
        b_S = tl.zeros([KP, BV], tl.float32)
    if SUMMARY:
        b_S += tl.where(o_k[:, None] == o_A[None, :], 1.0, 0.0)

    for i in tl.range(0, tl.cdiv(end - start, C), num_stages=STAGES):
        t = start + i * C
        m = rows < end - t
        m_k = m[:, None] & (o_k < K)[None, :]
        m_tile = m[:, None] & m_v[None, :]
        first = t * HV + i_hv
        i_chunk = (chunk + i) * HV + i_hv
        b_ke = tl.load(k_erase + first * K + at_k, mask=m_k, other=0.0)
        b_kw = tl.load(k_write + first * K + at_k, mask=m_k, other=0.0)
        b_M = tl.load(solve + first * C + at_c, mask=m[:, None], other=0.0)
        at = rows[:, None] * stride_v + o_v[None, :]
        b_v = tl.load(v + t * stride_v + i_hv * V + at, mask=m_tile, other=0.0)
        b_decay = tl.load(chunk_decay + i_chunk * K + o_k, mask=o_k < K, other=0.0)
        if CHANNEL_GATES:
            b_w = tl.load(write + first * V + at_v, mask=m_tile, other=0.0).to(tl.float32)
        else:
            b_w = tl.load(write + first + rows * HV, mask=m, other=0.0).to(tl.float32)[:, None]

        # operand copy; the running memory stays float32
        b_So = b_S.to(b_ke.dtype)
        b_Y = b_v.to(tl.float32) * b_w - tl.dot(b_ke, b_So, input_precision=PRECISION)
        b_R = tl.dot(b_M, b_Y.to(b_ke.dtype), input_precision=PRECISION).to(b_ke.dtype)
        if not SUMMARY:
            b_q = tl.load(q_read + first * K + at_k, mask=m_k, other=0.0)
            b_P = tl.load(scores + first * C + at_c, mask=m[:, None], other=0.0)
            b_o = tl.dot(b_q, b_So, input_precision=PRECISION)
            b_o = tl.dot(b_P, b_R, b_o, input_precision=PRECISION)
            tl.store(out + first * V + at_v, b_o.to(out.dtype.element_ty), mask=m_tile)
            tl.store(residual + first * V + at_v, b_R, mask=m_tile)
        if TRAIN:
            tl.store(chunk_state + i_chunk * K * V + at_state, b_So, mask=m_state)
        b_S *= b_decay[:, None]
        b_S = tl.dot(tl.trans(b_kw), b_R, b_S, input_precision=PRECISION)

    if STORE_END:
        tl.store(end_state + this_state + at_state, b_S, mask=m_state)
    if SUMMARY:
        at_A = (i_segment * HV + i_hv) * K * K + o_k[:, None] * K + o_A[None, :]
        m_A = (o_k < K)[:, None] & ((o_A >= 0) & (o_A < K))[None, :]
        tl.store(transition + at_A, b_S, mask=m_A)


@triton.jit
def channel_delta_join_kernel(
    transition,
    summary,
    state,
    segment_state,
    end_state,
    sequence_table,
    SEGMENTS,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Grid (sequences · HV · V / BV). The memory entering every segment, from the summaries.

    S_{s+1} = A_s S_s + Z_s in order; for the gradient of the memory the segments are walked from
    the last with A_sᵀ. A step reads the memory that the step before it wrote, behind a barrier, in
    tiles: for K = 256 a program could not hold A in shared memory.
    """
    tiles_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_hv = (pid // tiles_v) % HV
    i_sequence = pid // (tiles_v * HV)
    if PACKED:
        first = tl.load(sequence_table + i_sequence)
        count = tl.load(sequence_table + i_sequence + 1) - first
    else:
        first = i_sequence * SEGMENTS
        count = SEGMENTS
    o_v = (pid % tiles_v) * BV + tl.arange(0, BV)
    m_v = o_v < V
    for i in range(count + 1):
        for i_k in range(tl.cdiv(K, BK)):
            o_k = i_k * BK + tl.arange(0, BK)
            at = o_k[:, None] * V + o_v[None, :]
            m = (o_k < K)[:, None] & m_v[None, :]
            b_S = tl.zeros([BK, BV], tl.float32)
            if i == 0:
                if HAS_STATE:
                    b_S = tl.load(state + (i_sequence * HV + i_hv) * K * V + at, mask=m, other=0.0)
            else:
                # the segment just passed, and the memory that entered it
                j = first + (count - i if REVERSE else i - 1)
                b_S = tl.load(summary + (j * HV + i_hv) * K * V + at, mask=m, other=0.0)
                for i_j in range(tl.cdiv(K, BK)):
                    o_j = i_j * BK + tl.arange(0, BK)
                    if REVERSE:
                        at_A = o_j[None, :] * K + o_k[:, None]
                    else:
                        at_A = o_k[:, None] * K + o_j[None, :]
                    m_A = (o_k < K)[:, None] & (o_j < K)[None, :]
                    b_A = tl.load(transition + (j * HV + i_hv) * K * K + at_A, mask=m_A, other=0.0)
                    at_S = (j * HV + i_hv) * K * V + o_j[:, None] * V + o_v[None, :]
                    m_S = (o_j < K)[:, None] & m_v[None, :]
                    b_last = tl.load(segment_state + at_S, mask=m_S, other=0.0)
                    b_S = tl.dot(b_A, b_last, b_S, input_precision="tf32x3")
            if i == count:
                tl.store(end_state + (i_sequence * HV + i_hv) * K * V + at, b_S, mask=m)
            else:
                j = first + (count - 1 - i if REVERSE else i)
                tl.store(segment_state + (j * HV + i_hv) * K * V + at, b_S, mask=m)
        tl.debug_barrier()
