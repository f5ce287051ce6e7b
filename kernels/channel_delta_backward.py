"""Backward kernels of the delta rule with decay per channel (Kimi delta rule, gated delta rule 2).

Equation, with the symbols of `kernels.channel_delta_forward`, dS the gradient of the memory after a
chunk and dR_out that of the residuals where they are an output:

    dR = Pᵀ dO + (k∘e^{G_C−G}) dS + dR_out      dY = (I + L)^-ᵀ dR
    dS_in = Diag(e^{G_C}) dS + (scale·q∘e^G)ᵀ dO − (erase∘k∘e^G)ᵀ dY
    dv = write∘dY    dwrite = v∘dY    dP = scale·lower(dO Rᵀ)    dL = −strict_lower(dY Rᵀ)

The solve has no other backward: the gradient of the inverse, −Mᵀ dM Mᵀ, collapses to −dY Rᵀ.
Gradients of q, k, erase and the decay follow from these in `kernels.channel_delta_key_grads`.

Where q and k were made unit vectors in the kernel, their gradients lose the part along q and k.
That part is known without q and k: q·dq = dO·out, and k·dk = dY·(R − write∘v) + R·(dY − dR_out),
because out is linear in q, and R and the memory are homogeneous in the two roles of k.

Cost per token and value head: 6·K·V + 8·C·V FLOPs; 2·C numbers (dP, dL), V numbers (dY) and K·V
numbers per chunk (dS) are written for the gradients of the keys. No atomics: every sum has one
order, so equal calls give equal bits.
"""

import triton
import triton.language as tl

from kernels.blocks import first_chunk, locate_chunk, sequence_bounds


