"""The kernels of additive memory without decay: one scan that serves forward and backward.

Equations, per sequence and value head; φ is the feature map, c = 0 or 1 the normaliser:

    n_i = s Σ_{j≤i} (φ(q_i)·φ(k_j)) v_j        z_i = Σ_{j≤i} φ(k_j)
    d_i = s φ(q_i)·z_i + ε                      o_i = n_i / d_i, or n_i where nothing is normalised

Symbols: q, k `[B, T, H, K]`; v, o `[B, T, HV, V]`; s the scale; the memory S = Σ φ(k_j) v_jᵀ and
z are float32.

Every gradient is a sum of the same form over other tensors. With δ_i = -(dO_i·o_i) / d_i, the
gradient of d_i, and d = 1, δ = 0 where nothing is normalised:

    dφ(q)_i = s Σ_{j≤i} (dO_i·v_j / d_i + δ_i) φ(k_j)       a scan forward over (dO, v, φ(k))
    dφ(k)_j = s Σ_{i≥j} (v_j·dO_i / d_i + δ_i) φ(q_i)       a scan in reverse over (v, dO, φ(q))
    dv_j    = s Σ_{i≥j} (φ(k_j)·φ(q_i) / d_i) dO_i          a scan in reverse over (φ(k), φ(q), dO)

Source: Katharopoulos et al., "Transformers are RNNs" (arXiv 2006.16236), equations 13 to 15, which
walk token by token; we take chunks of C tokens with the products inside a chunk as a masked C × C
matrix, and divide inside the scan.

The three run in one launch. A split sequence takes two: what every segment adds to the memory,
from nothing, and the scans, which start from the sum of what the segments before them added.

Cost: 4·K·V + 2·C·(K + V) FLOPs per token and scan; each scan reads three tensors once per value
block and writes one. φ is applied once, by a pass of its own: inside a scan every tile would leave
the asynchronous copies for it, once a value block and scan. Nothing is kept for the backward but
inputs, φ(q) and φ(k) where φ is not the identity and, normalised, o and d.
"""

import triton
import triton.language as tl

from kernels.blocks import elu1, sequence_bounds

# Two bits each: the backward ones of q and k run over transposed memories, the last two in reverse.
FORWARD = tl.constexpr(0)
D_QUERY = tl.constexpr(1)
D_KEY = tl.constexpr(2)
D_VALUE = tl.constexpr(3)


