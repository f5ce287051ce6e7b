"""Host side of the channel-decay delta rules in Triton: buffers, launches, autograd.

Equation, symbols, source and cost: `kernels.channel_delta_forward` and
`kernels.channel_delta_backward`. One pair of custom ops serves both rules: with one strength per
head for erase and write (`beta` twice) it is the Kimi delta rule, with channel-wise `erase` and
`write` the gated delta rule 2. To `torch.compile` each is one opaque op.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernels import channel_delta_backward as backward_kernels
from kernels import channel_delta_forward as forward_kernels
from kernels.channel_delta_plan import (
    Plan,
    Tables,
    Tiles,
    plan,
    power_of_two,
    tables,
    tiles,
)
from kernels.intervals import CHUNK, LEVELS, ONE_CUT_LIMITS, interval_masks
from kernels.launch import is_interpreted

JOIN_BLOCK_V = 16
"""Value columns of a program that joins segments: few, since its steps wait for each other."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Prepared(NamedTuple):
    """What the forward leaves for its backward; unused ones are empty.

    Attributes:
        q_norm: 1 / length of each query [B, T, H], float32, where q and k are made unit vectors.
        k_norm: the same for keys.
        q_read: scale·q∘e^G [B, T, HV, K].
        k_erase: erase∘k∘e^G [B, T, HV, K].
        k_write: k∘e^{G_C − G} [B, T, HV, K].
        solve: rows of (I + L)^-1 [B, T, HV, C].
        scores: rows of P [B, T, HV, C].
        chunk_decay: e^{G_C} [chunks, HV, K], float32.
        chunk_state: memory entering each chunk [chunks, HV, K, V].
        transition: what each segment makes of the memory entering it [segments, HV, K, K], float32.
    """

    q_norm: Tensor
    k_norm: Tensor
    q_read: Tensor
    k_erase: Tensor
    k_write: Tensor
    solve: Tensor
    scores: Tensor
    chunk_decay: Tensor
    chunk_state: Tensor
    transition: Tensor