@triton.jit
def channel_delta_reverse_scan_kernel(
    q_read,
    k_erase,
    k_write,
    solve,
    scores,
    chunk_total,
    d_out,
    d_residual,
    start,
    d_solved,
    d_chunk_state,
    end,
    cu_seqlens,
    chunk_offsets,
    T,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_START: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SUMMARY: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (sequences · SEGMENTS · HV · V / BV). Walks a segment's chunks, the last one first.

    `start` [N, SEGMENTS, HV, K, V] is the gradient of the memory behind each segment; `end`
    [N, HV, K, V] receives that of the initial memory, `d_chunk_state` that of the memory behind
    every chunk. A SUMMARY only writes what a segment leaves, to `end` [N, SEGMENTS, HV, K, V].
    """
    TILES_V: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0).to(tl.int64)
    i_state = i_program // TILES_V
    i_hv = i_state % HV
    i_s = (i_state // HV % SEGMENTS).to(tl.int32)
    i_n = i_state // (HV * SEGMENTS)
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    i_chunk0 = first_chunk(chunk_offsets, i_n, T, C, PACKED)
    num_chunks = tl.cdiv(num_tokens, C)
    segment = tl.cdiv(num_chunks, SEGMENTS)
    segment_end = tl.minimum(i_s * segment + segment, num_chunks)

    rows = tl.arange(0, C)
    o_k = tl.arange(0, KP)
    o_v = (i_program % TILES_V).to(tl.int32) * BV + tl.arange(0, BV)
    m_v = o_v < V
    at_k = rows[:, None] * (HV * K) + o_k[None, :]
    at_c = rows[:, None] * (HV * C) + rows[None, :]
    at_v = rows[:, None] * (HV * V) + o_v[None, :]
    at_state = o_k[:, None] * V + o_v[None, :]
    m_state = (o_k < K)[:, None] & m_v[None, :]
    b_dS = tl.zeros([KP, BV], tl.float32)
    if HAS_START:
        b_dS = tl.load(start + i_state * K * V + at_state, mask=m_state, other=0.0)

    for i in tl.range(0, segment_end - i_s * segment, num_stages=STAGES):
        i_c = segment_end - 1 - i
        m = rows < num_tokens - i_c * C
        m_k = m[:, None] & (o_k < K)[None, :]
        m_tile = m[:, None] & m_v[None, :]
        first = (i_first + i_c * C) * HV + i_hv
        i_memory = (i_chunk0 + i_c) * HV + i_hv
        # asked for first, since it is not copied ahead as tiles are
        b_total = tl.load(chunk_total + i_memory * K + o_k, mask=o_k < K, other=0.0)
        b_q = tl.load(q_read + first * K + at_k, mask=m_k, other=0.0)
        b_ke = tl.load(k_erase + first * K + at_k, mask=m_k, other=0.0)
        b_kw = tl.load(k_write + first * K + at_k, mask=m_k, other=0.0)
        b_M = tl.load(solve + first * C + at_c, mask=m[:, None], other=0.0)
        b_P = tl.load(scores + first * C + at_c, mask=m[:, None], other=0.0)
        b_dO = tl.load(d_out + first * V + at_v, mask=m_tile, other=0.0)

        # operand copy; the running gradient stays float32
        b_dSo = b_dS.to(b_q.dtype)
        if not SUMMARY:
            tl.store(d_chunk_state + i_memory * K * V + at_state, b_dSo, mask=m_state)
        # P and the inverse are transposed as loaded tiles, never as results of a product
        b_dR = tl.dot(b_kw, b_dSo, input_precision=PRECISION)
        b_dR = tl.dot(tl.trans(b_P), b_dO, b_dR, input_precision=PRECISION)
        if HAS_RESIDUAL:
            b_dRo = tl.load(d_residual + first * V + at_v, mask=m_tile, other=0.0)
            b_dR += b_dRo.to(tl.float32)
        b_dY = tl.dot(tl.trans(b_M), b_dR.to(b_q.dtype), input_precision=PRECISION)
        if not SUMMARY:
            b_dYo = b_dY.to(d_solved.dtype.element_ty)
            tl.store(d_solved + first * V + at_v, b_dYo, mask=m_tile)
        b_dS *= tl.math.exp2(b_total)[:, None]
        b_dS = tl.dot(tl.trans(b_q), b_dO, b_dS, input_precision=PRECISION)
        b_dS = tl.dot(tl.trans(b_ke), (-b_dY).to(b_q.dtype), b_dS, input_precision=PRECISION)

    if SUMMARY:
        tl.store(end + i_state * K * V + at_state, b_dS, mask=m_state)
    elif i_s == 0:
        tl.store(end + (i_n * HV + i_hv) * K * V + at_state, b_dS, mask=m_state)


@triton.jit
def channel_delta_value_grads_kernel(
    v,
    write,
    strength,
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
    cu_seqlens,
    chunk_offsets,
    chunk_owners,
    T,
    num_sequences,
    tokens,
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

    `d_scores` and `d_lower` [2, tokens, HV, C] receive dP and dL below the diagonal, then both of
    them transposed, since no product may be transposed later. With one write strength for a head,
    `d_write` receives the value side of dbeta.
    """
    i_hv = tl.program_id(0).to(tl.int64) % HV
    i_chunk = tl.program_id(0).to(tl.int64) // HV
    i_n, i_c = locate_chunk(chunk_owners, chunk_offsets, i_chunk, T, C, PACKED)
    if i_n >= num_sequences:
        return
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    start = i_first + i_c * C
    rows = tl.arange(0, C)
    m = rows < num_tokens - i_c * C
    # from here on pointers stand at the chunk's first token and this head
    first = start * HV + i_hv
    at_row = first + rows * HV
    v += start * stride_v + i_hv * V
    if not CHANNEL_GATES:
        b_beta = tl.load(strength + at_row, mask=m, other=0.0)

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

    at_c = first * C + rows[:, None] * (HV * C) + rows[None, :]
    m_c = m[:, None]
    below = rows[:, None] > rows[None, :]
    above = rows[:, None] < rows[None, :]
    dtype = d_scores.dtype.element_ty
    tl.store(d_scores + at_c, tl.where(below, b_dP * scale, 0.0).to(dtype), mask=m_c)
    tl.store(d_lower + at_c, tl.where(below, -b_dL, 0.0).to(dtype), mask=m_c)
    at_c += tokens * (HV * C)
    tl.store(d_scores + at_c, tl.where(above, b_dPt * scale, 0.0).to(dtype), mask=m_c)
    tl.store(d_lower + at_c, tl.where(above, -b_dLt, 0.0).to(dtype), mask=m_c)
    tl.store(d_diagonal + at_row, b_diagonal * scale, mask=m)
    if not CHANNEL_GATES:
        tl.store(d_write + at_row, b_dbeta, mask=m)
    if UNIT:
        tl.store(q_part + at_row, b_qpart, mask=m)
        tl.store(k_part + at_row, b_kpart, mask=m)
