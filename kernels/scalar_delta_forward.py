"""Forward kernels of the delta rule and the gated delta rule, and of additive memory with decay.

Equations, per sequence and value head, with G the log decay summed inside a chunk, inclusive, and S
the memory that enters the chunk:

    L_ij = β_i e^{G_i - G_j} k_i·k_j  (j < i)       P_ij = s e^{G_i - G_j} q_i·k_j  (j ≤ i)
    M = (I + L)⁻¹ - I                               γ = e^{G_C}
    Y = β v - β e^G (k S)
    R = Y + M Y                                     the residuals: what is written
    o = s e^G (q S) + P R
    S' = γ S + kᵀ (e^{G_C - G} R)

Symbols: q, k `[B, T, H, K]`; v, o, R `[B, T, HV, V]`; β in [0, 2] and log decay ≤ 0 `[B, T, HV]`; s
the scale. Additive memory is L = 0 with R = v. With normalised inputs, q and k stand for their unit
vectors; the kernels read the raw ones and fold 1 / norm into factors per row.

Source: the chunked form of Yang et al., "Parallelizing Linear Transformers with the Delta Rule"
(arXiv 2406.06484, section 3.2) and "Gated Delta Networks" (arXiv 2412.06464, section 3.3). We
differ: the inverse is applied once, to Y, so that the published W and U tensors never exist, and
its identity is kept apart, so that 16-bit products round only what Y is corrected by.

Cost: the first kernel writes M, P and 20 bytes of factors per token and value head (β among them,
in float32, since asynchronous copies take at least 4 bytes); the second walks the chunks with S in
float32 registers and reads each input once per value block. For the backward it also stores R and
the memory that enters every chunk, K·V / C numbers a token.
"""

import triton
import triton.language as tl

from kernels.blocks import (
    decay_between,
    diagonal_blocks,
    first_chunk,
    locate_chunk,
    sequence_bounds,
    summed_decay,
    unit_lower_inverse,
)


