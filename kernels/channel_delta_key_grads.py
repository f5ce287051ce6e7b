"""Gradients of q, k, erase and the log decay of the delta rules with decay per channel.

Equation, with the symbols of `kernels.channel_delta_forward` and `kernels.channel_delta_backward`,
G as there and b for erase:

    q̄_i = scale·e^{G_i}∘(S dO_i) + Σ_{j≤i} dP_ij e^{G_i−G_j}∘k_j                          = dq
    ē_i = −e^{G_i}∘(S dY_i) + Σ_{j<i} dL_ij e^{G_i−G_j}∘k_j           gradient of b∘k that erases
    w̄_j = e^{G_C−G_j}∘(dS R_j) + Σ_{i≥j} dP_ij e^{G_i−G_j}∘q_i + Σ_{i>j} dL_ij e^{G_i−G_j}∘(b∘k)_i
    dk = b∘ē + w̄      db = k∘ē      dG = q∘q̄ + b∘k∘ē − k∘w̄
    dG_C += e^{G_C}∘rowsum_V(S∘dS) + Σ_j k_j∘e^{G_C−G_j}∘(dS R_j)      dlog_decay_t = Σ_{i≥t} dG_i

where dG leaves out what no decay lies between: a token's pair with itself, and what the last token
writes. Both would enter once with plus and once with minus, and under strong decay they would dwarf
what remains.

A tile of channels that keeps enough over the chunk (`kernels.intervals`) takes one factor a row,
2^D with D relative to half of the chunk's decay. Then everything that multiplies a row's e^G is
summed before the factor is applied: the accumulators of the products with the memory go on through
those over pairs. A pair adds one number to dG of its row and takes the same from its column; from
the same rounded factors both are the same product, so nothing is left where their sum cancels.

The other tiles go through the tree of `kernels.intervals`. At each level, with E the decay between
a row and its cut, X the queries behind the cut and the keys before it, and A the pairs of dP or dL
that the cuts separate, taken both ways (A = dP + dPᵀ there), one product E∘(A (X∘E)) holds the
gradient of the queries in rows behind the cut and that of the keys before it. Every level adds its
intervals to the gradient of the log decay by a product with a 0/1 matrix; no two terms cancel.
(Elsewhere, in fla and the papers' code, that gradient is a difference of two running sums.)

One gradient is finished and stored before the next is begun, for want of registers. Tiles are 64
channels wide where the inputs have 16 bits: the assembler of Triton 3.6 gets the descriptors of
narrower ones wrong (`kernels.uniform_registers`).

Cost per token and value head: 6·K·V + 8·C·K FLOPs and 4·C·K for the sums with one cut, log2 C times
the latter two through the tree. No atomics: every sum has one order.
"""

import triton
import triton.language as tl

from kernels.blocks import locate_chunk, sequence_bounds
from kernels.intervals import (
    add_interval_grads,
    base_2,
    interval_sums,
    is_later,
    separated,
)