@triton.jit
def linear_attention_scan_kernel(
    q,
    k,
    v,
    out,
    denominator,
    d_denominator,
    initial,
    initial_z,
    local_end,
    local_end_z,
    end,
    end_z,
    cu_seqlens,
    T,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROLE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STATE_ONLY: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The forward, or, with STATE_ONLY, what each segment adds to the memory that `_scan` joins.

    Grid: sequences × segments × HV × blocks of V. ROLE is FORWARD, or, with STATE_ONLY, D_VALUE,
    whose memory serves every reverse scan: q is then k `[rows, H, K]`, k is q, and v is dO.
    """
    i_program = tl.program_id(0).to(tl.int64)
    _scan(
        i_program,
        q=q,
        k=k,
        v=v,
        out=out,
        image=None,
        denominator=denominator,
        d_denominator=d_denominator,
        initial=initial,
        initial_z=initial_z,
        local_end=local_end,
        local_end_z=local_end_z,
        end=end,
        end_z=end_z,
        cu_seqlens=cu_seqlens,
        T=T,
        scale=scale,
        eps=eps,
        HV=HV,
        HQ=H,
        HK=H,
        HX=HV,
        HR=H,
        K=K,
        V=V,
        C=C,
        BK=BK,
        BV=BV,
        SEGMENTS=SEGMENTS,
        ROLE=ROLE,
        ELU1=False,
        NORMALIZE=NORMALIZE,
        HAS_INITIAL=HAS_INITIAL,
        STATE_ONLY=STATE_ONLY,
        PACKED=PACKED,
        PRECISION=PRECISION,
        STAGES=STAGES,
    )


@triton.jit
def linear_attention_bwd_kernel(
    q,
    k,
    v,
    d_out,
    denominator,
    d_denominator,
    initial,
    initial_z,
    local_end,
    local_end_z,
    d_final,
    d_final_z,
    d_local_end,
    d_local_end_z,
    d_q,
    d_k,
    d_v,
    d_initial,
    d_initial_z,
    cu_seqlens,
    T,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    BK_OF_V: tl.constexpr,
    BV_OF_K: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ELU1: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    HAS_FINAL: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    STAGES_OF_V: tl.constexpr,
):
    """The three scans of the backward side by side: none of them waits for another.

    Grid: sequences × segments × HV × (2 × blocks of K + blocks of V), the blocks of one segment
    next to each other, so that what they all read is in the cache. q and k are φ(q) and φ(k);
    gradients of q and k are `[rows, HV, K]`. The scans that write K channels read V ones where the
    third reads K, so they have tiles of their own: BK_OF_V holds V, BV_OF_K is a block of K.
    """
    BLOCKS_K: tl.constexpr = (K + BV_OF_K - 1) // BV_OF_K
    BLOCKS: tl.constexpr = 2 * BLOCKS_K + (V + BV - 1) // BV
    i_program = tl.program_id(0).to(tl.int64)
    i_block = (i_program % BLOCKS).to(tl.int32)
    i_state = i_program // BLOCKS
    if i_block < BLOCKS_K:
        _scan(
            i_state * BLOCKS_K + i_block,
            q=d_out,
            k=v,
            v=k,
            out=d_q,
            image=q,
            denominator=denominator,
            d_denominator=d_denominator,
            initial=initial,
            initial_z=initial_z,
            local_end=local_end,
            local_end_z=local_end_z,
            end=None,
            end_z=None,
            cu_seqlens=cu_seqlens,
            T=T,
            scale=scale,
            eps=eps,
            HV=HV,
            HQ=HV,
            HK=HV,
            HX=H,
            HR=H,
            K=V,
            V=K,
            C=C,
            BK=BK_OF_V,
            BV=BV_OF_K,
            SEGMENTS=SEGMENTS,
            ROLE=D_QUERY,
            ELU1=ELU1,
            NORMALIZE=NORMALIZE,
            HAS_INITIAL=HAS_INITIAL,
            STATE_ONLY=False,
            PACKED=PACKED,
            PRECISION=PRECISION,
            STAGES=STAGES_OF_V,
        )
    if (i_block >= BLOCKS_K) & (i_block < 2 * BLOCKS_K):
        _scan(
            i_state * BLOCKS_K + i_block - BLOCKS_K,
            q=v,
            k=d_out,
            v=q,
            out=d_k,
            image=k,
            denominator=denominator,
            d_denominator=d_denominator,
            initial=d_final,
            initial_z=d_final_z,
            local_end=d_local_end,
            local_end_z=d_local_end_z,
            end=None,
            end_z=None,
            cu_seqlens=cu_seqlens,
            T=T,
            scale=scale,
            eps=eps,
            HV=HV,
            HQ=HV,
            HK=HV,
            HX=H,
            HR=H,
            K=V,
            V=K,
            C=C,
            BK=BK_OF_V,
            BV=BV_OF_K,
            SEGMENTS=SEGMENTS,
            ROLE=D_KEY,
            ELU1=ELU1,
            NORMALIZE=NORMALIZE,
            HAS_INITIAL=HAS_FINAL,
            STATE_ONLY=False,
            PACKED=PACKED,
            PRECISION=PRECISION,
            STAGES=STAGES_OF_V,
        )
    if i_block >= 2 * BLOCKS_K:
        _scan(
            i_state * (BLOCKS - 2 * BLOCKS_K) + i_block - 2 * BLOCKS_K,
            q=k,
            k=q,
            v=d_out,
            out=d_v,
            image=None,
            denominator=denominator,
            d_denominator=d_denominator,
            initial=d_final,
            initial_z=d_final_z,
            local_end=d_local_end,
            local_end_z=d_local_end_z,
            end=d_initial,
            end_z=d_initial_z,
            cu_seqlens=cu_seqlens,
            T=T,
            scale=scale,
            eps=eps,
            HV=HV,
            HQ=H,
            HK=H,
            HX=HV,
            HR=H,
            K=K,
            V=V,
            C=C,
            BK=BK,
            BV=BV,
            SEGMENTS=SEGMENTS,
            ROLE=D_VALUE,
            ELU1=False,
            NORMALIZE=NORMALIZE,
            HAS_INITIAL=HAS_FINAL,
            STATE_ONLY=False,
            PACKED=PACKED,
            PRECISION=PRECISION,
            STAGES=STAGES,
        )


@triton.jit
def _scan(
    i_program,
    q,
    k,
    v,
    out,
    image,
    denominator,
    d_denominator,
    initial,
    initial_z,
    local_end,
    local_end_z,
    end,
    end_z,
    cu_seqlens,
    T,
    scale,
    eps,
    HV: tl.constexpr,
    HQ: tl.constexpr,
    HK: tl.constexpr,
    HX: tl.constexpr,
    HR: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    SEGMENTS: tl.constexpr,
    ROLE: tl.constexpr,
    ELU1: tl.constexpr,
    NORMALIZE: tl.constexpr,
    HAS_INITIAL: tl.constexpr,
    STATE_ONLY: tl.constexpr,
    PACKED: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One of the four scans, named by ROLE; q, k and v are what that scan reads in their place.

    A program is one of sequences × segments × HV × value blocks. `q` is `[rows, HQ, K]`, `k`
    `[rows, HK, K]`, `v` `[rows, HX, V]`, `out` `[rows, HV, V]`; `image` `[rows, HR, V]` is φ(q) or
    φ(k), whose feature map the gradient of q or k passes with ELU1. A walk starts from `initial`
    `[N, HV, ...]` and what the segments before it have added, `local_end` `[N, SEGMENTS, HV, ...]`:
    memories of K × V numbers, for D_QUERY and D_KEY of V × K. Its last segment writes `end`
    `[N, HV, ...]`; with STATE_ONLY each starts from nothing and writes its own `local_end`.
    """
    REVERSE: tl.constexpr = ROLE >= D_KEY
    TRANSPOSED: tl.constexpr = (ROLE % 3) != 0
    # z adds up keys, of K channels, or what stands in the place of values.
    Z_OF_KEYS: tl.constexpr = not TRANSPOSED
    BLOCKS: tl.constexpr = (V + BV - 1) // BV
    i_v = (i_program % BLOCKS).to(tl.int32)
    i_state = i_program // BLOCKS
    i_h = i_state % HV
    i_s = (i_state // HV % SEGMENTS).to(tl.int32)
    i_n = i_state // (HV * SEGMENTS)
    i_first, num_tokens = sequence_bounds(cu_seqlens, i_n, T, PACKED)
    num_chunks = tl.cdiv(num_tokens, C)
    segment = tl.cdiv(num_chunks, SEGMENTS)
    segment_start = tl.minimum(i_s * segment, num_chunks)
    segment_chunks = tl.minimum(segment, num_chunks - segment_start)

    o_c = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_v = o_v < V
    m_kv = (o_k < K)[:, None] & m_v[None, :]
    o_kv = o_k[:, None] + o_v[None, :] * K if TRANSPOSED else o_k[:, None] * V + o_v[None, :]
    b_state = tl.zeros([BK, BV], tl.float32)
    b_z = tl.zeros([BK if Z_OF_KEYS else BV], tl.float32)
    i_first_state = i_n * HV + i_h
    if HAS_INITIAL and not STATE_ONLY:
        b_state = tl.load(initial + i_first_state * K * V + o_kv, mask=m_kv, other=0.0)
        if NORMALIZE:
            if Z_OF_KEYS:
                b_z = tl.load(initial_z + i_first_state * K + o_k, mask=o_k < K, other=0.0)
            else:
                b_z = tl.load(initial_z + i_first_state * V + o_v, mask=m_v, other=0.0)
    if SEGMENTS > 1 and not STATE_ONLY:
        for i in range(SEGMENTS - 1 - i_s if REVERSE else i_s):
            i_before = SEGMENTS - 1 - i if REVERSE else i
            i_added = (i_n * SEGMENTS + i_before) * HV + i_h
            b_state += tl.load(local_end + i_added * K * V + o_kv, mask=m_kv, other=0.0)
            if NORMALIZE:
                if Z_OF_KEYS:
                    b_z += tl.load(local_end_z + i_added * K + o_k, mask=o_k < K, other=0.0)
                else:
                    b_z += tl.load(local_end_z + i_added * V + o_v, mask=m_v, other=0.0)
    if REVERSE and not STATE_ONLY:
        # Gradients of memories carry no scale; the outputs below are multiplied by it.
        b_state = b_state / scale
        b_z = b_z / scale
    m_order = o_c[:, None] <= o_c[None, :] if REVERSE else o_c[:, None] >= o_c[None, :]
    o_query = o_c[:, None] * (HQ * K) + o_k[None, :]
    o_ck = o_c[:, None] * (HK * K) + o_k[None, :]
    o_cv = o_c[:, None] * (HX * V) + o_v[None, :]
    o_image = o_c[:, None] * (HR * V) + o_v[None, :]
    o_out = o_c[:, None] * (HV * V) + o_v[None, :]
    o_gate = o_c * HV
    for i in tl.range(0, segment_chunks, num_stages=STAGES):
        i_c = segment_start + (segment_chunks - 1 - i if REVERSE else i)
        i_row = i_first + i_c * C
        m_c = o_c < num_tokens - i_c * C
        m_ck = m_c[:, None] & (o_k < K)[None, :]
        m_cv = m_c[:, None] & m_v[None, :]
        i_gate = i_row * HV + i_h
        i_key = (i_row * HK + i_h // (HV // HK)) * K
        i_value = (i_row * HX + i_h // (HV // HX)) * V
        b_k = tl.load(k + i_key + o_ck, mask=m_ck, other=0.0)
        b_v = tl.load(v + i_value + o_cv, mask=m_cv, other=0.0)
        if ELU1 and TRANSPOSED and not STATE_ONLY:
            # Asked for early, used at the end.
            i_image = (i_row * HR + i_h // (HV // HR)) * V
            b_image = tl.load(image + i_image + o_image, mask=m_cv, other=0.0)
        b_weighted = b_v
        if NORMALIZE and ROLE != FORWARD:
            b_inverse_d = 1.0 / tl.load(denominator + i_gate + o_gate, mask=m_c, other=1.0)
            b_dd = tl.load(d_denominator + i_gate + o_gate, mask=m_c, other=0.0)
            if REVERSE:
                b_weighted = (b_v * b_inverse_d[:, None]).to(b_v.dtype)

        # Before the products that read it: with the sum in flight behind them into the next chunk,
        # the assembler makes every matrix instruction wait for the one before.
        b_before = b_state.to(b_k.dtype)
        b_state = tl.dot(tl.trans(b_k), b_weighted, b_state, input_precision=PRECISION)
        if not STATE_ONLY:
            i_query = (i_row * HQ + i_h // (HV // HQ)) * K
            b_q = tl.load(q + i_query + o_query, mask=m_ck, other=0.0)
            b_scores = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
            b_out = tl.dot(b_q, b_before, input_precision=PRECISION)
            if NORMALIZE and ROLE == D_QUERY:
                b_scores = b_scores * b_inverse_d[:, None] + b_dd[:, None]
                b_out = b_out * b_inverse_d[:, None] + b_dd[:, None] * b_z[None, :]
            if NORMALIZE and ROLE == D_KEY:
                b_scores = b_scores * b_inverse_d[None, :] + b_dd[None, :]
                b_out += b_z[None, :]
            b_scores = tl.where(m_order, b_scores, 0.0)
            b_operand = b_weighted if ROLE == D_VALUE else b_v
            b_out = tl.dot(b_scores.to(b_v.dtype), b_operand, b_out, input_precision=PRECISION)
            b_out *= scale
            if NORMALIZE and ROLE == FORWARD:
                b_d = tl.sum(b_scores, 1) + tl.sum(b_q.to(tl.float32) * b_z[None, :], 1)
                b_d = b_d * scale + eps
                b_out = b_out / b_d[:, None]
                if i_v == 0:
                    tl.store(denominator + i_gate + o_gate, b_d, mask=m_c)
            if ELU1 and TRANSPOSED:
                # The slope of elu + 1 is its image below 1, and 1 above.
                b_out *= tl.minimum(b_image.to(tl.float32), 1.0)
            tl.store(out + i_gate * V + o_out, b_out.to(out.dtype.element_ty), mask=m_cv)

        if NORMALIZE:
            if ROLE == FORWARD:
                b_z += tl.sum(b_k.to(tl.float32), 0)
            elif ROLE == D_VALUE:
                b_z += tl.sum(b_k.to(tl.float32) * b_dd[:, None], 0)
            elif ROLE == D_QUERY:
                b_z += tl.sum(b_v.to(tl.float32), 0)
            else:
                b_z += tl.sum(b_v.to(tl.float32) * b_dd[:, None], 0)

    if Z_OF_KEYS:
        b_scale = scale if ROLE == D_VALUE else 1.0
        if STATE_ONLY:
            tl.store(local_end + i_state * K * V + o_kv, b_state * b_scale, mask=m_kv)
            if NORMALIZE and i_v == 0:
                tl.store(local_end_z + i_state * K + o_k, b_z * b_scale, mask=o_k < K)
        elif i_s == (0 if REVERSE else SEGMENTS - 1):
            tl.store(end + i_first_state * K * V + o_kv, b_state * b_scale, mask=m_kv)
            if NORMALIZE and i_v == 0:
                tl.store(end_z + i_first_state * K + o_k, b_z * b_scale, mask=o_k < K)


@triton.jit
def feature_map_kernel(q, k, q_image, k_image, size, BLOCK: tl.constexpr):
    """φ = elu + 1 of q and k. Grid: blocks of BLOCK of their `size` numbers, of both in turn."""
    o_x = (tl.program_id(0) // 2).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_x = o_x < size
    if tl.program_id(0) % 2 == 0:
        b_q = tl.load(q + o_x, mask=m_x, other=0.0)
        tl.store(q_image + o_x, elu1(b_q).to(q_image.dtype.element_ty), mask=m_x)
    else:
        b_k = tl.load(k + o_x, mask=m_x, other=0.0)
        tl.store(k_image + o_x, elu1(b_k).to(k_image.dtype.element_ty), mask=m_x)


@triton.jit
def linear_attention_denominator_bwd_kernel(
    out,
    d_out,
    denominator,
    d_denominator,
    num_rows,
    V: tl.constexpr,
    BR: tl.constexpr,
    BV: tl.constexpr,
):
    """δ_i = -(dO_i·o_i) / d_i of every row and head, `[rows · HV]`. Grid: row blocks."""
    o_r = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)
    o_v = tl.arange(0, BV)
    m_r = o_r < num_rows
    m_rv = m_r[:, None] & (o_v < V)[None, :]
    b_o = tl.load(out + o_r[:, None] * V + o_v[None, :], mask=m_rv, other=0.0).to(tl.float32)
    b_do = tl.load(d_out + o_r[:, None] * V + o_v[None, :], mask=m_rv, other=0.0).to(tl.float32)
    b_d = tl.load(denominator + o_r, mask=m_r, other=1.0)
    tl.store(d_denominator + o_r, -tl.sum(b_o * b_do, 1) / b_d, mask=m_r)
