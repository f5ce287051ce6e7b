"""Backward kernels of the delta rule with decay per channel (Kimi delta rule, gated delta rule 2).

Equation, with the symbols of `kernels.channel_delta_forward`, dS the gradient of the memory after a
chunk and dR_out that of the residuals where they are an output:

    dR = Pᵀ dO + (k∘e^{G_C−G}) dS + dR_out      dY = (I + L)^-ᵀ dR
    dS_in = Diag(e^{G_C}) dS + (scale·q∘e^G)ᵀ dO − (erase∘k∘e^G)ᵀ dY
    dv = write∘dY    dwrite = v∘dY    dP = scale·lower(dO Rᵀ)    dL = −strict_lower(dY Rᵀ)

The solve has no other backward: the gradient of the inverse, −Mᵀ dM Mᵀ, collapses to −dY Rᵀ.

Gradients of q, k and the decay go through the tree of `kernels.intervals`. At each level, with E
the decay between a row and its cut, X the queries behind the cut and the keys before it, and A the
pairs of dP or dL that the cuts separate, taken both ways (A = dP + dPᵀ there), one product E∘(A
(X∘E)) holds the gradient of the queries in rows behind the cut and that of the keys before it.

The gradient of a log decay is a sum over the pairs whose interval holds the token. Elsewhere (fla,
and the papers' code) it is a difference of two running sums that nearly cancel when the decay is
strong; here every level adds its intervals by a product with a 0/1 matrix and nothing cancels.

Where q and k were made unit vectors in the kernel, their gradients lose the part along q and k.
That part is known without q and k: q·dq = dO·out, and k·dk = dY·(R − write∘v) + R·(dY − dR_out),
because out is linear in q, and R and the memory are homogeneous in the two roles of k.

Cost per token and value head: 12·K·V + 8·C·V + 14·C·K FLOPs and 6·C·K for the sums of the tree;
2·C numbers (dP, dL), V numbers (dY) and K·V numbers per chunk (dS) pass between the kernels. No
atomics: every sum has one order, so equal calls give equal bits.
"""

import triton
import triton.language as tl

from kernels.intervals import (
    add_interval_grads,
    interval_sums,
    is_later,
    separated,
    split_log_decay,
)
from kernels.rows import chunk_rows, segment_rows


