"""Backward kernels of the delta rule and the gated delta rule, and of additive memory with decay.

Equations, in the symbols of `kernels.scalar_delta_forward`; dS is the gradient of the memory after
the chunk, chunks in reverse:

    dR  = Pᵀ dO + e^{G_C - G} (k dS) + dU            dU: gradient of the residual as an output
    dY  = Mᵀ dR                                      gradient of β v - β e^G (k S)
    dS_in = γ dS + qᵀ (s e^G dO) - kᵀ (β e^G dY)
    dP  = s lower(dO Rᵀ),  dL = -strict_lower(dY Rᵀ),  both times e^{G_i - G_j}
    dq  = s e^G (dO Sᵀ) + dP k
    a   = -e^G (dY Sᵀ) + dL k                        gradient of β k in the erase
    b   = e^{G_C - G} (R dSᵀ) + dPᵀ q + dLᵀ (β k)    gradient of k where it is written
    dk  = β a + b,   dv = β dY,   dβ = v·dY + k·a
    dG_i = q_i·dq°_i + β k_i·a_i - k_i·b°_i
    dG_C += γ <dS, S> + Σ_{j<C} e^{G_C - G_j} k_j·(R dSᵀ)_j

and the gradient of a token's log decay is the sum of dG from the token to the end of its chunk.

The circle stands for sums without the terms whose exponent is zero, which are the diagonal of P and
the last row of the state write. They enter dG with both signs; under strong decay they dwarf what
remains, so that leaving them in and letting them cancel loses every digit.

With inputs normalised inside the op, the gradient of a raw vector x = |x| x̂ is (d - x̂ (x̂·d)) / |x|.
The products x̂·d need no sum over channels: q̂_i·dq̂_i = dO_i·o_i, and since u_i = β (v - S̃ᵀ k̂),
k̂_i·dk̂_i = R_i·(dY_i - dU_i) + (R_i - β v_i)·dY_i. That lets a program finish one slice of
channels before it starts the next.

Cost: the first kernel writes dY and dS, K·V / C numbers a token; the second reads each chunk on its
own. No atomics: one program owns a chunk of a head, so every sum has one order.
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
    for i_reverse in tl.range(0, segment_end - i_s * segment, num_stages=STAGES):
        i_c = segment_end - 1 - i_reverse
        i_row = i_first + i_c * C
        m_c = o_c < num_tokens - i_c * C
        m_ck = m_c[:, None] & (o_k < K)[None, :]
        m_cv = m_c[:, None] & m_v[None, :]
        o_ck = (i_row * H + i_hk) * K + o_c[:, None] * (H * K) + o_k[None, :]
        o_cv = (i_row * HV + i_h) * V + o_c[:, None] * (HV * V) + o_v[None, :]
        # P and M come transposed from memory, which is free; transposing a product is not allowed.
        o_cc = (i_row * HV + i_h) * C + o_c[:, None] + o_c[None, :] * (HV * C)
        o_gate = i_row * HV + i_h + o_c * HV
        b_k = tl.load(k + o_ck, mask=m_ck, other=0.0)
        b_q = tl.load(q + o_ck, mask=m_ck, other=0.0)
        b_d_out = tl.load(d_out + o_cv, mask=m_cv, other=0.0)
        b_read_t = tl.load(read_matrix + o_cc, mask=m_c[None, :], other=0.0)
        b_write = tl.load(write_factor + o_gate, mask=m_c, other=0.0)
        b_read = tl.load(read_factor + o_gate, mask=m_c, other=0.0)

        b_operand = b_d_state.to(b_k.dtype)
        if not STATE_ONLY:
            o_state = ((i_chunk0 + i_c) * HV + i_h) * K * V
            tl.store(d_states + o_state + o_kv, b_operand, mask=m_kv)
        b_dr = tl.dot(b_k, b_operand, input_precision=PRECISION) * b_write[:, None]
        b_dr = tl.dot(b_read_t, b_d_out, b_dr, input_precision=PRECISION)
        if HAS_D_RESIDUAL:
            b_dr += tl.load(d_residual + o_cv, mask=m_cv, other=0.0).to(tl.float32)
        b_dy = b_dr
        if IS_DELTA:
            b_inverse_t = tl.load(inverse + o_cc, mask=m_c[None, :], other=0.0)
            b_dy = tl.dot(b_inverse_t, b_dr.to(b_k.dtype), input_precision=PRECISION)
        if not STATE_ONLY:
            tl.store(d_y + o_cv, b_dy.to(d_y.dtype.element_ty), mask=m_cv)

        if HAS_DECAY:
            b_d_state *= tl.load(chunk_decay + (i_chunk0 + i_c) * HV + i_h)
        b_read_out = (b_d_out * b_read[:, None]).to(b_k.dtype)
        b_d_state = tl.dot(tl.trans(b_q), b_read_out, b_d_state, input_precision=PRECISION)
        if IS_DELTA:
            b_erase = tl.load(erase_factor + o_gate, mask=m_c, other=0.0)
            b_erased = (-b_dy * b_erase[:, None]).to(b_k.dtype)
            b_d_state = tl.dot(tl.trans(b_k), b_erased, b_d_state, input_precision=PRECISION)

    if STATE_ONLY:
        tl.store(end + i_state * K * V + o_kv, b_d_state, mask=m_kv)
    elif i_s == 0:
        tl.store(end + (i_n * HV + i_h) * K * V + o_kv, b_d_state, mask=m_kv)


@triton.jit
def scalar_delta_token_bwd_kernel(
    q,
    k,
    v,
    out,
    residual,
    log_decay,
    beta,
    q_rstd,
    k_rstd,
    d_out,
    d_residual,
    d_y,
    states,
    d_states,
    d_q,
    d_k,
    d_v,
    d_log_decay,
    d_beta,
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
    """Gradients of every input from one chunk's own tiles; `residual` is v for additive memory.

    Grid: chunk slots × HV. `d_q` and `d_k` are per value head, `[rows, HV, K]`.
    """
    BLOCKS_K: tl.constexpr = (K + BK - 1) // BK
    BLOCKS_V: tl.constexpr = (V + BV - 1) // BV
    i_program = tl.program_id(0).to(tl.int64)
    i_chunk = i_program // HV
    i_h = i_program % HV
    i_hk = i_h // (HV // H)
    i_n, i_c = locate_chunk(chunk_owners, chunk_offsets, i_chunk, T, C, PACKED)
    if i_n >= num_sequences:
        return
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    i_row = i_first + i_c * C
    o_c = tl.arange(0, C)
    m_c = o_c < num_tokens - i_c * C
    o_gate = i_row * HV + i_h + o_c * HV
    o_v0 = (i_row * HV + i_h) * V + o_c[:, None] * (HV * V)
    o_state0 = (i_chunk * HV + i_h) * K * V

    b_beta = tl.full([C], 1.0, tl.float32)
    if IS_DELTA:
        b_beta = tl.load(beta + o_gate, mask=m_c, other=0.0).to(tl.float32)
    b_q_rstd = tl.full([C], 1.0, tl.float32)
    b_k_rstd = tl.full([C], 1.0, tl.float32)
    if NORMALIZE:
        b_q_rstd = tl.load(q_rstd + i_row * H + i_hk + o_c * H, mask=m_c, other=0.0)
        b_k_rstd = tl.load(k_rstd + i_row * H + i_hk + o_c * H, mask=m_c, other=0.0)

    # Both orientations of dP and dL are accumulated, since neither may be transposed afterwards.
    b_dp = tl.zeros([C, C], tl.float32)
    b_dp_t = tl.zeros([C, C], tl.float32)
    b_dl = tl.zeros([C, C], tl.float32)
    b_dl_t = tl.zeros([C, C], tl.float32)
    b_diagonal = tl.zeros([C], tl.float32)
    b_d_beta = tl.zeros([C], tl.float32)
    b_q_dot = tl.zeros([C], tl.float32)
    b_k_dot = tl.zeros([C], tl.float32)
    for i_v in tl.range(0, BLOCKS_V, num_stages=STAGES):
        o_v = i_v * BV + tl.arange(0, BV)
        m_cv = m_c[:, None] & (o_v < V)[None, :]
        o_cv = o_v0 + o_v[None, :]
        b_r = tl.load(residual + o_cv, mask=m_cv, other=0.0)
        b_do = tl.load(d_out + o_cv, mask=m_cv, other=0.0)
        b_dy = tl.load(d_y + o_cv, mask=m_cv, other=0.0)
        b_dp = tl.dot(b_do, tl.trans(b_r), b_dp, input_precision=PRECISION)
        b_dp_t = tl.dot(b_r, tl.trans(b_do), b_dp_t, input_precision=PRECISION)
        b_rf = b_r.to(tl.float32)
        b_dyf = b_dy.to(tl.float32)
        b_diagonal += tl.sum(b_do.to(tl.float32) * b_rf, 1)
        tl.store(d_v + o_cv, (b_dyf * b_beta[:, None]).to(d_v.dtype.element_ty), mask=m_cv)
        if IS_DELTA:
            b_dl = tl.dot(b_dy, tl.trans(b_r), b_dl, input_precision=PRECISION)
            b_dl_t = tl.dot(b_r, tl.trans(b_dy), b_dl_t, input_precision=PRECISION)
            b_v = tl.load(v + o_cv, mask=m_cv, other=0.0).to(tl.float32)
            b_v_dot = tl.sum(b_dyf * b_v, 1)
            b_d_beta += b_v_dot
            if NORMALIZE:
                b_k_dot += tl.sum(b_rf * b_dyf, 1) - b_beta * b_v_dot
        if NORMALIZE:
            b_o = tl.load(out + o_cv, mask=m_cv, other=0.0).to(tl.float32)
            b_q_dot += tl.sum(b_do.to(tl.float32) * b_o, 1)
            b_k_dot += tl.sum(b_rf * b_dyf, 1)
            if HAS_D_RESIDUAL:
                b_du = tl.load(d_residual + o_cv, mask=m_cv, other=0.0).to(tl.float32)
                b_k_dot -= tl.sum(b_rf * b_du, 1)

    m_below = o_c[:, None] > o_c[None, :]
    m_above = o_c[:, None] < o_c[None, :]
    last = tl.minimum(num_tokens - i_c * C, C) - 1
    b_in = tl.full([C], 1.0, tl.float32)
    b_out = tl.full([C], 1.0, tl.float32)
    if HAS_DECAY:
        b_sum = summed_decay(tl.load(log_decay + o_gate, mask=m_c, other=0.0))
        b_total = tl.sum(tl.where(o_c == C - 1, b_sum, 0.0), 0)
        b_in = tl.math.exp2(b_sum.to(tl.float32))
        b_out = decay_between(b_total, b_sum)
        b_between = decay_between(b_sum[:, None], b_sum[None, :])
        b_between_t = decay_between(b_sum[None, :], b_sum[:, None])
        b_dp *= b_between
        b_dl *= b_between
        b_dp_t *= b_between_t
        b_dl_t *= b_between_t
    b_diagonal *= scale
    b_dp = tl.where(m_below, b_dp, 0.0) * (b_k_rstd * scale)[None, :]
    b_dp_t = tl.where(m_above, b_dp_t, 0.0) * (b_q_rstd * scale)[None, :]
    b_dl = tl.where(m_below, -b_dl, 0.0) * b_k_rstd[None, :]
    b_dl_t = tl.where(m_above, -b_dl_t, 0.0) * (b_beta * b_k_rstd)[None, :]

    b_dsum = tl.zeros([C], tl.float32)
    d_total = 0.0
    overlap = 0.0
    for i_k in range(BLOCKS_K):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m_ck = m_c[:, None] & m_k[None, :]
        o_ck = (i_row * H + i_hk) * K + o_c[:, None] * (H * K) + o_k[None, :]
        b_dq = tl.zeros([C, BK], tl.float32)
        b_erase = tl.zeros([C, BK], tl.float32)
        b_write = tl.zeros([C, BK], tl.float32)
        for i_v in tl.range(0, BLOCKS_V, num_stages=STAGES):
            o_v = i_v * BV + tl.arange(0, BV)
            m_cv = m_c[:, None] & (o_v < V)[None, :]
            m_kv = m_k[:, None] & (o_v < V)[None, :]
            o_cv = o_v0 + o_v[None, :]
            o_kv = o_state0 + o_k[:, None] * V + o_v[None, :]
            b_r = tl.load(residual + o_cv, mask=m_cv, other=0.0)
            b_do = tl.load(d_out + o_cv, mask=m_cv, other=0.0)
            b_state = tl.load(states + o_kv, mask=m_kv, other=0.0)
            b_d_state = tl.load(d_states + o_kv, mask=m_kv, other=0.0)
            b_dq = tl.dot(b_do, tl.trans(b_state), b_dq, input_precision=PRECISION)
            b_write = tl.dot(b_r, tl.trans(b_d_state), b_write, input_precision=PRECISION)
            if IS_DELTA:
                b_dy = tl.load(d_y + o_cv, mask=m_cv, other=0.0)
                b_erase = tl.dot(b_dy, tl.trans(b_state), b_erase, input_precision=PRECISION)
            if HAS_DECAY:
                overlap += tl.sum(b_state.to(tl.float32) * b_d_state.to(tl.float32))

        b_q = tl.load(q + o_ck, mask=m_ck, other=0.0)
        b_k = tl.load(k + o_ck, mask=m_ck, other=0.0)
        b_qn = b_q.to(tl.float32) * b_q_rstd[:, None]
        b_kn = b_k.to(tl.float32) * b_k_rstd[:, None]
        b_dq *= (b_in * scale)[:, None]
        b_dq = tl.dot(b_dp.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
        b_write *= b_out[:, None]
        if HAS_DECAY:
            d_total += tl.sum(tl.where(o_c == last, 0.0, tl.sum(b_write * b_kn, 1)), 0)
        b_write = tl.dot(b_dp_t.to(b_k.dtype), b_q, b_write, input_precision=PRECISION)
        if IS_DELTA:
            b_erase *= -b_in[:, None]
            b_erase = tl.dot(b_dl.to(b_k.dtype), b_k, b_erase, input_precision=PRECISION)
            b_write = tl.dot(b_dl_t.to(b_k.dtype), b_k, b_write, input_precision=PRECISION)
            b_erase_dot = tl.sum(b_erase * b_kn, 1)
            b_d_beta += b_erase_dot
        if HAS_DECAY:
            b_dsum += tl.sum(b_dq * b_qn, 1)
            # Nothing in the chunk comes after its last token, so its sum is empty.
            b_dsum -= tl.where(o_c == last, 0.0, tl.sum(b_write * b_kn, 1))
            if IS_DELTA:
                b_dsum += b_beta * b_erase_dot

        b_dq += b_diagonal[:, None] * b_kn
        b_dk = b_write + b_diagonal[:, None] * b_qn
        if IS_DELTA:
            b_dk += b_erase * b_beta[:, None]
        if NORMALIZE:
            b_dq = (b_dq - b_qn * b_q_dot[:, None]) * b_q_rstd[:, None]
            b_dk = (b_dk - b_kn * b_k_dot[:, None]) * b_k_rstd[:, None]
        o_grad = (i_row * HV + i_h) * K + o_c[:, None] * (HV * K) + o_k[None, :]
        tl.store(d_q + o_grad, b_dq.to(d_q.dtype.element_ty), mask=m_ck)
        tl.store(d_k + o_grad, b_dk.to(d_k.dtype.element_ty), mask=m_ck)

    if IS_DELTA:
        tl.store(d_beta + o_gate, b_d_beta.to(d_beta.dtype.element_ty), mask=m_c)
    if HAS_DECAY:
        d_total += overlap * tl.math.exp2(b_total.to(tl.float32))
        b_dsum = tl.where(o_c == last, b_dsum + d_total, b_dsum)
        b_d_log_decay = tl.cumsum(tl.where(m_c, b_dsum, 0.0), 0, reverse=True)
        tl.store(d_log_decay + o_gate, b_d_log_decay.to(d_log_decay.dtype.element_ty), mask=m_c)
