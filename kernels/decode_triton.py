"""Memory rules token by token in Triton: one pass over the memory for a few tokens.

Equation and symbols: those of `kernels.decode`, applied to T tokens in order; T is 1 in generation,
or the few tokens of a block that is checked or replayed. Sources: those of `kernels.reference`.

One program holds K × BV numbers of the memory in registers, reads them once, takes all tokens and
writes them once. The columns of the memory never meet, so programs need nothing of each other.
There is no product of tiles: at one token a memory of K·V numbers is read, changed and written for
6·K·V FLOPs, and the bytes decide.

Cost: 8·K·V bytes per value head and call, 6·K·V FLOPs per value head and token. No backward.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.launcher import launch_kernel
from kernels.tiles import device_of

BLOCK_V = 32
"""Columns of a program's part of the memory: rows of 128 bytes, one full line of L2. Log,
"Decoding", 2026-11-30: 16 and 64 columns are slower, 8 and 128 more so."""

NUMBERS_OF_A_WARP = 128 * BLOCK_V
"""Of the memory, that one warp holds: 128 in each thread's registers. Two warps for as many take
5 to 8 % longer, four 3 to 10 % (the same place)."""


@triton.jit
def recurrent_kernel(
    q,
    k,
    v,
    log_decay,
    erase,
    write,
    state,
    key_sum,
    new_state,
    new_key_sum,
    out,
    residual,
    T,
    stride_q,
    stride_k,
    stride_v,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KP: tl.constexpr,
    BV: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr,
    CHANNEL_GATES: tl.constexpr,
    UNIT: tl.constexpr,
    ELU: tl.constexpr,
):
    """Grid (batch rows · HV · V / BV). Absent tensors name what a rule does without."""
    tiles_v: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_tile = pid % tiles_v
    i_hv = (pid // tiles_v) % HV
    i_b = pid // (tiles_v * HV)
    i_h = i_hv // (HV // H)
    o_k = tl.arange(0, KP)
    o_v = i_tile * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    at_state = (i_b * HV + i_hv) * K * V + (o_k[:, None] * V + o_v[None, :])
    m_state = m_k[:, None] & m_v[None, :]
    b_S = tl.load(state + at_state, mask=m_state, other=0.0)
    at_sum = (i_b * HV + i_hv) * K + o_k
    if key_sum is not None:
        b_z = tl.load(key_sum + at_sum, mask=m_k, other=0.0)

    for i in range(T):
        t = i_b * T + i
        first = t * HV + i_hv
        b_q = tl.load(q + t * stride_q + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_k = tl.load(k + t * stride_k + i_h * K + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_u = tl.load(v + t * stride_v + i_hv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        if ELU:
            b_q = tl.where(m_k, tl.where(b_q > 0, b_q + 1.0, tl.exp(tl.minimum(b_q, 0.0))), 0.0)
            b_k = tl.where(m_k, tl.where(b_k > 0, b_k + 1.0, tl.exp(tl.minimum(b_k, 0.0))), 0.0)
        if UNIT:
            b_q *= 1.0 / tl.sqrt_rn(tl.sum(b_q * b_q, 0) + 1e-6)
            b_k *= 1.0 / tl.sqrt_rn(tl.sum(b_k * b_k, 0) + 1e-6)
        if log_decay is not None:
            if CHANNEL_DECAY:
                b_g = tl.load(log_decay + first * K + o_k, mask=m_k, other=0.0).to(tl.float32)
                b_S *= tl.exp(b_g)[:, None]
            else:
                b_S *= tl.exp(tl.load(log_decay + first).to(tl.float32))
        if erase is not None:
            if CHANNEL_GATES:
                b_e = tl.load(erase + first * K + o_k, mask=m_k, other=0.0).to(tl.float32)
                b_w = tl.load(write + first * V + o_v, mask=m_v, other=0.0).to(tl.float32)
            else:
                b_e = tl.load(erase + first).to(tl.float32)
                b_w = tl.load(write + first).to(tl.float32)
            b_u = b_w * b_u - tl.sum(b_S * (b_e * b_k)[:, None], 0)
        b_S += b_k[:, None] * b_u[None, :]
        b_o = tl.sum(b_S * b_q[:, None], 0) * scale
        if key_sum is not None:
            b_z += b_k
            b_o /= scale * tl.sum(b_q * b_z, 0) + eps
        tl.store(out + first * V + o_v, b_o.to(out.dtype.element_ty), mask=m_v)
        if residual is not None:
            b_u = b_u.to(residual.dtype.element_ty)
            tl.store(residual + first * V + o_v, b_u, mask=m_v)

    tl.store(new_state + at_state, b_S, mask=m_state)
    # two tests, since the compiler makes the outer one
    if key_sum is not None:  # noqa: SIM102
        if i_tile == 0:
            tl.store(new_key_sum + at_sum, b_z, mask=m_k)


def _strided(x: Tensor) -> Tensor:
    """`x` [B, T, heads, D] itself where its tokens lie at one stride, or a copy."""
    B, T, heads, D = x.shape
    packed = x.stride(3) == 1 and (heads == 1 or x.stride(2) == D)
    even = B == 1 or T == 1 or x.stride(0) == T * x.stride(1)
    return x if packed and even else x.contiguous()


def _token_stride(x: Tensor) -> int:
    return x.stride(0) if x.shape[1] == 1 else x.stride(1)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    state: Tensor,
    key_sum: Tensor | None,
    new_state: Tensor,
    scale: float,
    eps: float,
    unit: bool,  # noqa: FBT001
    elu: bool,  # noqa: FBT001
    keep_residual: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, residual, new key sum), the last two empty where not asked for."""
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    q, k, v = _strided(q), _strided(k), _strided(v)
    out = v.new_empty(B, T, HV, V)
    residual = v.new_empty(out.shape if keep_residual else (0,))
    new_key_sum = state.new_empty((0,) if key_sum is None else key_sum.shape)
    KP = 1 << (K - 1).bit_length()
    num_programs = B * HV * -(-V // BLOCK_V)  # `triton.cdiv` costs the host as much as a launch
    with device_of(v):
        launch_kernel(
            recurrent_kernel,
            num_programs,
            q=q,
            k=k,
            v=v,
            log_decay=None if log_decay is None else log_decay.contiguous(),
            erase=None if erase is None else erase.contiguous(),
            write=None if write is None else write.contiguous(),
            state=state,
            key_sum=None if key_sum is None else key_sum.contiguous(),
            new_state=new_state,
            new_key_sum=new_key_sum,
            out=out,
            residual=residual if keep_residual else None,
            T=T,
            stride_q=_token_stride(q),
            stride_k=_token_stride(k),
            stride_v=_token_stride(v),
            scale=scale,
            eps=eps,
            H=H,
            HV=HV,
            K=K,
            V=V,
            KP=KP,
            BV=BLOCK_V,
            CHANNEL_DECAY=log_decay is not None and log_decay.ndim == 4,
            CHANNEL_GATES=erase is not None and erase.ndim == 4,
            UNIT=unit,
            ELU=elu,
            num_warps=max(1, KP * BLOCK_V // NUMBERS_OF_A_WARP),
        )
    return out, residual, new_key_sum


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    state: Tensor,
    key_sum: Tensor | None,
    scale: float,
    eps: float,
    unit: bool,  # noqa: FBT001
    elu: bool,  # noqa: FBT001
    keep_residual: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, new state, residual, new key sum) after T tokens; the last two may be empty.

    Args:
        q: queries [B, T, H, K].
        k: keys, likewise.
        v: values [B, T, HV, V].
        log_decay: [B, T, HV] or [B, T, HV, K], or None for no decay.
        erase: erase strength [B, T, HV] or [B, T, HV, K], or None for additive memory.
        write: write strength [B, T, HV] or [B, T, HV, V], present where `erase` is.
        state: memory before the tokens [B, HV, K, V], float32.
        key_sum: sum of the keys before them [B, HV, K], float32, for a normalised read, or None.
        scale: factor of the read.
        eps: added to the denominator of a normalised read.
        unit: whether q and k are scaled to unit length first.
        elu: whether q and k go through elu(x) + 1 first.
        keep_residual: whether the residual is returned.
    """
    state = state.contiguous()
    new_state = torch.empty_like(state)
    out, residual, new_key_sum = _launch(
        q, k, v, log_decay, erase, write, state, key_sum, new_state, scale, eps, unit, elu,
        keep_residual,
    )  # fmt: skip
    return out, new_state, residual, new_key_sum


recurrent_op = torch.library.custom_op("seedfront::recurrent", recurrent, mutates_args=())
"""`recurrent` as `torch.compile` sees it; its own calls cost more than a launch, so eager code
calls the function."""


@recurrent_op.register_fake
def _recurrent_fake(
    q, k, v, log_decay, erase, write, state, key_sum, scale, eps, unit, elu, keep_residual
):
    return (
        v.new_empty(v.shape),
        state.new_empty(state.shape),
        v.new_empty(v.shape if keep_residual else (0,)),
        state.new_empty((0,) if key_sum is None else key_sum.shape),
    )


def recurrent_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    erase: Tensor | None,
    write: Tensor | None,
    state: Tensor,
    key_sum: Tensor | None,
    scale: float,
    eps: float,
    unit: bool,  # noqa: FBT001
    elu: bool,  # noqa: FBT001
    keep_residual: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor]:
    """(out, residual) of `recurrent`, which writes the new memory and key sum over the old ones.

    Raises:
        ValueError: if the memory isn't contiguous, since it cannot be overwritten through a copy.
    """
    if not state.is_contiguous():
        raise ValueError(
            f"state has strides {state.stride()}; expected a contiguous memory to overwrite"
        )
    out, residual, new_key_sum = _launch(
        q, k, v, log_decay, erase, write, state, key_sum, state, scale, eps, unit, elu,
        keep_residual,
    )  # fmt: skip
    if key_sum is not None:
        # programs of one head all read the old sum, so the new one cannot go there directly
        key_sum.copy_(new_key_sum)
    return out, residual


recurrent_in_place_op = torch.library.custom_op(
    "seedfront::recurrent_", recurrent_, mutates_args=("state", "key_sum")
)
"""`recurrent_` as `torch.compile` sees it."""


@recurrent_in_place_op.register_fake
def _recurrent_in_place_fake(
    q, k, v, log_decay, erase, write, state, key_sum, scale, eps, unit, elu, keep_residual
):
    return v.new_empty(v.shape), v.new_empty(v.shape if keep_residual else (0,))