@triton.jit
def channel_delta_reverse_scan_kernel(
    q_read,
    k_erase,
    k_write,
    solve,
    scores,
    chunk_decay,
    d_out,
    d_residual,
    d_state,
    d_solved,
    d_chunk_state,
    d_start_state,
    segment_table,
    T,
    SEGMENTS,
    SEGMENT_CHUNKS,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_STATE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    STORE_CHUNKS: tl.constexpr,
    STORE_START: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (segments · HV · V / BV). Walks the chunks of a segment from the last to the first.

    `d_state` is the gradient of the memory after the segment; `d_chunk_state` receives that of the
    memory after every chunk, `d_start_state` that of the memory entering the segment.
    """
    tiles_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_hv = (pid // tiles_v) % HV
    i_segment = pid // (tiles_v * HV)
    start, end, chunk = segment_rows(
        i_segment, segment_table, T, SEGMENTS, SEGMENT_CHUNKS, C, PACKED
    )
    rows = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    o_v = (pid % tiles_v) * BV + tl.arange(0, BV)
    m_v = o_v < V
    at_k = rows[:, None] * (HV * K) + o_k[None, :]
    at_c = rows[:, None] * (HV * C) + rows[None, :]
    at_v = rows[:, None] * (HV * V) + o_v[None, :]
    at_state = o_k[:, None] * V + o_v[None, :]
    m_state = (o_k < K)[:, None] & m_v[None, :]
    this_state = (i_segment * HV + i_hv) * K * V
    if HAS_STATE:
        b_dS = tl.load(d_state + this_state + at_state, mask=m_state, other=0.0)
    else:
        b_dS = tl.zeros([KP, BV], tl.float32)

    chunks = tl.cdiv(end - start, C)
    for j in tl.range(0, chunks, num_stages=STAGES):
        i = chunks - 1 - j
        t = start + i * C
        m = rows < end - t
        m_k = m[:, None] & (o_k < K)[None, :]
        m_tile = m[:, None] & m_v[None, :]
        first = t * HV + i_hv
        i_chunk = (chunk + i) * HV + i_hv
        b_q = tl.load(q_read + first * K + at_k, mask=m_k, other=0.0)
        b_ke = tl.load(k_erase + first * K + at_k, mask=m_k, other=0.0)
        b_kw = tl.load(k_write + first * K + at_k, mask=m_k, other=0.0)
        b_M = tl.load(solve + first * C + at_c, mask=m[:, None], other=0.0)
        b_P = tl.load(scores + first * C + at_c, mask=m[:, None], other=0.0)
        b_dO = tl.load(d_out + first * V + at_v, mask=m_tile, other=0.0)
        b_decay = tl.load(chunk_decay + i_chunk * K + o_k, mask=o_k < K, other=0.0)

        # operand copy; the running gradient stays float32
        b_dSo = b_dS.to(b_q.dtype)
        if STORE_CHUNKS:
            tl.store(d_chunk_state + i_chunk * K * V + at_state, b_dSo, mask=m_state)
        # P and the inverse are transposed as loaded tiles, never as results of a product
        b_dR = tl.dot(b_kw, b_dSo, input_precision=PRECISION)
        b_dR = tl.dot(tl.trans(b_P), b_dO, b_dR, input_precision=PRECISION)
        if HAS_RESIDUAL:
            b_dRo = tl.load(d_residual + first * V + at_v, mask=m_tile, other=0.0)
            b_dR += b_dRo.to(tl.float32)
        b_dY = tl.dot(tl.trans(b_M), b_dR.to(b_q.dtype), input_precision=PRECISION)
        if STORE_CHUNKS:
            b_dYo = b_dY.to(d_solved.dtype.element_ty)
            tl.store(d_solved + first * V + at_v, b_dYo, mask=m_tile)
        b_dS *= b_decay[:, None]
        b_dS = tl.dot(tl.trans(b_q), b_dO, b_dS, input_precision=PRECISION)
        b_dS = tl.dot(tl.trans(b_ke), (-b_dY).to(b_q.dtype), b_dS, input_precision=PRECISION)

    if STORE_START:
        tl.store(d_start_state + this_state + at_state, b_dS, mask=m_state)


@triton.jit
def channel_delta_value_grads_kernel(
    v,
    write,
    out,
    residual,
    d_out,
    d_solved,
    d_residual,
    d_v,
    d_write,
    d_scores,
    d_lower,
    d_diagonal,
    q_part,
    k_part,
    chunk_table,
    T,
    stride_v,
    scale,
    HV: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    PACKED: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    UNIT: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (chunks · HV). What the value side gives: dv, dwrite, and dP and dL for the key side.

    dP and dL are stored symmetrically, so that a level of the tree reads them both ways. With one
    write strength for a head, `d_write` receives the value side of dbeta.
    """
    i_hv = tl.program_id(0).to(tl.int64) % HV
    i_chunk = tl.program_id(0).to(tl.int64) // HV
    start, end = chunk_rows(i_chunk, chunk_table, T, C, PACKED)
    rows = tl.arange(0, C)
    m = rows < end - start
    # from here on pointers stand at the chunk's first token and this head
    first = start * HV + i_hv
    at_row = first + rows * HV
    v += start * stride_v + i_hv * V
    if not CHANNEL_GATES:
        b_beta = tl.load(write + at_row, mask=m, other=0.0).to(tl.float32)

    b_dP = tl.zeros([C, C], tl.float32)
    b_dPt = tl.zeros([C, C], tl.float32)
    b_dL = tl.zeros([C, C], tl.float32)
    b_dLt = tl.zeros([C, C], tl.float32)
    b_diagonal = tl.zeros([C], tl.float32)
    b_dbeta = tl.zeros([C], tl.float32)
    b_qpart = tl.zeros([C], tl.float32)
    b_kpart = tl.zeros([C], tl.float32)
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        m_tile = m[:, None] & (o_v < V)[None, :]
        at_v = rows[:, None] * (HV * V) + o_v[None, :]
        b_R = tl.load(residual + first * V + at_v, mask=m_tile, other=0.0)
        b_dO = tl.load(d_out + first * V + at_v, mask=m_tile, other=0.0)
        b_dY = tl.load(d_solved + first * V + at_v, mask=m_tile, other=0.0)
        # a product is never transposed: both orientations are formed
        b_dP = tl.dot(b_dO, tl.trans(b_R), b_dP, input_precision=PRECISION)
        b_dPt = tl.dot(b_R, tl.trans(b_dO), b_dPt, input_precision=PRECISION)
        b_dL = tl.dot(b_dY, tl.trans(b_R), b_dL, input_precision=PRECISION)
        b_dLt = tl.dot(b_R, tl.trans(b_dY), b_dLt, input_precision=PRECISION)

        b_R = b_R.to(tl.float32)
        b_dO = b_dO.to(tl.float32)
        b_dY = b_dY.to(tl.float32)
        b_diagonal += tl.sum(b_dO * b_R, 1)
        b_v = tl.load(v + rows[:, None] * stride_v + o_v[None, :], mask=m_tile, other=0.0)
        b_v = b_v.to(tl.float32)
        if CHANNEL_GATES:
            b_w = tl.load(write + first * V + at_v, mask=m_tile, other=0.0).to(tl.float32)
            b_dw = (b_dY * b_v).to(d_write.dtype.element_ty)
            tl.store(d_write + first * V + at_v, b_dw, mask=m_tile)
        else:
            b_w = b_beta[:, None]
            b_dbeta += tl.sum(b_dY * b_v, 1)
        tl.store(d_v + first * V + at_v, (b_dY * b_w).to(d_v.dtype.element_ty), mask=m_tile)
        if UNIT:
            b_o = tl.load(out + first * V + at_v, mask=m_tile, other=0.0).to(tl.float32)
            b_qpart += tl.sum(b_dO * b_o, 1)
            b_kpart += tl.sum(b_dY * (2.0 * b_R - b_w * b_v), 1)
            if HAS_RESIDUAL:
                b_dRo = tl.load(d_residual + first * V + at_v, mask=m_tile, other=0.0).to(
                    tl.float32
                )
                b_kpart -= tl.sum(b_R * b_dRo, 1)

    lower = rows[:, None] >= rows[None, :]
    b_dP = tl.where(lower, b_dP, b_dPt) * scale
    b_dL = tl.where(lower, b_dL, b_dLt) * -1.0
    at_c = rows[:, None] * (HV * C) + rows[None, :]
    tl.store(d_scores + first * C + at_c, b_dP.to(d_scores.dtype.element_ty), mask=m[:, None])
    tl.store(d_lower + first * C + at_c, b_dL.to(d_lower.dtype.element_ty), mask=m[:, None])
    tl.store(d_diagonal + at_row, b_diagonal * scale, mask=m)
    if not CHANNEL_GATES:
        tl.store(d_write + at_row, b_dbeta, mask=m)
    if UNIT:
        tl.store(q_part + at_row, b_qpart, mask=m)
        tl.store(k_part + at_row, b_kpart, mask=m)


@triton.jit
def channel_delta_key_grads_kernel(
    q,
    k,
    log_decay,
    erase,
    q_norm,
    k_norm,
    q_part,
    k_part,
    residual,
    d_out,
    d_solved,
    d_scores,
    d_lower,
    d_diagonal,
    chunk_state,
    d_chunk_state,
    d_q,
    d_k,
    d_log_decay,
    d_erase,
    masks,
    chunk_decay,
    chunk_table,
    T,
    tokens,
    stride_q,
    stride_k,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    PACKED: tl.constexpr,
    UNIT: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    EXACT: tl.constexpr,
    ONE_CUT_LIMIT: tl.constexpr,
    ONE_CUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (chunks · HV · K / BK). dq, dk, dlog_decay and derase of one tile of channels.

    There are two of these kernels: with ONE_CUT for the tiles that one cut serves, and without it
    for the others, through the tree; each leaves the other's tiles alone. As one kernel they need
    more registers, and ptxas 12.8 drops part of a descriptor (`kernels.uniform_registers`).

    dq and dk are those of one value head, to be summed over the heads that share a key head. With
    one strength for a head, `d_erase` [K / BK, tokens, HV] receives this tile's part of dbeta.
    """
    tiles_k: tl.constexpr = (K + BK - 1) // BK
    pid = tl.program_id(0).to(tl.int64)
    i_k = pid % tiles_k
    i_hv = (pid // tiles_k) % HV
    i_chunk = pid // (tiles_k * HV)
    i_h = i_hv // (HV // H)
    start, end = chunk_rows(i_chunk, chunk_table, T, C, PACKED)
    rows = tl.arange(0, C)
    m = rows < end - start
    # from here on pointers stand at the chunk's first token and this head
    first = start * HV + i_hv
    at_row = first + rows * HV
    at_norm = start * H + i_h + rows * H
    q += start * stride_q + i_h * K
    k += start * stride_k + i_h * K
    o_k = i_k * BK + tl.arange(0, BK)
    m_k = m[:, None] & (o_k < K)[None, :]
    at_k = rows[:, None] * (HV * K) + o_k[None, :]
    at_c = rows[:, None] * (HV * C) + rows[None, :]

    b_g = tl.load(log_decay + first * K + at_k, mask=m_k, other=0.0)
    b_g, b_high, b_low = split_log_decay(b_g)
    at_mask = rows[:, None] * C + rows[None, :]
    at_cut = (LEVELS - 1) * C * C + at_mask
    b_sum = interval_sums(tl.load(masks + at_cut), b_g, b_high, b_low, EXACT, PRECISION)
    if (tl.min(b_sum) >= ONE_CUT_LIMIT) != ONE_CUT:
        return

    # through the memory: the rows' part in the reads, erasures and writes of the whole chunk
    b_dq = tl.zeros([C, BK], tl.float32)
    b_dbk = tl.zeros([C, BK], tl.float32)
    b_dk = tl.zeros([C, BK], tl.float32)
    b_dtotal = tl.zeros([BK], tl.float32)
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        at_v = rows[:, None] * (HV * V) + o_v[None, :]
        m_tile = m[:, None] & (o_v < V)[None, :]
        at_state = (i_chunk * HV + i_hv) * K * V + (o_k[:, None] * V + o_v[None, :])
        # an empty chunk, beyond the last packed one, has no memory that was ever written
        m_state = (o_k < tl.where(end > start, K, 0))[:, None] & (o_v < V)[None, :]
        b_dO = tl.load(d_out + first * V + at_v, mask=m_tile, other=0.0)
        b_dY = tl.load(d_solved + first * V + at_v, mask=m_tile, other=0.0)
        b_R = tl.load(residual + first * V + at_v, mask=m_tile, other=0.0)
        b_S = tl.load(chunk_state + at_state, mask=m_state, other=0.0)
        b_dS = tl.load(d_chunk_state + at_state, mask=m_state, other=0.0)
        b_dq = tl.dot(b_dO, tl.trans(b_S), b_dq, input_precision=PRECISION)
        b_dbk = tl.dot(b_dY, tl.trans(b_S), b_dbk, input_precision=PRECISION)
        b_dk = tl.dot(b_R, tl.trans(b_dS), b_dk, input_precision=PRECISION)
        b_dtotal += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), 1)

    b_q = tl.load(q + rows[:, None] * stride_q + o_k[None, :], mask=m_k, other=0.0)
    b_k = tl.load(k + rows[:, None] * stride_k + o_k[None, :], mask=m_k, other=0.0)
    dtype = b_q.dtype
    b_q = b_q.to(tl.float32)
    b_k = b_k.to(tl.float32)
    if UNIT:
        b_q *= tl.load(q_norm + at_norm, mask=m, other=0.0)[:, None]
        b_k *= tl.load(k_norm + at_norm, mask=m, other=0.0)[:, None]
    if CHANNEL_GATES:
        b_b = tl.load(erase + first * K + at_k, mask=m_k, other=0.0).to(tl.float32)
    else:
        b_b = tl.load(erase + at_row, mask=m, other=0.0).to(tl.float32)[:, None]
    b_bk = b_k * b_b
    masks_t = masks + (LEVELS + 2) * C * C

    at_level = LEVELS * C * C + at_mask
    b_sum = interval_sums(tl.load(masks + at_level), b_g, b_high, b_low, EXACT, PRECISION)
    b_G = tl.math.exp2(b_sum)
    b_dq *= b_G * scale
    b_dbk *= -b_G
    b_dg = tl.zeros([C, BK], tl.float32)
    b_dsum = b_q * b_dq + b_bk * b_dbk
    b_dg = add_interval_grads(b_dg, tl.load(masks_t + at_level), b_dsum, EXACT, PRECISION)
    at_level = (LEVELS + 1) * C * C + at_mask
    b_sum = interval_sums(tl.load(masks + at_level), b_g, b_high, b_low, EXACT, PRECISION)
    b_dk *= tl.math.exp2(b_sum)
    b_dsum = b_k * b_dk
    b_dg = add_interval_grads(b_dg, tl.load(masks_t + at_level), b_dsum, EXACT, PRECISION)
    at_decay = (i_chunk * HV + i_hv) * K + o_k
    b_dtotal *= tl.load(chunk_decay + at_decay, mask=o_k < K, other=0.0)
    b_dg += b_dtotal[None, :]

    # the pairs of a token with itself have no decay between them
    b_self = tl.load(d_diagonal + at_row, mask=m, other=0.0)
    b_dq += b_self[:, None] * b_k
    b_dk += b_self[:, None] * b_q

    # through the pairs inside the chunk
    b_dP = tl.load(d_scores + first * C + at_c, mask=m[:, None], other=0.0)
    b_dL = tl.load(d_lower + first * C + at_c, mask=m[:, None], other=0.0)
    if ONE_CUT:
        # as in the forward: one factor a row, relative to the middle of the chunk
        b_sum = interval_sums(tl.load(masks + at_cut), b_g, b_high, b_low, EXACT, PRECISION)
        later = is_later(rows, LEVELS - 1)[:, None]
        b_sum = tl.where(later, b_sum, -b_sum)
        b_E = tl.math.exp2(b_sum)
        b_F = tl.math.exp2(-b_sum)
        b_xq = (b_q * b_E).to(dtype)
        b_xb = (b_bk * b_E).to(dtype)
        b_xk = (b_k * b_F).to(dtype)
        below = rows[:, None] > rows[None, :]
        above = rows[:, None] < rows[None, :]
        b_read = tl.dot(tl.where(below, b_dP, 0.0).to(dtype), b_xk, input_precision=PRECISION)
        b_erase = tl.dot(tl.where(below, b_dL, 0.0).to(dtype), b_xk, input_precision=PRECISION)
        b_col = tl.dot(tl.where(above, b_dP, 0.0).to(dtype), b_xq, input_precision=PRECISION)
        b_col = tl.dot(tl.where(above, b_dL, 0.0).to(dtype), b_xb, b_col, input_precision=PRECISION)
        # A pair adds one number to its row and takes the same from its column: from the rounded
        # factors both are the same product, so nothing is left where the sums below cancel.
        b_dsum = b_xq.to(tl.float32) * b_read + b_xb.to(tl.float32) * b_erase
        b_dsum -= b_xk.to(tl.float32) * b_col
        b_dsum = tl.where(later, b_dsum, -b_dsum)
        b_dg = add_interval_grads(b_dg, tl.load(masks_t + at_cut), b_dsum, EXACT, PRECISION)
        b_dq += b_read * b_E
        b_dbk += b_erase * b_E
        b_dk += b_col * b_F
    else:
        for level in range(LEVELS):
            at_level = level * C * C + at_mask
            later = is_later(rows, level)[:, None]
            pairs = separated(rows, level)
            b_mask = tl.load(masks + at_level)
            b_E = tl.math.exp2(interval_sums(b_mask, b_g, b_high, b_low, EXACT, PRECISION))
            b_A = tl.where(pairs, b_dP, 0.0).to(dtype)
            b_x = (tl.where(later, b_q, b_k) * b_E).to(dtype)
            b_read = tl.dot(b_A, b_x, input_precision=PRECISION) * b_E
            b_A = tl.where(pairs, b_dL, 0.0).to(dtype)
            b_x = (tl.where(later, b_bk, b_k) * b_E).to(dtype)
            b_erase = tl.dot(b_A, b_x, input_precision=PRECISION) * b_E
            b_dsum = tl.where(later, b_q * b_read + b_bk * b_erase, b_k * (b_read + b_erase))
            b_dq += tl.where(later, b_read, 0.0)
            b_dbk += tl.where(later, b_erase, 0.0)
            b_dk += tl.where(later, 0.0, b_read + b_erase)
            b_dg = add_interval_grads(b_dg, tl.load(masks_t + at_level), b_dsum, EXACT, PRECISION)

    tl.store(d_log_decay + first * K + at_k, b_dg.to(d_log_decay.dtype.element_ty), mask=m_k)

    b_dk += b_b * b_dbk
    if CHANNEL_GATES:
        tl.store(d_erase + first * K + at_k, (b_k * b_dbk).to(d_erase.dtype.element_ty), mask=m_k)
    else:
        tl.store(d_erase + i_k * tokens * HV + at_row, tl.sum(b_k * b_dbk, 1), mask=m)
    if UNIT:
        b_dq -= b_q * tl.load(q_part + at_row, mask=m, other=0.0)[:, None]
        b_dk -= b_k * tl.load(k_part + at_row, mask=m, other=0.0)[:, None]
        b_dq *= tl.load(q_norm + at_norm, mask=m, other=0.0)[:, None]
        b_dk *= tl.load(k_norm + at_norm, mask=m, other=0.0)[:, None]
    tl.store(d_q + first * K + at_k, b_dq.to(d_q.dtype.element_ty), mask=m_k)
    tl.store(d_k + first * K + at_k, b_dk.to(d_k.dtype.element_ty), mask=m_k)
