"""Backward kernels of the delta rule and the gated delta rule, and of additive memory with decay.

Equations, in the symbols of `kernels.scalar_delta_forward`; dS is the gradient of the memory after
the chunk, chunks in reverse:

    dR  = Pᵀ dO + e^{G_C - G} (k dS) + dU            dU: gradient of the residual as an output
    dY  = dR + Mᵀ dR
    dS_in = γ dS + qᵀ (s e^G dO) - kᵀ (β e^G dY)
    dP  = s lower(dO Rᵀ),  dL = -strict_lower(dY Rᵀ),  both times e^{G_i - G_j}
    dq  = s e^G (dO Sᵀ) + dP k
    a   = -e^G (dY Sᵀ) + dL k                        gradient of β k in the erase
    b   = e^{G_C - G} (R dSᵀ) + dPᵀ q + dLᵀ (β k)    gradient of k where it is written
    dk  = β a + b,   dv = β dY,   dβ = v·dY + k·a
    W_ij = dP_ij q_i·k_j + dL_ij β_i k_i·k_j         j < i: the worth of decay e^{G_i - G_j}
    A_i  = e^{G_i} (s q_i·(dO Sᵀ)_i - β_i k_i·(dY Sᵀ)_i),   B_j = e^{G_C - G_j} k_j·(R dSᵀ)_j
    dG_i = Σ_j W_ij - Σ_j W_ji + A_i - B_i,   dG_C += γ <dS, S> + Σ_{j<C} B_j,   without B_C in both

and the gradient of a token's log decay is the sum of dG from the token to the end of its chunk.

In that sum all pairs on one side of the token cancel, so both sums over W come from one matrix, and
pairs whose exponent is zero, the diagonal of P and the last row of the state write, are left out of
both. They would dwarf what remains under strong decay, and rounding would be all that is left.

With inputs normalised inside the op, the gradient of a raw vector x = |x| x̂ is (d - x̂ (x̂·d)) / |x|.
The products x̂·d need no sum over channels: q̂_i·dq̂_i = dO_i·o_i, and since u_i = β (v - S̃ᵀ k̂),
k̂_i·dk̂_i = R_i·(dY_i - dU_i) + (R_i - β v_i)·dY_i. That lets a program finish one slice of
channels before it starts the next.

Cost: three kernels. One walks the chunks in reverse and writes dY and dS, K·V / C numbers a token;
one forms dP and dL of every chunk, 2·C numbers a token, which lets the last read them in both
orientations, since no product may be transposed. No atomics: every sum has one order.
"""

import triton
import triton.language as tl

from kernels.blocks import (
    decay_between,
    first_chunk,
    locate_chunk,
    sequence_bounds,
    summed_decay,
)