class Call(NamedTuple):
    """Sizes, plan and constants of one call, shared by forward and backward."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    channel_gates: bool
    unit: bool
    tiles: Tiles
    plan: Plan

    @property
    def tiles_v(self) -> int:
        """Tiles of value columns."""
        return -(-self.V // self.tiles.value)

    @property
    def tiles_k(self) -> int:
        """Tiles of channels."""
        return -(-self.K // self.tiles.key)


def _call(q: Tensor, v: Tensor, erase: Tensor, cu_seqlens: Tensor | None, unit: bool) -> Call:  # noqa: FBT001
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    chosen = tiles(q.dtype, K, V)
    packed = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    programs = HV * triton.cdiv(V, chosen.value)
    planned = plan(B, T, programs, packed)
    return Call(B, T, H, HV, K, V, erase.ndim == 4, unit, chosen, planned)


def _by_token(x: Tensor) -> Tensor:
    """`x` [B, T, heads, D] itself where tokens lie at one stride and heads are packed, or a copy.

    Slices of a fused projection qualify, so they reach the kernels without being copied.
    """
    B, T, _, D = x.shape
    even = B == 1 or x.stride(0) == T * x.stride(1)
    packed = x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == D)
    return x if even and packed and x.stride(1) > 0 else x.contiguous()


def _buffers(call: Call, like: Tensor, *, train: bool) -> Prepared:
    """Unwritten buffers of the forward."""
    B, T, H, HV, K, V = call[:6]
    wide: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
    narrow: dict[str, Any] = {"dtype": like.dtype, "device": like.device}
    norms = (B, T, H) if call.unit else (0,)
    cut = (call.plan.segments, HV, K, K) if call.plan.is_cut else (0,)
    saved = (call.plan.chunks, HV, K, V) if train else (0,)
    return Prepared(
        q_norm=torch.empty(norms, **wide),
        k_norm=torch.empty(norms, **wide),
        q_read=torch.empty((B, T, HV, K), **narrow),
        k_erase=torch.empty((B, T, HV, K), **narrow),
        k_write=torch.empty((B, T, HV, K), **narrow),
        solve=torch.empty((B, T, HV, CHUNK), **narrow),
        scores=torch.empty((B, T, HV, CHUNK), **narrow),
        chunk_decay=torch.empty((call.plan.chunks, HV, K), **wide),
        chunk_state=torch.empty(saved, **narrow),
        transition=torch.empty(cut, **wide),
    )


def _prepare(
    call: Call,
    located: Tables,
    made: Prepared,
    q: Tensor,
    k: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    scale: float,
) -> None:
    forward_kernels.channel_delta_prepare_kernel[(call.plan.chunks * call.HV,)](
        q=q,
        k=k,
        log_decay=log_decay,
        erase=erase,
        q_norm=made.q_norm,
        k_norm=made.k_norm,
        q_read=made.q_read,
        k_erase=made.k_erase,
        k_write=made.k_write,
        solve=made.solve,
        scores=made.scores,
        chunk_decay=made.chunk_decay,
        masks=interval_masks(q.device),
        chunk_table=located.chunks,
        T=call.T,
        stride_q=q.stride(1),
        stride_k=k.stride(1),
        scale=scale,
        H=call.H,
        HV=call.HV,
        K=call.K,
        BK=call.tiles.key,
        C=CHUNK,
        LEVELS=LEVELS,
        PACKED=located.chunks is not None,
        UNIT=call.unit,
        CHANNEL_GATES=call.channel_gates,
        EXACT=q.dtype == torch.float32,
        ONE_CUT_LIMIT=ONE_CUT_LIMITS[q.dtype],
        PRECISION=call.tiles.precision,
        num_warps=call.tiles.token_warps,
        num_stages=1,
    )


def _scan(
    call: Call,
    located: Tables,
    made: Prepared,
    v: Tensor,
    write: Tensor,
    state: Tensor | None,
    *,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    end_state: Tensor | None = None,
    summary: bool = False,
) -> None:
    """One scan: of the whole call, or of what each segment does to the memory entering it."""
    train = not summary and made.chunk_state.numel() > 0
    columns = call.tiles_v + (triton.cdiv(call.K, call.tiles.value) if summary else 0)
    forward_kernels.channel_delta_scan_kernel[(call.plan.segments * call.HV * columns,)](
        q_read=made.q_read,
        k_erase=made.k_erase,
        k_write=made.k_write,
        solve=made.solve,
        scores=made.scores,
        chunk_decay=made.chunk_decay,
        v=v,
        write=write,
        state=state,
        out=out,
        residual=residual,
        chunk_state=made.chunk_state,
        end_state=end_state,
        transition=made.transition,
        segment_table=located.segments,
        T=call.T,
        SEGMENTS=call.plan.segments_per_row,
        SEGMENT_CHUNKS=call.plan.segment_chunks,
        stride_v=v.stride(1),
        HV=call.HV,
        K=call.K,
        V=call.V,
        KP=power_of_two(call.K),
        BV=call.tiles.value,
        C=CHUNK,
        PACKED=located.segments is not None,
        CHANNEL_GATES=call.channel_gates,
        HAS_STATE=state is not None,
        SUMMARY=summary,
        TRAIN=train,
        STORE_END=end_state is not None,
        STAGES=call.tiles.scan_stages,
        PRECISION=call.tiles.precision,
        num_warps=call.tiles.scan_warps,
    )


def _join(
    call: Call,
    located: Tables,
    transition: Tensor,
    summary: Tensor,
    state: Tensor | None,
    end_state: Tensor,
    *,
    reverse: bool,
) -> Tensor:
    """The memory entering every segment, or the gradient of the memory after it."""
    entering = torch.empty_like(summary)
    forward_kernels.channel_delta_join_kernel[
        (call.plan.sequences * call.HV * triton.cdiv(call.V, JOIN_BLOCK_V),)
    ](
        transition=transition,
        summary=summary,
        state=state,
        segment_state=entering,
        end_state=end_state,
        sequence_table=located.sequences,
        SEGMENTS=call.plan.segments_per_row,
        HV=call.HV,
        K=call.K,
        V=call.V,
        BK=min(64, power_of_two(call.K)),
        BV=JOIN_BLOCK_V,
        PACKED=located.sequences is not None,
        HAS_STATE=state is not None,
        REVERSE=reverse,
        num_warps=4,
    )
    return entering


@torch.library.custom_op("seedfront::channel_delta_forward", mutates_args=())
def channel_delta_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    write: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    unit: bool,  # noqa: FBT001
    train: bool,  # noqa: FBT001
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor,
]:  # fmt: skip
    """(out, final_state, residual, *Prepared); chunk states are kept where `train` is set."""
    call = _call(q, v, erase, cu_seqlens, unit)
    located = tables(cu_seqlens, call.plan)
    q, k, v = _by_token(q), _by_token(k), _by_token(v)
    log_decay, erase, write = log_decay.contiguous(), erase.contiguous(), write.contiguous()
    state = None if initial_state is None else initial_state.contiguous()
    out, final_state, residual, made = _outputs(call, v, train=train)

    _prepare(call, located, made, q, k, log_decay, erase, scale)
    if call.plan.is_cut:
        summary = final_state.new_empty(call.plan.segments, call.HV, call.K, call.V)
        _scan(call, located, made, v, write, None, end_state=summary, summary=True)
        state = _join(call, located, made.transition, summary, state, final_state, reverse=False)
    _scan(
        call,
        located,
        made,
        v,
        write,
        state,
        out=out,
        residual=residual,
        end_state=None if call.plan.is_cut else final_state,
    )
    return (out, final_state, residual, *made)


def _outputs(call: Call, v: Tensor, *, train: bool) -> tuple[Tensor, Tensor, Tensor, Prepared]:
    shape = (call.B, call.T, call.HV, call.V)
    out = v.new_empty(shape)
    final_state = v.new_empty((call.plan.sequences, call.HV, call.K, call.V), dtype=torch.float32)
    return out, final_state, v.new_empty(shape), _buffers(call, v, train=train)


@channel_delta_forward.register_fake
def _channel_delta_forward_fake(
    q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, unit, train
):
    call = _call(q, v, erase, cu_seqlens, unit)
    out, final_state, residual, made = _outputs(call, v, train=train)
    return (out, final_state, residual, *made)


def _reverse_scan(
    call: Call,
    located: Tables,
    made: Prepared,
    d_out: Tensor,
    d_residual: Tensor | None,
    d_state: Tensor | None,
    *,
    d_solved: Tensor | None = None,
    d_chunk_state: Tensor | None = None,
    d_start_state: Tensor | None = None,
) -> None:
    grid = (call.plan.segments * call.HV * call.tiles_v,)
    backward_kernels.channel_delta_reverse_scan_kernel[grid](
        q_read=made.q_read,
        k_erase=made.k_erase,
        k_write=made.k_write,
        solve=made.solve,
        scores=made.scores,
        chunk_decay=made.chunk_decay,
        d_out=d_out,
        d_residual=d_residual,
        d_state=d_state,
        d_solved=d_solved,
        d_chunk_state=d_chunk_state,
        d_start_state=d_start_state,
        segment_table=located.segments,
        T=call.T,
        SEGMENTS=call.plan.segments_per_row,
        SEGMENT_CHUNKS=call.plan.segment_chunks,
        HV=call.HV,
        K=call.K,
        V=call.V,
        KP=power_of_two(call.K),
        BV=call.tiles.value,
        C=CHUNK,
        PACKED=located.segments is not None,
        HAS_STATE=d_state is not None,
        HAS_RESIDUAL=d_residual is not None,
        STORE_CHUNKS=d_chunk_state is not None,
        STORE_START=d_start_state is not None,
        STAGES=call.tiles.scan_stages,
        PRECISION=call.tiles.precision,
        num_warps=call.tiles.scan_warps,
    )


class ValueGrads(NamedTuple):
    """What the value side of the backward hands on; `q_part` and `k_part` may be empty.

    Attributes:
        d_v: gradient of v.
        d_write: gradient of write, or the value side of dbeta [B, T, HV] in float32.
        d_scores: dP, symmetric, [B, T, HV, C].
        d_lower: dL, symmetric, [B, T, HV, C].
        d_diagonal: diagonal of dP [B, T, HV], float32.
        q_part: q·dq [B, T, HV], float32.
        k_part: k·dk [B, T, HV], float32.
    """

    d_v: Tensor
    d_write: Tensor
    d_scores: Tensor
    d_lower: Tensor
    d_diagonal: Tensor
    q_part: Tensor
    k_part: Tensor


def _value_grads(
    call: Call,
    located: Tables,
    v: Tensor,
    write: Tensor,
    out: Tensor,
    residual: Tensor,
    d_out: Tensor,
    d_solved: Tensor,
    d_residual: Tensor | None,
    d_beta: Tensor | None,
    scale: float,
) -> ValueGrads:
    B, T, HV = call.B, call.T, call.HV
    rows: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    parts = (B, T, HV) if call.unit else (0,)
    made = ValueGrads(
        d_v=v.new_empty(v.shape),
        d_write=torch.empty_like(write) if d_beta is None else d_beta,
        d_scores=v.new_empty(B, T, HV, CHUNK),
        d_lower=v.new_empty(B, T, HV, CHUNK),
        d_diagonal=torch.empty((B, T, HV), **rows),
        q_part=torch.empty(parts, **rows),
        k_part=torch.empty(parts, **rows),
    )
    backward_kernels.channel_delta_value_grads_kernel[(call.plan.chunks * HV,)](
        v=v,
        write=write,
        out=out,
        residual=residual,
        d_out=d_out,
        d_solved=d_solved,
        d_residual=d_residual,
        **made._asdict(),
        chunk_table=located.chunks,
        T=T,
        stride_v=v.stride(1),
        scale=scale,
        HV=HV,
        V=call.V,
        BV=call.tiles.value,
        C=CHUNK,
        PACKED=located.chunks is not None,
        CHANNEL_GATES=call.channel_gates,
        UNIT=call.unit,
        HAS_RESIDUAL=d_residual is not None,
        PRECISION=call.tiles.precision,
        num_warps=call.tiles.token_warps,
        num_stages=1,
    )
    return made


@torch.library.custom_op("seedfront::channel_delta_backward", mutates_args=())
def channel_delta_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    write: Tensor,
    cu_seqlens: Tensor | None,
    out: Tensor,
    residual: Tensor,
    made: list[Tensor],
    d_out: Tensor,
    d_final_state: Tensor | None,
    d_residual: Tensor | None,
    scale: float,
    unit: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, erase, write and the initial state.

    With one strength per head, that of `erase` is the whole dbeta and that of `write` is empty.
    """
    call = _call(q, v, erase, cu_seqlens, unit)
    located = tables(cu_seqlens, call.plan)
    prepared = Prepared(*made)
    q, k, v = _by_token(q), _by_token(k), _by_token(v)
    log_decay, erase, write = log_decay.contiguous(), erase.contiguous(), write.contiguous()
    d_out = d_out.contiguous()
    d_residual = None if d_residual is None else d_residual.contiguous()
    d_state = None if d_final_state is None else d_final_state.contiguous()
    B, T, H, HV, K, V = call[:6]

    d_initial = torch.empty((call.plan.sequences, HV, K, V), dtype=torch.float32, device=q.device)
    if call.plan.is_cut:
        summary = d_initial.new_empty(call.plan.segments, HV, K, V)
        _reverse_scan(call, located, prepared, d_out, d_residual, None, d_start_state=summary)
        d_state = _join(
            call, located, prepared.transition, summary, d_state, d_initial, reverse=True
        )
    d_solved = v.new_empty(B, T, HV, V)
    d_chunk_state = torch.empty_like(prepared.chunk_state)
    _reverse_scan(
        call,
        located,
        prepared,
        d_out,
        d_residual,
        d_state,
        d_solved=d_solved,
        d_chunk_state=d_chunk_state,
        d_start_state=None if call.plan.is_cut else d_initial,
    )

    # parts of dbeta: the value side, then each tile of channels, added in this order
    parts = None
    if not call.channel_gates:
        parts = d_initial.new_empty(1 + call.tiles_k, B, T, HV)
    values = _value_grads(
        call,
        located,
        v,
        write,
        out,
        residual,
        d_out,
        d_solved,
        d_residual,
        None if parts is None else parts[0],
        scale,
    )
    d_q, d_k = q.new_empty(B, T, HV, K), q.new_empty(B, T, HV, K)
    d_log_decay = torch.empty_like(log_decay)
    d_erase = torch.empty_like(erase) if parts is None else parts[1:]
    grid = (call.plan.chunks * HV * call.tiles_k,)
    for one_cut in (True, False):
        backward_kernels.channel_delta_key_grads_kernel[grid](
            q=q,
            k=k,
            log_decay=log_decay,
            erase=erase,
            q_norm=prepared.q_norm,
            k_norm=prepared.k_norm,
            q_part=values.q_part,
            k_part=values.k_part,
            residual=residual,
            d_out=d_out,
            d_solved=d_solved,
            d_scores=values.d_scores,
            d_lower=values.d_lower,
            d_diagonal=values.d_diagonal,
            chunk_state=prepared.chunk_state,
            d_chunk_state=d_chunk_state,
            d_q=d_q,
            d_k=d_k,
            d_log_decay=d_log_decay,
            d_erase=d_erase,
            masks=interval_masks(q.device),
            chunk_decay=prepared.chunk_decay,
            chunk_table=located.chunks,
            T=T,
            tokens=B * T,
            stride_q=q.stride(1),
            stride_k=k.stride(1),
            scale=scale,
            H=H,
            HV=HV,
            K=K,
            V=V,
            BK=call.tiles.key,
            BV=min(128, power_of_two(V)),
            C=CHUNK,
            LEVELS=LEVELS,
            PACKED=located.chunks is not None,
            UNIT=unit,
            CHANNEL_GATES=call.channel_gates,
            EXACT=q.dtype == torch.float32,
            ONE_CUT_LIMIT=ONE_CUT_LIMITS[q.dtype],
            ONE_CUT=one_cut,
            PRECISION=call.tiles.precision,
            num_warps=call.tiles.token_warps,
            num_stages=1,
        )
    if HV != H:
        d_q, d_k = (x.view(B, T, H, HV // H, K).sum(3) for x in (d_q, d_k))
    d_write = values.d_write
    if parts is not None:
        d_erase, d_write = parts.sum(0).to(erase.dtype), write.new_empty(0)
    return d_q, d_k, values.d_v, d_log_decay, d_erase, d_write, d_initial


@channel_delta_backward.register_fake
def _channel_delta_backward_fake(
    q, k, v, log_decay, erase, write, cu_seqlens, out, residual, made, d_out, d_final_state,
    d_residual, scale, unit,
):  # fmt: skip
    call = _call(q, v, erase, cu_seqlens, unit)
    state = (call.plan.sequences, call.HV, call.K, call.V)
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        v.new_empty(v.shape),
        log_decay.new_empty(log_decay.shape),
        erase.new_empty(erase.shape),
        write.new_empty(write.shape if call.channel_gates else (0,)),
        q.new_empty(state, dtype=torch.float32),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, unit, _ = inputs
    out, _, residual, *made = output
    ctx.save_for_backward(q, k, v, log_decay, erase, write, cu_seqlens, out, residual, *made)
    ctx.scale, ctx.unit, ctx.has_initial = scale, unit, initial_state is not None
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, d_out: Tensor | None, d_final: Tensor | None, d_residual: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    q, k, v, log_decay, erase, write, cu_seqlens, out, residual, *made = ctx.saved_tensors
    if Prepared(*made).chunk_state.numel() == 0:
        raise RuntimeError("channel_delta_forward ran without train, so it kept nothing to go back")
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_q, d_k, d_v, d_log_decay, d_erase, d_write, d_initial = channel_delta_backward(
        q, k, v, log_decay, erase, write, cu_seqlens, out, residual, made, d_out, d_final,
        d_residual, ctx.scale, ctx.unit,
    )  # fmt: skip
    return (
        d_q,
        d_k,
        d_v,
        d_log_decay,
        d_erase,
        d_write if d_write.numel() else None,
        d_initial if ctx.has_initial else None,
        None,
        None,
        None,
        None,
    )


channel_delta_forward.register_autograd(_backward, setup_context=_setup_context)


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    write: Tensor,
    *,
    scale: float,
    initial_state: Tensor | None,
    qk_l2norm: bool,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, residual) of either rule."""
    if v.dtype not in DTYPES:
        raise ValueError(
            f"v.dtype is {v.dtype}; the Triton kernels take bfloat16, float16 or float32 "
            "(impl='chunked' takes float64)"
        )
    if is_interpreted() and v.dtype != torch.float32:
        raise ValueError(
            f"v.dtype is {v.dtype} under TRITON_INTERPRET=1, which computes wrong products of "
            "16-bit tiles; expected float32"
        )
    given = (q, k, v, log_decay, erase, write, initial_state)
    train = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
    out, final_state, residual, *_ = channel_delta_forward(
        *given, cu_seqlens, scale, qk_l2norm, train
    )
    return out, final_state, residual


def kimi_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, *, log_decay: Tensor, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, residual) of the Kimi delta rule; options as in `dispatch.Rule`."""
    return _run(q, k, v, log_decay, beta, beta.detach(), **options)


def gated_delta_rule_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    erase: Tensor,
    write: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, residual) of the gated delta rule 2; options as in `dispatch.Rule`."""
    return _run(q, k, v, log_decay, erase, write, **options)