@triton.jit
def scalar_delta_prepare_kernel(
    q,
    k,
    log_decay,
    beta,
    read_matrix,
    inverse,
    q_rstd,
    k_rstd,
    key_factor,
    target_factor,
    erase_factor,
    write_factor,
    read_factor,
    chunk_decay,
    cu_seqlens,
    chunk_offsets,
    chunk_owners,
    T,
    num_sequences,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    IS_DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a chunk's tokens say about each other: P, M and the factors of rows.

    Grid: chunk slots × HV. Writes P and M `[rows, HV, C]`, the factors `[rows, HV]`, γ
    `[chunks, HV]` and, with NORMALIZE, 1 / norm of q and k `[rows, H]`.
    """
    i_program = tl.program_id(0).to(tl.int64)
    i_chunk = i_program // HV
    i_h = i_program % HV
    i_hk = i_h // (HV // H)
    i_n, i_c = locate_chunk(chunk_owners, chunk_offsets, i_chunk, T, C, PACKED)
    if i_n >= num_sequences:
        return
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    i_row = i_first + i_c * C
    i_gate = i_row * HV + i_h
    i_key = (i_row * H + i_hk) * K
    i_pair = i_gate * C
    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    m_c = o_c < num_tokens - i_c * C
    m_ck = m_c[:, None] & (o_k < K)[None, :]
    o_ck = o_c[:, None] * (H * K) + o_k[None, :]
    o_gate = o_c * HV

    b_q = tl.load(q + i_key + o_ck, mask=m_ck, other=0.0)
    b_k = tl.load(k + i_key + o_ck, mask=m_ck, other=0.0)
    b_q_rstd = tl.full([C], 1.0, tl.float32)
    b_k_rstd = tl.full([C], 1.0, tl.float32)
    if NORMALIZE:
        b_q_rstd = tl.rsqrt(tl.sum(b_q.to(tl.float32) * b_q.to(tl.float32), 1) + 1e-6)
        b_k_rstd = tl.rsqrt(tl.sum(b_k.to(tl.float32) * b_k.to(tl.float32), 1) + 1e-6)
        if i_h % (HV // H) == 0:
            tl.store(q_rstd + i_row * H + i_hk + o_c * H, b_q_rstd, mask=m_c)
            tl.store(k_rstd + i_row * H + i_hk + o_c * H, b_k_rstd, mask=m_c)

    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_scores *= b_q_rstd[:, None] * b_k_rstd[None, :] * scale
    b_in = tl.full([C], 1.0, tl.float32)
    b_out = tl.full([C], 1.0, tl.float32)
    b_between = tl.full([C, C], 1.0, tl.float32)
    if HAS_DECAY:
        # Rows behind the end decay by nothing, so the last row holds the sum of the whole chunk.
        b_log_decay = tl.load(log_decay + i_gate + o_gate, mask=m_c, other=0.0)
        b_sum = summed_decay(b_log_decay)
        b_total = tl.sum(tl.where(o_c == C - 1, b_sum, 0.0), 0)
        b_in = tl.math.exp2(b_sum.to(tl.float32))
        b_out = decay_between(b_total, b_sum)
        b_between = decay_between(b_sum[:, None], b_sum[None, :])
        tl.store(chunk_decay + i_chunk * HV + i_h, tl.math.exp2(b_total.to(tl.float32)))
    m_causal = (o_c[:, None] >= o_c[None, :]) & m_c[:, None]
    b_read = tl.where(m_causal, b_scores * b_between, 0.0)
    o_cc = o_c[:, None] * (HV * C) + o_c[None, :]
    tl.store(
        read_matrix + i_pair + o_cc, b_read.to(read_matrix.dtype.element_ty), mask=m_c[:, None]
    )
    tl.store(read_factor + i_gate + o_gate, b_in * b_q_rstd * scale, mask=m_c)
    tl.store(write_factor + i_gate + o_gate, b_out * b_k_rstd, mask=m_c)

    if IS_DELTA:
        b_beta = tl.load(beta + i_gate + o_gate, mask=m_c, other=0.0).to(tl.float32)
        tl.store(target_factor + i_gate + o_gate, b_beta, mask=m_c)
        tl.store(key_factor + i_gate + o_gate, b_in * b_k_rstd, mask=m_c)
        tl.store(erase_factor + i_gate + o_gate, b_beta * b_in * b_k_rstd, mask=m_c)
        b_gram = tl.dot(b_k, tl.trans(b_k), input_precision=PRECISION)
        b_gram *= b_k_rstd[:, None] * b_k_rstd[None, :]
        # The Gram matrix is symmetric, so its blocks serve the transpose of L as well.
        b_blocks_t = diagonal_blocks(b_gram, C) * tl.reshape(b_beta, [C // 16, 1, 16])
        if HAS_DECAY:
            b_later = tl.reshape(b_sum, [C // 16, 1, 16])
            b_blocks_t *= decay_between(b_later, tl.reshape(b_sum, [C // 16, 16, 1]))
        b_lower = b_gram * b_between * b_beta[:, None]
        b_inverse = unit_lower_inverse(b_lower, b_blocks_t, C, PRECISION)
        # Without its diagonal of ones, which a product in 16 bit need not round.
        b_inverse = tl.where(o_c[:, None] > o_c[None, :], b_inverse, 0.0)
        tl.store(inverse + i_pair + o_cc, b_inverse.to(inverse.dtype.element_ty), mask=m_c[:, None])


@triton.jit
def scalar_delta_segment_fwd_kernel(
    k,
    v,
    target_factor,
    inverse,
    erase_factor,
    write_factor,
    chunk_decay,
    local_end,
    transition,
    cu_seqlens,
    chunk_offsets,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    IS_DELTA: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What a segment does to memory: S -> transition S + local_end.

    Grid: sequences × segments × HV × column blocks. The columns are those of V, walked from an
    empty memory, then those of K, walked from the identity with nothing to write, which gives
    `transition` `[N, SEGMENTS, HV, K, K]` by the same arithmetic as `local_end`
    `[N, SEGMENTS, HV, K, V]`.
    """
    BLOCKS_V: tl.constexpr = (V + BV - 1) // BV
    BLOCKS: tl.constexpr = BLOCKS_V + (K + BV - 1) // BV
    i_program = tl.program_id(0).to(tl.int64)
    i_v = (i_program % BLOCKS).to(tl.int32)
    i_state = i_program // BLOCKS
    i_h = i_state % HV
    i_hk = i_h // (HV // H)
    i_s = (i_state // HV % SEGMENTS).to(tl.int32)
    i_n = i_state // (HV * SEGMENTS)
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    i_chunk0 = first_chunk(chunk_offsets, i_n, T, C, PACKED)
    num_chunks = tl.cdiv(num_tokens, C)
    segment = tl.cdiv(num_chunks, SEGMENTS)

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    # In a block of V every o_j is negative, in a block of K every o_v lies behind V.
    o_j = (i_v - BLOCKS_V) * BV + tl.arange(0, BV)
    m_v = o_v < V
    b_state = tl.where(o_k[:, None] == o_j[None, :], 1.0, 0.0)
    o_ck = o_c[:, None] * (H * K) + o_k[None, :]
    o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
    o_cc = o_c[:, None] * (HV * C) + o_c[None, :]
    o_gate = o_c * HV
    for i_c in tl.range(
        i_s * segment, tl.minimum(i_s * segment + segment, num_chunks), num_stages=STAGES
    ):
        i_row = i_first + i_c * C
        i_gate = i_row * HV + i_h
        i_key = (i_row * H + i_hk) * K
        i_value = i_gate * V
        i_pair = i_gate * C
        m_c = o_c < num_tokens - i_c * C
        m_ck = m_c[:, None] & (o_k < K)[None, :]
        m_cv = m_c[:, None] & m_v[None, :]
        if HAS_DECAY:
            # Asked for early: a scalar is not copied ahead as tiles are.
            b_kept = tl.load(chunk_decay + (i_chunk0 + i_c) * HV + i_h)
        b_k = tl.load(k + i_key + o_ck, mask=m_ck, other=0.0)
        b_v = tl.load(v + i_value + o_cv, mask=m_cv, other=0.0)
        b_write = tl.load(write_factor + i_gate + o_gate, mask=m_c, other=0.0)
        b_residual = b_v.to(tl.float32)
        if IS_DELTA:
            b_inverse = tl.load(inverse + i_pair + o_cc, mask=m_c[:, None], other=0.0)
            b_target = tl.load(target_factor + i_gate + o_gate, mask=m_c, other=0.0)
            b_erase = tl.load(erase_factor + i_gate + o_gate, mask=m_c, other=0.0)
            b_seen = tl.dot(b_k, b_state.to(b_k.dtype), input_precision=PRECISION)
            b_y = b_target[:, None] * b_residual - b_erase[:, None] * b_seen
            b_residual = tl.dot(b_inverse, b_y.to(b_k.dtype), b_y, input_precision=PRECISION)
        if HAS_DECAY:
            b_state *= b_kept
        b_written = (b_residual * b_write[:, None]).to(b_k.dtype)
        b_state = tl.dot(tl.trans(b_k), b_written, b_state, input_precision=PRECISION)

    if i_v >= BLOCKS_V:
        m_kj = (o_k < K)[:, None] & (o_j < K)[None, :]
        tl.store(transition + i_state * K * K + o_k[:, None] * K + o_j[None, :], b_state, mask=m_kj)
    else:
        m_kv = (o_k < K)[:, None] & m_v[None, :]
        tl.store(local_end + i_state * K * V + o_k[:, None] * V + o_v[None, :], b_state, mask=m_kv)


@triton.jit
def scalar_delta_fwd_kernel(
    q,
    k,
    v,
    target_factor,
    read_matrix,
    inverse,
    erase_factor,
    write_factor,
    read_factor,
    chunk_decay,
    start,
    out,
    residual,
    states,
    final,
    cu_seqlens,
    chunk_offsets,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_START: tl.constexpr,
    IS_DELTA: tl.constexpr,
    STORE_RESIDUAL: tl.constexpr,
    STORE_STATES: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Outputs, residuals and memories of a segment, chunk after chunk.

    Grid: sequences × segments × HV × value blocks. A program owns BV columns of the memory, float32
    in registers, from `start` `[N, SEGMENTS, HV, K, V]` on; the last segment of a sequence writes
    `final` `[N, HV, K, V]`. `states` `[chunks, HV, K, V]` takes the memory that enters each chunk.
    """
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0).to(tl.int64)
    i_v = (i_program % BLOCKS).to(tl.int32)
    i_state = i_program // BLOCKS
    i_h = i_state % HV
    i_hk = i_h // (HV // H)
    i_s = (i_state // HV % SEGMENTS).to(tl.int32)
    i_n = i_state // (HV * SEGMENTS)
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    i_chunk0 = first_chunk(chunk_offsets, i_n, T, C, PACKED)
    num_chunks = tl.cdiv(num_tokens, C)
    segment = tl.cdiv(num_chunks, SEGMENTS)

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_kv = (o_k < K)[:, None] & m_v[None, :]
    o_kv = o_k[:, None] * V + o_v[None, :]
    b_state = tl.zeros([BK, BV], tl.float32)
    if HAS_START:
        b_state = tl.load(start + i_state * K * V + o_kv, mask=m_kv, other=0.0)
    o_ck = o_c[:, None] * (H * K) + o_k[None, :]
    o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
    o_cc = o_c[:, None] * (HV * C) + o_c[None, :]
    o_gate = o_c * HV
    for i_c in tl.range(
        i_s * segment, tl.minimum(i_s * segment + segment, num_chunks), num_stages=STAGES
    ):
        i_row = i_first + i_c * C
        i_gate = i_row * HV + i_h
        i_key = (i_row * H + i_hk) * K
        i_value = i_gate * V
        i_pair = i_gate * C
        m_c = o_c < num_tokens - i_c * C
        m_ck = m_c[:, None] & (o_k < K)[None, :]
        m_cv = m_c[:, None] & m_v[None, :]
        if HAS_DECAY:
            # Asked for early: a scalar is not copied ahead as tiles are.
            b_kept = tl.load(chunk_decay + (i_chunk0 + i_c) * HV + i_h)
        b_k = tl.load(k + i_key + o_ck, mask=m_ck, other=0.0)
        b_q = tl.load(q + i_key + o_ck, mask=m_ck, other=0.0)
        b_v = tl.load(v + i_value + o_cv, mask=m_cv, other=0.0)
        b_read_matrix = tl.load(read_matrix + i_pair + o_cc, mask=m_c[:, None], other=0.0)
        b_write = tl.load(write_factor + i_gate + o_gate, mask=m_c, other=0.0)
        b_read = tl.load(read_factor + i_gate + o_gate, mask=m_c, other=0.0)

        # The operand copy of the memory; the running sum stays in float32.
        b_operand = b_state.to(b_k.dtype)
        if STORE_STATES:
            i_memory = ((i_chunk0 + i_c) * HV + i_h) * K * V
            tl.store(states + i_memory + o_kv, b_operand, mask=m_kv)
        b_residual = b_v.to(tl.float32)
        if IS_DELTA:
            b_inverse = tl.load(inverse + i_pair + o_cc, mask=m_c[:, None], other=0.0)
            b_target = tl.load(target_factor + i_gate + o_gate, mask=m_c, other=0.0)
            b_erase = tl.load(erase_factor + i_gate + o_gate, mask=m_c, other=0.0)
            b_seen = tl.dot(b_k, b_operand, input_precision=PRECISION)
            b_y = b_target[:, None] * b_residual - b_erase[:, None] * b_seen
            b_residual = tl.dot(b_inverse, b_y.to(b_k.dtype), b_y, input_precision=PRECISION)
            if STORE_RESIDUAL:
                tl.store(residual + i_value + o_cv, b_residual.to(b_k.dtype), mask=m_cv)

        b_out = tl.dot(b_q, b_operand, input_precision=PRECISION) * b_read[:, None]
        b_out = tl.dot(b_read_matrix, b_residual.to(b_k.dtype), b_out, input_precision=PRECISION)
        tl.store(out + i_value + o_cv, b_out.to(out.dtype.element_ty), mask=m_cv)

        if HAS_DECAY:
            b_state *= b_kept
        b_written = (b_residual * b_write[:, None]).to(b_k.dtype)
        b_state = tl.dot(tl.trans(b_k), b_written, b_state, input_precision=PRECISION)

    if i_s == SEGMENTS - 1:
        tl.store(final + (i_n * HV + i_h) * K * V + o_kv, b_state, mask=m_kv)