@triton.jit
def scalar_delta_state_bwd_kernel(
    q,
    k,
    d_out,
    d_residual,
    read_matrix,
    inverse,
    erase_factor,
    write_factor,
    read_factor,
    chunk_decay,
    start,
    d_y,
    d_states,
    end,
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
    HAS_D_RESIDUAL: tl.constexpr,
    IS_DELTA: tl.constexpr,
    STATE_ONLY: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of the memory and of what is written, chunks in reverse.

    Grid: sequences × segments × HV × value blocks. `start` `[N, SEGMENTS, HV, K, V]` is the
    gradient of the memory behind each segment. Writes dY `[rows, HV, V]`, `d_states`
    `[chunks, HV, K, V]`, the gradient behind each chunk, and `end`: `[N, HV, K, V]`, the gradient
    of the initial memory. With STATE_ONLY only `end` is written, of every segment.
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
    segment_end = tl.minimum(i_s * segment + segment, num_chunks)

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_kv = (o_k < K)[:, None] & m_v[None, :]
    o_kv = o_k[:, None] * V + o_v[None, :]
    b_d_state = tl.zeros([BK, BV], tl.float32)
    if HAS_START:
        b_d_state = tl.load(start + i_state * K * V + o_kv, mask=m_kv, other=0.0)
    o_ck = o_c[:, None] * (H * K) + o_k[None, :]
    o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
    o_gate = o_c * HV
    # P and M come transposed from memory, which is free; transposing a product is not allowed.
    o_cc = o_c[:, None] + o_c[None, :] * (HV * C)
    for i_reverse in tl.range(0, segment_end - i_s * segment, num_stages=STAGES):
        i_c = segment_end - 1 - i_reverse
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
        b_d_out = tl.load(d_out + i_value + o_cv, mask=m_cv, other=0.0)
        b_read_t = tl.load(read_matrix + i_pair + o_cc, mask=m_c[None, :], other=0.0)
        b_write = tl.load(write_factor + i_gate + o_gate, mask=m_c, other=0.0)
        b_read = tl.load(read_factor + i_gate + o_gate, mask=m_c, other=0.0)

        b_operand = b_d_state.to(b_k.dtype)
        if not STATE_ONLY:
            i_memory = ((i_chunk0 + i_c) * HV + i_h) * K * V
            tl.store(d_states + i_memory + o_kv, b_operand, mask=m_kv)
        b_dr = tl.dot(b_k, b_operand, input_precision=PRECISION) * b_write[:, None]
        b_dr = tl.dot(b_read_t, b_d_out, b_dr, input_precision=PRECISION)
        if HAS_D_RESIDUAL:
            b_dr += tl.load(d_residual + i_value + o_cv, mask=m_cv, other=0.0).to(tl.float32)
        b_dy = b_dr
        if IS_DELTA:
            b_inverse_t = tl.load(inverse + i_pair + o_cc, mask=m_c[None, :], other=0.0)
            b_dy = tl.dot(b_inverse_t, b_dr.to(b_k.dtype), b_dr, input_precision=PRECISION)
        if not STATE_ONLY:
            tl.store(d_y + i_value + o_cv, b_dy.to(d_y.dtype.element_ty), mask=m_cv)

        if HAS_DECAY:
            b_d_state *= b_kept
        b_read_out = (b_d_out * b_read[:, None]).to(b_k.dtype)
        b_d_state = tl.dot(tl.trans(b_q), b_read_out, b_d_state, input_precision=PRECISION)
        if IS_DELTA:
            b_erase = tl.load(erase_factor + i_gate + o_gate, mask=m_c, other=0.0)
            b_erased = (-b_dy * b_erase[:, None]).to(b_k.dtype)
            b_d_state = tl.dot(tl.trans(b_k), b_erased, b_d_state, input_precision=PRECISION)

    if STATE_ONLY:
        tl.store(end + i_state * K * V + o_kv, b_d_state, mask=m_kv)
    elif i_s == 0:
        tl.store(end + (i_n * HV + i_h) * K * V + o_kv, b_d_state, mask=m_kv)


@triton.jit
def scalar_delta_pairs_bwd_kernel(
    k,
    v,
    out,
    residual,
    log_decay,
    beta,
    q_rstd,
    k_rstd,
    read_matrix,
    d_out,
    d_residual,
    d_y,
    d_read,
    d_lower,
    d_v,
    pair_decay,
    pair_beta,
    q_dot,
    k_dot,
    cu_seqlens,
    chunk_offsets,
    chunk_owners,
    T,
    num_sequences,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    HAS_D_RESIDUAL: tl.constexpr,
    IS_DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """What the pairs of tokens in a chunk give: dP, dL, dv and the sums over channels of V.

    Grid: chunk slots × HV. Writes `d_read` = dP / (|q_i| |k_j|) and `d_lower` =
    dL β_i / (|k_i| |k_j|), `[rows, HV, C]`, lower triangles; and, `[rows, HV]`, the parts of dG
    and dβ that come of pairs, q̂·dq̂ and k̂·dk̂. For additive memory `residual` is v.
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
    i_value = i_gate * V
    i_pair = i_gate * C
    o_c = tl.arange(0, C)
    m_c = o_c < num_tokens - i_c * C
    o_gate = o_c * HV
    o_cc = o_c[:, None] * (HV * C) + o_c[None, :]

    b_beta = tl.full([C], 1.0, tl.float32)
    if IS_DELTA:
        b_beta = tl.load(beta + i_gate + o_gate, mask=m_c, other=0.0).to(tl.float32)
    b_dp = tl.zeros([C, C], tl.float32)
    b_dl = tl.zeros([C, C], tl.float32)
    b_v_dot = tl.zeros([C], tl.float32)
    b_q_dot = tl.zeros([C], tl.float32)
    b_k_dot = tl.zeros([C], tl.float32)
    for i_v in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
        o_v = i_v * BV + tl.arange(0, BV)
        m_cv = m_c[:, None] & (o_v < V)[None, :]
        o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
        b_r = tl.load(residual + i_value + o_cv, mask=m_cv, other=0.0)
        b_do = tl.load(d_out + i_value + o_cv, mask=m_cv, other=0.0)
        b_dy = tl.load(d_y + i_value + o_cv, mask=m_cv, other=0.0)
        b_dp = tl.dot(b_do, tl.trans(b_r), b_dp, input_precision=PRECISION)
        b_dyf = b_dy.to(tl.float32)
        tl.store(
            d_v + i_value + o_cv, (b_dyf * b_beta[:, None]).to(d_v.dtype.element_ty), mask=m_cv
        )
        if IS_DELTA:
            b_dl = tl.dot(b_dy, tl.trans(b_r), b_dl, input_precision=PRECISION)
            b_v = tl.load(v + i_value + o_cv, mask=m_cv, other=0.0).to(tl.float32)
            b_v_dot += tl.sum(b_dyf * b_v, 1)
        if NORMALIZE:
            b_o = tl.load(out + i_value + o_cv, mask=m_cv, other=0.0).to(tl.float32)
            b_q_dot += tl.sum(b_do.to(tl.float32) * b_o, 1)
            b_rf = b_r.to(tl.float32)
            b_k_dot += tl.sum(b_rf * b_dyf, 1) * (2.0 if IS_DELTA else 1.0)
            if HAS_D_RESIDUAL:
                b_du = tl.load(d_residual + i_value + o_cv, mask=m_cv, other=0.0).to(tl.float32)
                b_k_dot -= tl.sum(b_rf * b_du, 1)

    b_q_rstd = tl.full([C], 1.0, tl.float32)
    b_k_rstd = tl.full([C], 1.0, tl.float32)
    if NORMALIZE:
        b_q_rstd = tl.load(q_rstd + i_row * H + i_hk + o_c * H, mask=m_c, other=0.0)
        b_k_rstd = tl.load(k_rstd + i_row * H + i_hk + o_c * H, mask=m_c, other=0.0)
    m_below = o_c[:, None] > o_c[None, :]
    b_dsum = tl.zeros([C], tl.float32)
    if HAS_DECAY:
        b_read = tl.load(read_matrix + i_pair + o_cc, mask=m_c[:, None], other=0.0)
        b_pairs = tl.where(m_below, b_read * b_dp, 0.0)
        b_dsum += tl.sum(b_pairs, 1) - tl.sum(b_pairs, 0)
        b_sum = summed_decay(tl.load(log_decay + i_gate + o_gate, mask=m_c, other=0.0))
        b_between = decay_between(b_sum[:, None], b_sum[None, :])
        b_dp *= b_between
        b_dl *= b_between
    b_dp = tl.where(o_c[:, None] >= o_c[None, :], b_dp, 0.0)
    b_dp *= (b_q_rstd * scale)[:, None] * b_k_rstd[None, :]
    tl.store(d_read + i_pair + o_cc, b_dp.to(d_read.dtype.element_ty), mask=m_c[:, None])
    if IS_DELTA:
        b_dl = tl.where(m_below, -b_dl, 0.0) * b_k_rstd[:, None] * b_k_rstd[None, :]
        b_gram = tl.zeros([C, C], tl.float32)
        for i_k in range((K + BK - 1) // BK):
            o_k = i_k * BK + tl.arange(0, BK)
            o_ck = o_c[:, None] * (H * K) + o_k[None, :]
            b_k = tl.load(k + i_key + o_ck, mask=m_c[:, None] & (o_k < K)[None, :], other=0.0)
            b_gram = tl.dot(b_k, tl.trans(b_k), b_gram, input_precision=PRECISION)
        b_pairs = b_dl * b_gram
        b_erase_dot = tl.sum(b_pairs, 1)
        if HAS_DECAY:
            b_dsum += b_beta * b_erase_dot - tl.sum(b_pairs * b_beta[:, None], 0)
        b_dl *= b_beta[:, None]
        tl.store(d_lower + i_pair + o_cc, b_dl.to(d_lower.dtype.element_ty), mask=m_c[:, None])
        tl.store(pair_beta + i_gate + o_gate, b_v_dot + b_erase_dot, mask=m_c)
        b_k_dot -= b_beta * b_v_dot
    if HAS_DECAY:
        tl.store(pair_decay + i_gate + o_gate, b_dsum, mask=m_c)
    if NORMALIZE:
        tl.store(q_dot + i_gate + o_gate, b_q_dot, mask=m_c)
        tl.store(k_dot + i_gate + o_gate, b_k_dot, mask=m_c)


@triton.jit
def scalar_delta_token_bwd_kernel(
    q,
    k,
    residual,
    beta,
    q_rstd,
    k_rstd,
    key_factor,
    write_factor,
    read_factor,
    chunk_decay,
    d_out,
    d_y,
    d_read,
    d_lower,
    pair_decay,
    pair_beta,
    q_dot,
    k_dot,
    states,
    d_states,
    d_q,
    d_k,
    d_log_decay,
    d_beta,
    cu_seqlens,
    chunk_offsets,
    chunk_owners,
    T,
    num_sequences,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HAS_DECAY: tl.constexpr,
    IS_DELTA: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of q, k and the gates, from the memories around a chunk and its pairs.

    Grid: chunk slots × HV. `d_q` and `d_k` are per value head, `[rows, HV, K]`.
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
    i_value = i_gate * V
    i_pair = i_gate * C
    i_state = (i_chunk * HV + i_h) * K * V
    o_c = tl.arange(0, C)
    m_c = o_c < num_tokens - i_c * C
    o_gate = o_c * HV
    o_lower = o_c[:, None] * (HV * C) + o_c[None, :]
    o_upper = o_c[:, None] + o_c[None, :] * (HV * C)
    last = tl.minimum(num_tokens - i_c * C, C) - 1

    b_read = tl.load(read_factor + i_gate + o_gate, mask=m_c, other=0.0)
    b_write = tl.load(write_factor + i_gate + o_gate, mask=m_c, other=0.0)
    b_beta = tl.zeros([C], tl.float32)
    b_key = tl.zeros([C], tl.float32)
    if IS_DELTA:
        b_beta = tl.load(beta + i_gate + o_gate, mask=m_c, other=0.0).to(tl.float32)
        b_key = tl.load(key_factor + i_gate + o_gate, mask=m_c, other=0.0)
    b_dsum = tl.zeros([C], tl.float32)
    b_d_beta = tl.zeros([C], tl.float32)
    d_total = 0.0
    overlap = 0.0
    # Not pipelined, or with one block of V it would be, and hold the tiles of three blocks of K.
    for i_k in tl.range(0, (K + BK - 1) // BK, num_stages=1):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_ck = m_c[:, None] & m_k[None, :]
        o_ck = o_c[:, None] * (H * K) + o_k[None, :]
        b_dq = tl.zeros([C, BK], tl.float32)
        b_dk = tl.zeros([C, BK], tl.float32)
        b_dk_erase = tl.zeros([C, BK], tl.float32)
        for i_v in tl.range(0, (V + BV - 1) // BV, num_stages=STAGES):
            o_v = i_v * BV + tl.arange(0, BV)
            m_cv = m_c[:, None] & (o_v < V)[None, :]
            m_kv = m_k[:, None] & (o_v < V)[None, :]
            o_cv = o_c[:, None] * (HV * V) + o_v[None, :]
            o_kv = o_k[:, None] * V + o_v[None, :]
            b_r = tl.load(residual + i_value + o_cv, mask=m_cv, other=0.0)
            b_do = tl.load(d_out + i_value + o_cv, mask=m_cv, other=0.0)
            b_state = tl.load(states + i_state + o_kv, mask=m_kv, other=0.0)
            b_d_state = tl.load(d_states + i_state + o_kv, mask=m_kv, other=0.0)
            b_dq = tl.dot(b_do, tl.trans(b_state), b_dq, input_precision=PRECISION)
            b_dk = tl.dot(b_r, tl.trans(b_d_state), b_dk, input_precision=PRECISION)
            if IS_DELTA:
                b_dy = tl.load(d_y + i_value + o_cv, mask=m_cv, other=0.0)
                b_dk_erase = tl.dot(b_dy, tl.trans(b_state), b_dk_erase, input_precision=PRECISION)
            if HAS_DECAY:
                overlap += tl.sum(b_state.to(tl.float32) * b_d_state.to(tl.float32))

        b_q = tl.load(q + i_key + o_ck, mask=m_ck, other=0.0)
        b_k = tl.load(k + i_key + o_ck, mask=m_ck, other=0.0)
        b_dq *= b_read[:, None]
        b_dk *= b_write[:, None]
        if HAS_DECAY:
            b_kept = tl.where(o_c == last, 0.0, tl.sum(b_dk * b_k, 1))
            d_total += tl.sum(b_kept, 0)
            b_dsum += tl.sum(b_dq * b_q, 1) - b_kept
        b_lower = tl.load(d_read + i_pair + o_lower, mask=m_c[:, None], other=0.0)
        b_upper = tl.load(d_read + i_pair + o_upper, mask=m_c[None, :], other=0.0)
        b_dq = tl.dot(b_lower, b_k, b_dq, input_precision=PRECISION)
        b_dk = tl.dot(b_upper, b_q, b_dk, input_precision=PRECISION)
        if IS_DELTA:
            b_dk_erase *= b_key[:, None]
            b_erase_dot = tl.sum(b_dk_erase * b_k, 1)
            b_d_beta -= b_erase_dot
            b_dk -= b_dk_erase * b_beta[:, None]
            # A key erases what came before it and is written for what comes after it: one triangle
            # each, and their sum is exact.
            b_both = tl.load(d_lower + i_pair + o_lower, mask=m_c[:, None], other=0.0)
            b_both += tl.load(d_lower + i_pair + o_upper, mask=m_c[None, :], other=0.0)
            b_dk = tl.dot(b_both, b_k, b_dk, input_precision=PRECISION)
        if NORMALIZE:
            b_q_rstd = tl.load(q_rstd + i_row * H + i_hk + o_c * H, mask=m_c, other=0.0)
            b_k_rstd = tl.load(k_rstd + i_row * H + i_hk + o_c * H, mask=m_c, other=0.0)
            b_q_dot = tl.load(q_dot + i_gate + o_gate, mask=m_c, other=0.0)
            b_k_dot = tl.load(k_dot + i_gate + o_gate, mask=m_c, other=0.0)
            b_dq -= b_q * (b_q_dot * b_q_rstd * b_q_rstd)[:, None]
            b_dk -= b_k * (b_k_dot * b_k_rstd * b_k_rstd)[:, None]
        o_grad = o_c[:, None] * (HV * K) + o_k[None, :]
        tl.store(d_q + i_gate * K + o_grad, b_dq.to(d_q.dtype.element_ty), mask=m_ck)
        tl.store(d_k + i_gate * K + o_grad, b_dk.to(d_k.dtype.element_ty), mask=m_ck)

    if IS_DELTA:
        if HAS_DECAY:
            b_dsum += b_beta * b_d_beta
        b_d_beta += tl.load(pair_beta + i_gate + o_gate, mask=m_c, other=0.0)
        tl.store(d_beta + i_gate + o_gate, b_d_beta.to(d_beta.dtype.element_ty), mask=m_c)
    if HAS_DECAY:
        d_total += overlap * tl.load(chunk_decay + i_chunk * HV + i_h)
        b_dsum += tl.load(pair_decay + i_gate + o_gate, mask=m_c, other=0.0)
        b_dsum = tl.where(o_c == last, b_dsum + d_total, b_dsum)
        b_d_log_decay = tl.cumsum(tl.where(m_c, b_dsum, 0.0), 0, reverse=True)
        tl.store(
            d_log_decay + i_gate + o_gate, b_d_log_decay.to(d_log_decay.dtype.element_ty), mask=m_c
        )
