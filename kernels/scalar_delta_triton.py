"""The scalar-decay family on Triton: launches of its kernels as one differentiable operator.

Serves the delta rule, the gated delta rule and additive memory with one decay per head; equations
and symbols stand in `kernels.scalar_delta_forward` and `kernels.scalar_delta_backward`.

To `torch.compile` the operator is opaque, `seedfront::scalar_delta`, with its backward an operator
of its own. Kept for the backward, beside the inputs: the residuals, the memory that enters each
chunk (in the dtype of the inputs), P, M and 20 bytes of factors per token and value head.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.launcher import launch_kernel
from kernels.scalar_delta_backward import (
    scalar_delta_pairs_bwd_kernel,
    scalar_delta_state_bwd_kernel,
    scalar_delta_token_bwd_kernel,
)
from kernels.scalar_delta_forward import (
    scalar_delta_fwd_kernel,
    scalar_delta_prepare_kernel,
    scalar_delta_segment_fwd_kernel,
)
from kernels.segments import join_segments
from kernels.sequences import Sequences, num_chunk_slots, num_segments, sequences
from kernels.tiles import (
    CHUNK,
    check_dtype,
    device_of,
    dot_precision,
    pairs_tile,
    prepare_tile,
    processors,
    scan_tile,
    token_tile,
)

# Axis letters: B batch, T time, H heads, K key dim, V value dim, N sequences, C in a chunk.


def scalar_delta_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    beta: Tensor | None,
    scale: float,
    initial_state: Tensor | None = None,
    qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
    segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final memory and residual of a rule with at most one decay per value head.

    Args:
        q: queries `[B, T, H, K]`, float32, bfloat16 or float16; arguments are taken as checked.
        k: keys, as q.
        v: values `[B, T, HV, V]`, HV a multiple of H.
        log_decay: natural log of the decay `[B, T, HV]`, at most 0; None for no decay.
        beta: write strength `[B, T, HV]`; None for additive memory, whose residual is v.
        scale: factor on the read.
        initial_state: float32 `[N, HV, K, V]`; None for an empty memory.
        qk_l2norm: normalise q and k along K inside the kernels.
        cu_seqlens: boundaries of packed sequences `[N + 1]`.
        segments: parts that each sequence is split into; None to choose by the device.

    Raises:
        ValueError: for a dtype that the kernels cannot compute with.
    """
    for name, x in (("q", q), ("log_decay", log_decay), ("beta", beta)):
        if x is not None:
            check_dtype(name, x)
    B, T, HV, V = v.shape
    if segments is None:
        tile = scan_tile(q.shape[-1], V, q.dtype)
        count = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        slots = num_chunk_slots(B, T, CHUNK, cu_seqlens)
        programs = count * HV * -(-V // tile.block_v)
        segments = num_segments(programs, -(-slots // count), processors(q.device))
    inputs = (q, k, v, log_decay, beta, initial_state)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    log_decay, beta, initial_state = (
        None if x is None else x.contiguous() for x in (log_decay, beta, initial_state)
    )
    arguments = (q, k, v, log_decay, beta, initial_state, cu_seqlens, scale, qk_l2norm, save)
    run: Callable[..., tuple[Tensor, ...]]
    if torch.compiler.is_compiling():
        run = scalar_delta_op
    else:
        run = _ScalarDelta.apply if save else _forward
    out, final, residual, *_ = run(*arguments, segments)
    return out, final, v if beta is None else residual


def _shape_constants(q: Tensor, v: Tensor) -> dict[str, int]:
    H, K = q.shape[2:]
    HV, V = v.shape[2:]
    return {"H": H, "HV": HV, "K": K, "V": V, "C": CHUNK}


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    normalize: bool,  # noqa: FBT001 (an operator's schema has positional arguments)
    save: bool,  # noqa: FBT001
    segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward on contiguous inputs.

    Returns:
        out, final memory and residual; then, for the backward, the memory entering each chunk, P,
        M, 1 / norm of q and k, the five factors, γ and the segments' transitions.
        What a call has no use for is empty.
    """
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    chunks = sequences(B, T, CHUNK, cu_seqlens)
    is_delta = beta is not None
    outputs = _allocate(q, v, chunks, normalize, save, segments, log_decay is not None, is_delta)
    out, final, residual, states, read_matrix, inverse, rstd, factors, chunk_decay, transition = (
        outputs
    )
    key, target, erase, write, read = factors.unbind()
    constants = {
        **_shape_constants(q, v),
        "HAS_DECAY": log_decay is not None,
        "IS_DELTA": is_delta,
        "PACKED": chunks.is_packed,
        "PRECISION": dot_precision(q.dtype),
    }
    tables = {"cu_seqlens": chunks.cu_seqlens, "chunk_offsets": chunks.chunk_offsets, "T": T}
    matrices = {
        "inverse": inverse,
        "target_factor": target,
        "erase_factor": erase,
        "write_factor": write,
    }
    prepare, tile = prepare_tile(K, V, q.dtype), scan_tile(K, V, q.dtype)
    scan = {
        **constants,
        "BK": tile.block_k,
        "BV": tile.block_v,
        "SEGMENTS": segments,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
    }
    blocks = -(-V // tile.block_v)
    with device_of(q):
        launch_kernel(
            scalar_delta_prepare_kernel,
            chunks.num_chunks * HV,
            q=q,
            k=k,
            log_decay=log_decay,
            beta=beta,
            read_matrix=read_matrix,
            key_factor=key,
            q_rstd=rstd[0],
            k_rstd=rstd[1],
            read_factor=read,
            chunk_decay=chunk_decay,
            chunk_owners=chunks.chunk_owners,
            num_sequences=chunks.count,
            scale=scale,
            BK=prepare.block_k,
            NORMALIZE=normalize,
            num_warps=prepare.warps,
            num_stages=prepare.stages,
            maxnreg=prepare.registers,
            **matrices,
            **tables,
            **{name: value for name, value in constants.items() if name != "V"},
        )
        start = initial_state
        if segments > 1:
            local_end = v.new_empty((chunks.count, segments, HV, K, V), dtype=torch.float32)
            columns = blocks + -(-K // tile.block_v)
            launch_kernel(
                scalar_delta_segment_fwd_kernel,
                chunks.count * segments * HV * columns,
                k=k,
                v=v,
                chunk_decay=chunk_decay,
                local_end=local_end,
                transition=transition,
                **matrices,
                **tables,
                **scan,
            )
            start = torch.empty_like(local_end)
            join_segments(local_end, transition, initial_state, start)
        launch_kernel(
            scalar_delta_fwd_kernel,
            chunks.count * segments * HV * blocks,
            q=q,
            k=k,
            v=v,
            read_matrix=read_matrix,
            read_factor=read,
            chunk_decay=chunk_decay,
            start=start,
            out=out,
            residual=residual,
            states=states,
            final=final,
            HAS_START=start is not None,
            STORE_RESIDUAL=is_delta,
            STORE_STATES=save,
            **matrices,
            **tables,
            **scan,
        )
    return outputs


def _allocate(
    q: Tensor,
    v: Tensor,
    chunks: Sequences,
    normalize: bool,  # noqa: FBT001 (private)
    save: bool,  # noqa: FBT001
    segments: int,
    has_decay: bool,  # noqa: FBT001
    is_delta: bool,  # noqa: FBT001
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every tensor that the forward returns; empty where the call has no use for it."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]

    def empty(*shape: int, dtype: torch.dtype = torch.float32, used: bool = True) -> Tensor:
        return torch.empty(shape if used else (0,), dtype=dtype, device=v.device)

    split = segments > 1
    return (
        empty(B, T, HV, V, dtype=v.dtype),
        empty(chunks.count, HV, K, V),
        empty(B, T, HV, V, dtype=v.dtype, used=is_delta),
        empty(chunks.num_chunks, HV, K, V, dtype=v.dtype, used=save),
        empty(B, T, HV, CHUNK, dtype=v.dtype),
        empty(B, T, HV, CHUNK, dtype=v.dtype, used=is_delta),
        empty(2, B, T, H) if normalize else empty(2, 0),
        empty(5, B, T, HV),
        empty(chunks.num_chunks, HV, used=has_decay),
        empty(chunks.count, segments, HV, K, K, used=split),
    )


scalar_delta_op = torch.library.custom_op("seedfront::scalar_delta", mutates_args=())(_forward)
"""The forward as `torch.compile` sees it; its own calls cost more than a launch, so eager code
goes past it."""


@scalar_delta_op.register_fake
def _scalar_delta_fake(
    q,
    k,
    v,
    log_decay,
    beta,
    initial_state,
    cu_seqlens,
    scale,
    normalize,
    save,
    segments,
):
    B, T = q.shape[:2]
    count = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = num_chunk_slots(B, T, CHUNK, cu_seqlens)
    chunks = Sequences(count, T, CHUNK, slots, cu_seqlens)
    has_decay, is_delta = log_decay is not None, beta is not None
    return _allocate(q, v, chunks, normalize, save, segments, has_decay, is_delta)


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    beta: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    residual: Tensor,
    states: Tensor,
    read_matrix: Tensor,
    inverse: Tensor,
    rstd: Tensor,
    factors: Tensor,
    chunk_decay: Tensor,
    transition: Tensor,
    d_out: Tensor,
    d_final: Tensor | None,
    d_residual: Tensor | None,
    scale: float,
    normalize: bool,  # noqa: FBT001 (an operator's schema has positional arguments)
    segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, beta and the initial memory; empty for absent inputs."""
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    chunks = sequences(B, T, CHUNK, cu_seqlens)
    is_delta = beta is not None
    d_out = d_out.contiguous()
    d_final = None if d_final is None else d_final.contiguous()
    d_residual = None if d_residual is None else d_residual.contiguous()
    d_q, d_k, d_v, d_log_decay, d_beta, d_initial = _allocate_gradients(
        q, v, log_decay, beta, chunks.count
    )
    d_y, d_states = torch.empty_like(v), torch.empty_like(states)
    d_read, d_lower = torch.empty_like(read_matrix), torch.empty_like(inverse)
    row_sums = torch.empty((4, B, T, HV), dtype=torch.float32, device=v.device)
    key, _, erase, write, read = factors.unbind()
    shared = {
        **_shape_constants(q, v),
        "cu_seqlens": chunks.cu_seqlens,
        "chunk_offsets": chunks.chunk_offsets,
        "T": T,
        "k": k,
        "d_out": d_out,
        "d_y": d_y,
        "HAS_DECAY": log_decay is not None,
        "IS_DELTA": is_delta,
        "PACKED": chunks.is_packed,
        "PRECISION": dot_precision(q.dtype),
    }
    around = {
        "q": q,
        "write_factor": write,
        "read_factor": read,
        "chunk_decay": chunk_decay,
        "d_states": d_states,
    }
    residual_gradient = {"d_residual": d_residual, "HAS_D_RESIDUAL": d_residual is not None}
    tile = scan_tile(K, V, q.dtype)
    scan = {
        "read_matrix": read_matrix,
        "inverse": inverse,
        "erase_factor": erase,
        "BK": tile.block_k,
        "BV": tile.block_v,
        "SEGMENTS": segments,
        "STAGES": tile.stages,
        "num_warps": tile.warps,
        **residual_gradient,
    }
    num_programs = chunks.count * segments * HV * -(-V // tile.block_v)
    with device_of(q):
        start = d_final
        if segments > 1:
            local_end = v.new_empty((chunks.count, segments, HV, K, V), dtype=torch.float32)
            launch_kernel(
                scalar_delta_state_bwd_kernel,
                num_programs,
                start=None,
                end=local_end,
                HAS_START=False,
                STATE_ONLY=True,
                **shared,
                **around,
                **scan,
            )
            start = torch.empty_like(local_end)
            join_segments(local_end, transition, d_final, start, reverse=True)
        launch_kernel(
            scalar_delta_state_bwd_kernel,
            num_programs,
            start=start,
            end=d_initial,
            HAS_START=start is not None,
            STATE_ONLY=False,
            **shared,
            **around,
            **scan,
        )
        tokens = {
            "residual": residual if is_delta else v,
            "beta": beta,
            "q_rstd": rstd[0],
            "k_rstd": rstd[1],
            "d_read": d_read,
            "d_lower": d_lower,
            "pair_decay": row_sums[0],
            "pair_beta": row_sums[1],
            "q_dot": row_sums[2],
            "k_dot": row_sums[3],
            "chunk_owners": chunks.chunk_owners,
            "num_sequences": chunks.count,
            "NORMALIZE": normalize,
        }
        tile = pairs_tile(K, V, q.dtype)
        launch_kernel(
            scalar_delta_pairs_bwd_kernel,
            chunks.num_chunks * HV,
            v=v,
            out=out,
            log_decay=log_decay,
            read_matrix=read_matrix,
            d_v=d_v,
            scale=scale,
            BK=tile.block_k,
            BV=tile.block_v,
            STAGES=tile.stages,
            num_warps=tile.warps,
            maxnreg=tile.registers,
            **shared,
            **tokens,
            **residual_gradient,
        )
        tile = token_tile(K, V, q.dtype)
        launch_kernel(
            scalar_delta_token_bwd_kernel,
            chunks.num_chunks * HV,
            key_factor=key,
            states=states,
            d_q=d_q,
            d_k=d_k,
            d_log_decay=d_log_decay,
            d_beta=d_beta,
            BK=tile.block_k,
            BV=tile.block_v,
            STAGES=tile.stages,
            num_warps=tile.warps,
            maxnreg=tile.registers,
            **shared,
            **around,
            **tokens,
        )
    if HV > H:
        d_q, d_k = (x.view(B, T, H, HV // H, K).sum(3) for x in (d_q, d_k))
    return d_q, d_k, d_v, d_log_decay, d_beta, d_initial


def _allocate_gradients(
    q: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients as the kernels write them: those of q and k per value head, to be summed.

    Each is rounded to the inputs' dtype before the sum; kept in float32 they were a fifth of the
    memory of a training step with two value heads to a key head of 64.
    """
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    d_q, d_k = (q.new_empty((B, T, HV, K)) for _ in range(2))
    d_log_decay, d_beta = (
        v.new_empty(0) if x is None else torch.empty_like(x) for x in (log_decay, beta)
    )
    d_initial = torch.empty((count, HV, K, V), dtype=torch.float32, device=v.device)
    return d_q, d_k, torch.empty_like(v), d_log_decay, d_beta, d_initial


scalar_delta_backward_op = torch.library.custom_op(
    "seedfront::scalar_delta_backward", mutates_args=()
)(_gradients)
"""The backward as `torch.compile` sees it."""


@scalar_delta_backward_op.register_fake
def _scalar_delta_backward_fake(
    q,
    k,
    v,
    log_decay,
    beta,
    cu_seqlens,
    *args,
):
    count = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    others = _allocate_gradients(q, v, log_decay, beta, count)[2:]
    return torch.empty_like(q), torch.empty_like(k), *others


def _keep(ctx, inputs, output) -> None:
    """Keeps for the backward what it reads."""
    q, k, v, log_decay, beta, _, cu_seqlens, scale, normalize, _, segments = inputs
    out, _, residual, *saved = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, log_decay, beta, cu_seqlens, out, residual, *saved)
    ctx.options = (scale, normalize, segments)


def _input_gradients(ctx, gradients, d_out, d_final, d_residual):
    """A gradient for each input of the forward, None where none is asked for."""
    saved = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(saved[6])
    computed = gradients(*saved, d_out, d_final, d_residual, *ctx.options)
    kept = (x if need else None for x, need in zip(computed, ctx.needs_input_grad, strict=False))
    return *kept, None, None, None, None, None


def _op_backward(ctx, d_out, d_final, d_residual, *_):
    return _input_gradients(ctx, scalar_delta_backward_op, d_out, d_final, d_residual)


scalar_delta_op.register_autograd(_op_backward, setup_context=_keep)


class _ScalarDelta(torch.autograd.Function):
    """The same outside of `torch.compile`, for a third of the host's time."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output[:3]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_final, d_residual):
        return _input_gradients(ctx, _gradients, d_out, d_final, d_residual)