@triton.jit
def memory_product(
    x,
    state,
    rows,
    m,
    o_k,
    stride,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Rows of x [C, V] times the channels `o_k` of a memory [K, V], transposed: float32 [C, BK]."""
    b_product = tl.zeros([C, BK], tl.float32)
    for i_v in tl.range(0, tl.cdiv(V, BV), num_stages=STAGES):
        o_v = i_v * BV + tl.arange(0, BV)
        at_x = rows[:, None] * stride + o_v[None, :]
        at_state = o_k[:, None] * V + o_v[None, :]
        m_state = (o_k < K)[:, None] & (o_v < V)[None, :]
        b_x = tl.load(x + at_x, mask=m[:, None] & (o_v < V)[None, :], other=0.0)
        b_state = tl.load(state + at_state, mask=m_state, other=0.0)
        b_product = tl.dot(b_x, tl.trans(b_state), b_product, input_precision=PRECISION)
    return b_product


@triton.jit
def kept_product(
    state,
    d_state,
    o_k,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
):
    """rowsum_V(S∘dS) of the channels `o_k`: float32 [BK]."""
    b_kept = tl.zeros([BK, BV], tl.float32)
    for i_v in range(tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        at = o_k[:, None] * V + o_v[None, :]
        m = (o_k < K)[:, None] & (o_v < V)[None, :]
        b_state = tl.load(state + at, mask=m, other=0.0).to(tl.float32)
        b_kept += b_state * tl.load(d_state + at, mask=m, other=0.0).to(tl.float32)
    return tl.sum(b_kept, 1)


@triton.jit
def unit_tile(x, norm, o_k, rows, m, stride, H, K: tl.constexpr, UNIT: tl.constexpr):
    """Channels `o_k` of one head's tokens [C, BK] in float32; with UNIT of unit vectors."""
    m_k = m[:, None] & (o_k < K)[None, :]
    b_x = tl.load(x + (rows[:, None] * stride + o_k[None, :]), mask=m_k, other=0.0).to(tl.float32)
    if UNIT:
        b_x *= tl.load(norm + rows * H, mask=m, other=0.0)[:, None]
    return b_x


@triton.jit
def raw_grad(b_dx, x, norm, part, o_k, rows, m, stride, H, HV, K: tl.constexpr, UNIT: tl.constexpr):
    """The gradient of raw vectors from that of their unit vectors, (d − x̂ (x̂·d)) / |x|."""
    if UNIT:
        b_x = unit_tile(x, norm, o_k, rows, m, stride, H, K, UNIT)
        b_dx -= b_x * tl.load(part + rows * HV, mask=m, other=0.0)[:, None]
        b_dx *= tl.load(norm + rows * H, mask=m, other=0.0)[:, None]
    return b_dx


@triton.jit
def tree_grads(
    b_q,
    b_k,
    b_bk,
    b_g,
    b_dP,
    b_dL,
    b_dq,
    b_dbk,
    b_dk,
    b_kept,
    masks,
    rows,
    scale,
    dtype: tl.constexpr,
    C: tl.constexpr,
    LEVELS: tl.constexpr,
    EXACT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The same through the tree of cuts, for any decay."""
    at_mask = rows[:, None] * C + rows[None, :]
    masks_t = masks + (LEVELS + 2) * C * C
    b_dg = tl.zeros_like(b_dk) + b_kept[None, :]
    at_level = LEVELS * C * C + at_mask
    b_in = tl.math.exp2(interval_sums(tl.load(masks + at_level), b_g, EXACT, PRECISION))
    b_dq *= b_in * scale
    b_dbk *= -b_in
    b_dsum = b_q * b_dq + b_bk * b_dbk
    b_dg = add_interval_grads(b_dg, tl.load(masks_t + at_level), b_dsum, EXACT, PRECISION)
    at_level = (LEVELS + 1) * C * C + at_mask
    b_dk *= tl.math.exp2(interval_sums(tl.load(masks + at_level), b_g, EXACT, PRECISION))
    b_dg = add_interval_grads(b_dg, tl.load(masks_t + at_level), b_k * b_dk, EXACT, PRECISION)
    for level in range(LEVELS):
        at_level = level * C * C + at_mask
        later = is_later(rows, level)[:, None]
        pairs = separated(rows, level)
        b_E = tl.math.exp2(interval_sums(tl.load(masks + at_level), b_g, EXACT, PRECISION))
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
    return b_dq, b_dbk, b_dk, b_dg


@triton.jit
def channel_delta_key_grads_kernel(
    q,
    k,
    log_decay,
    erase,
    strength,
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
    chunk_total,
    cu_seqlens,
    chunk_offsets,
    chunk_owners,
    T,
    num_sequences,
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
    ONE_CUT: tl.constexpr,
    ONE_CUT_TOTAL: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Grid (chunks · HV · K / BK). dq, dk, dlog_decay and derase of one tile of channels.

    There are two of these kernels: with ONE_CUT for the tiles that one cut serves, and without it
    for the others, through the tree; each leaves the other's tiles alone. As one kernel they would
    need the registers of both.

    dq and dk are those of one value head, to be summed over the heads that share a key head. With
    one strength for a head, `d_erase` [K / BK, tokens, HV] receives this tile's part of dbeta.
    """
    TILES_K: tl.constexpr = (K + BK - 1) // BK
    i_program = tl.program_id(0).to(tl.int64)
    i_k = (i_program % TILES_K).to(tl.int32)
    i_hv = i_program // TILES_K % HV
    i_chunk = i_program // (TILES_K * HV)
    i_h = i_hv // (HV // H)
    i_n, i_c = locate_chunk(chunk_owners, chunk_offsets, i_chunk, T, C, PACKED)
    if i_n >= num_sequences:
        return
    o_k = i_k * BK + tl.arange(0, BK)
    i_memory = (i_chunk * HV + i_hv) * K
    b_total = tl.load(chunk_total + i_memory + o_k, mask=o_k < K, other=0.0)
    if (tl.min(b_total) >= ONE_CUT_TOTAL) != ONE_CUT:
        return
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    start = i_first + i_c * C
    rows = tl.arange(0, C)
    num_rows = tl.minimum(num_tokens - i_c * C, C)
    m = rows < num_rows
    # from here on pointers stand at the chunk's first token and this head, or at its memory
    first = start * HV + i_hv
    q += start * stride_q + i_h * K
    k += start * stride_k + i_h * K
    if UNIT:
        q_norm += start * H + i_h
        k_norm += start * H + i_h
        q_part += first
        k_part += first
    d_scores += first * C
    d_lower += first * C
    transposed = tokens * (HV * C)
    d_out += first * V
    d_solved += first * V
    residual += first * V
    chunk_state += i_memory * V
    d_chunk_state += i_memory * V
    d_q += first * K
    d_k += first * K
    m_k = m[:, None] & (o_k < K)[None, :]
    at_k = rows[:, None] * (HV * K) + o_k[None, :]
    at_c = rows[:, None] * (HV * C) + rows[None, :]
    m_c = m[:, None]

    at_mask = rows[:, None] * C + rows[None, :]
    masks_t = masks + (LEVELS + 2) * C * C
    dtype: tl.constexpr = q.dtype.element_ty

    b_g = base_2(tl.load(log_decay + first * K + at_k, mask=m_k, other=0.0))
    b_kept = kept_product(chunk_state, d_chunk_state, o_k, K, V, BK, BV) * tl.math.exp2(b_total)
    b_self = tl.load(d_diagonal + first + rows * HV, mask=m, other=0.0)[:, None]
    if CHANNEL_GATES:
        b_b = tl.load(erase + first * K + at_k, mask=m_k, other=0.0).to(tl.float32)
    else:
        b_b = tl.load(strength + first + rows * HV, mask=m, other=0.0)[:, None]
    b_k = unit_tile(k, k_norm, o_k, rows, m, stride_k, H, K, UNIT)
    if ONE_CUT:
        b_sum = interval_sums(tl.load(masks + LEVELS * C * C + at_mask), b_g, EXACT, PRECISION)
        b_sum -= 0.5 * b_total[None, :]
        b_half = tl.math.exp2(0.5 * b_total)[None, :]
        # nothing decays what the last token writes, so it has no part in the gradient of the decay,
        # and it is nobody's earlier token
        b_xk = tl.where((rows < num_rows - 1)[:, None], b_k * tl.math.exp2(-b_sum), 0.0).to(dtype)

        b_dq = memory_product(
            d_out, chunk_state, rows, m, o_k, HV * V, K, V, BK, BV, C, STAGES, PRECISION
        )
        b_dq *= b_half * scale
        b_dP = tl.load(d_scores + at_c, mask=m_c, other=0.0)
        b_dq = tl.dot(b_dP, b_xk, b_dq, input_precision=PRECISION)
        b_q = unit_tile(q, q_norm, o_k, rows, m, stride_q, H, K, UNIT)
        b_xq = (b_q * tl.math.exp2(b_sum)).to(dtype)
        b_dG = b_xq.to(tl.float32) * b_dq
        # the pairs of a token with itself have no decay between them
        b_dq = b_dq * tl.math.exp2(b_sum) + b_self * b_k
        b_dk_rest = b_self * b_q
        b_dq = raw_grad(b_dq, q, q_norm, q_part, o_k, rows, m, stride_q, H, HV, K, UNIT)
        tl.store(d_q + at_k, b_dq.to(d_q.dtype.element_ty), mask=m_k)

        b_dbk = memory_product(
            d_solved, chunk_state, rows, m, o_k, HV * V, K, V, BK, BV, C, STAGES, PRECISION
        )
        b_dbk *= -b_half
        b_dL = tl.load(d_lower + at_c, mask=m_c, other=0.0)
        b_dbk = tl.dot(b_dL, b_xk, b_dbk, input_precision=PRECISION)
        b_xb = (b_k * b_b * tl.math.exp2(b_sum)).to(dtype)
        b_dG += b_xb.to(tl.float32) * b_dbk
        b_dbk *= tl.math.exp2(b_sum)
        b_dk_rest += b_b * b_dbk
        b_db = b_k * b_dbk
        if CHANNEL_GATES:
            tl.store(d_erase + first * K + at_k, b_db.to(d_erase.dtype.element_ty), mask=m_k)
        else:
            at_part = i_k * tokens * HV + first + rows * HV
            tl.store(d_erase + at_part, tl.sum(b_db, 1), mask=m)

        b_dk = memory_product(
            residual, d_chunk_state, rows, m, o_k, HV * V, K, V, BK, BV, C, STAGES, PRECISION
        )
        b_dk *= b_half
        b_kept += tl.sum(b_xk.to(tl.float32) * b_dk, 0)
        b_dP = tl.load(d_scores + transposed + at_c, mask=m_c, other=0.0)
        b_dk = tl.dot(b_dP, b_xq, b_dk, input_precision=PRECISION)
        b_dL = tl.load(d_lower + transposed + at_c, mask=m_c, other=0.0)
        b_dk = tl.dot(b_dL, b_xb, b_dk, input_precision=PRECISION)
        b_dG -= b_xk.to(tl.float32) * b_dk
        b_dk = b_dk * tl.math.exp2(-b_sum) + b_dk_rest
        b_dk = raw_grad(b_dk, k, k_norm, k_part, o_k, rows, m, stride_k, H, HV, K, UNIT)
        tl.store(d_k + at_k, b_dk.to(d_k.dtype.element_ty), mask=m_k)

        b_mask = tl.load(masks_t + LEVELS * C * C + at_mask)
        b_dg = interval_sums(b_mask, b_dG, EXACT, PRECISION) + b_kept[None, :]
        tl.store(d_log_decay + first * K + at_k, b_dg.to(d_log_decay.dtype.element_ty), mask=m_k)
    else:
        b_dq = memory_product(
            d_out, chunk_state, rows, m, o_k, HV * V, K, V, BK, BV, C, STAGES, PRECISION
        )
        b_dbk = memory_product(
            d_solved, chunk_state, rows, m, o_k, HV * V, K, V, BK, BV, C, STAGES, PRECISION
        )
        b_dk = memory_product(
            residual, d_chunk_state, rows, m, o_k, HV * V, K, V, BK, BV, C, STAGES, PRECISION
        )
        b_q = unit_tile(q, q_norm, o_k, rows, m, stride_q, H, K, UNIT)
        # below and above the diagonal: a cut of the tree has pairs on both sides
        b_dP = tl.load(d_scores + at_c, mask=m_c, other=0.0)
        b_dP += tl.load(d_scores + transposed + at_c, mask=m_c, other=0.0)
        b_dL = tl.load(d_lower + at_c, mask=m_c, other=0.0)
        b_dL += tl.load(d_lower + transposed + at_c, mask=m_c, other=0.0)
        b_dq, b_dbk, b_dk, b_dg = tree_grads(
            b_q, b_k, b_k * b_b, b_g, b_dP, b_dL, b_dq, b_dbk, b_dk, b_kept, masks, rows, scale,
            dtype, C, LEVELS, EXACT, PRECISION,
        )  # fmt: skip
        tl.store(d_log_decay + first * K + at_k, b_dg.to(d_log_decay.dtype.element_ty), mask=m_k)
        b_dq += b_self * b_k
        b_dk += b_self * b_q + b_b * b_dbk
        b_db = b_k * b_dbk
        if CHANNEL_GATES:
            tl.store(d_erase + first * K + at_k, b_db.to(d_erase.dtype.element_ty), mask=m_k)
        else:
            at_part = i_k * tokens * HV + first + rows * HV
            tl.store(d_erase + at_part, tl.sum(b_db, 1), mask=m)
        b_dq = raw_grad(b_dq, q, q_norm, q_part, o_k, rows, m, stride_q, H, HV, K, UNIT)
        tl.store(d_q + at_k, b_dq.to(d_q.dtype.element_ty), mask=m_k)
        b_dk = raw_grad(b_dk, k, k_norm, k_part, o_k, rows, m, stride_k, H, HV, K, UNIT)
        tl.store(d_k + at_k, b_dk.to(d_k.dtype.element_ty), mask=m_k)
