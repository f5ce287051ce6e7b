"""Linear attention without decay on Triton: its scans as one differentiable operator.

Equations and symbols stand in `kernels.linear_attention_scan`. To `torch.compile` the operator is
opaque, `seedfront::linear_attention`, with its backward an operator of its own. Memory with one
decay per head is served by `kernels.scalar_delta_triton`.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.launcher import launch_kernel
from kernels.linear_attention_scan import (
    feature_map_kernel,
    linear_attention_denominator_bwd_kernel,
    linear_attention_scan_kernel,
)
from kernels.segments import join_sums
from kernels.sequences import num_chunk_slots, num_segments, sequences
from kernels.tiles import (
    CHUNK,
    check_dtype,
    device_of,
    dot_precision,
    linear_scan_tile,
    power_of_two,
    processors,
)

# Axis letters: B batch, T time, H heads, K key dim, V value dim, N sequences.

_FORWARD, _D_QUERY, _D_KEY, _D_VALUE = range(4)


def linear_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    elu1: bool,
    normalize: bool,
    scale: float,
    initial_state: Tensor | None = None,
    initial_key_sum: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-6,
    segments: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs, final memory and final key sum, the last empty where nothing is normalised.

    Args:
        q: queries `[B, T, H, K]`, float32, bfloat16 or float16; arguments are taken as checked.
        k: keys, as q.
        v: values `[B, T, HV, V]`, HV a multiple of H.
        elu1: whether q and k pass the feature map elu + 1.
        normalize: whether outputs are divided by scale q·z + eps.
        scale: factor on the read, not 0.
        initial_state: float32 `[N, HV, K, V]`; None for an empty memory.
        initial_key_sum: float32 `[N, HV, K]`, present with `initial_state` where normalised.
        cu_seqlens: boundaries of packed sequences `[N + 1]`.
        eps: added to the denominator.
        segments: parts that each sequence is split into; None to choose by the device.

    Raises:
        ValueError: for a dtype that the kernels cannot compute with.
    """
    check_dtype("q", q)
    B, T, HV, V = v.shape
    if segments is None:
        tile = linear_scan_tile(q.shape[-1], V, q.dtype)
        count = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        slots = num_chunk_slots(B, T, CHUNK, cu_seqlens)
        programs = count * HV * -(-V // tile.block_v)
        segments = num_segments(programs, -(-slots // count), processors(q.device))
    initial_state, initial_key_sum = (
        None if x is None else x.contiguous() for x in (initial_state, initial_key_sum)
    )
    run: Callable[..., tuple[Tensor, ...]]
    if torch.compiler.is_compiling():
        run = linear_attention_op
    elif torch.is_grad_enabled():
        run = _LinearAttention.apply
    else:
        run = _forward
    out, final, final_key_sum, *_ = run(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        initial_state,
        initial_key_sum,
        cu_seqlens,
        scale,
        eps,
        elu1,
        normalize,
        segments,
    )
    return out, final, final_key_sum


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    eps: float,
    elu1: bool,  # noqa: FBT001 (an operator's schema has positional arguments)
    normalize: bool,  # noqa: FBT001
    segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The forward on contiguous inputs.

    Returns:
        out, final memory and key sum; then, for the backward, the denominator, what each segment
        starts from, memory and key sum, and φ(q), φ(k). What a call has no use for is empty.
    """
    outputs = _allocate(q, v, cu_seqlens, elu1, normalize, segments)
    out, final, final_z, denominator, start, start_z, *images = outputs
    options = _Options(q, v, cu_seqlens, scale, eps, elu1, normalize, segments)
    with device_of(q):
        if elu1:
            launch_kernel(
                feature_map_kernel,
                2 * -(-q.numel() // 4096),
                q=q,
                k=k,
                q_image=images[0],
                k_image=images[1],
                size=q.numel(),
                BLOCK=4096,
                num_warps=4,
            )
            q, k = images
        if segments > 1:
            options.starts(
                _FORWARD, q, k, v, initial_state, initial_key_sum, start=start, start_z=start_z
            )
        first, first_z = (start, start_z) if segments > 1 else (initial_state, initial_key_sum)
        options.scan(
            _FORWARD,
            q=q,
            k=k,
            v=v,
            out=out,
            denominator=denominator,
            start=first,
            start_z=first_z,
            end=final,
            end_z=final_z,
        )
    return outputs


def _allocate(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    elu1: bool,  # noqa: FBT001 (private)
    normalize: bool,  # noqa: FBT001
    segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Every tensor that the forward returns; empty where the call has no use for it."""
    B, T, _, K = q.shape
    HV, V = v.shape[2:]
    count = B if cu_seqlens is None else cu_seqlens.shape[0] - 1

    def empty(*shape: int, used: bool = True) -> Tensor:
        return torch.empty(shape if used else (0,), dtype=torch.float32, device=v.device)

    split = segments > 1
    q_image, k_image = (torch.empty_like(q) if elu1 else q.new_empty(0) for _ in range(2))
    return (
        torch.empty_like(v),
        empty(count, HV, K, V),
        empty(count, HV, K, used=normalize),
        empty(B, T, HV, used=normalize),
        empty(count, segments, HV, K, V, used=split),
        empty(count, segments, HV, K, used=split and normalize),
        q_image,
        k_image,
    )


linear_attention_op = torch.library.custom_op("seedfront::linear_attention", mutates_args=())(
    _forward
)
"""The forward as `torch.compile` sees it; its own calls cost more than a launch, so eager code
goes past it."""


@linear_attention_op.register_fake
def _linear_attention_fake(
    q,
    k,
    v,
    initial_state,
    initial_key_sum,
    cu_seqlens,
    scale,
    eps,
    elu1,
    normalize,
    segments,
):
    return _allocate(q, v, cu_seqlens, elu1, normalize, segments)


class _Options:
    """What all scans of one call share, and how one of them is launched."""

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        scale: float,
        eps: float,
        elu1: bool,  # noqa: FBT001 (private)
        normalize: bool,  # noqa: FBT001
        segments: int,
    ) -> None:
        self.sequences = sequences(q.shape[0], q.shape[1], CHUNK, cu_seqlens)
        self.HV = v.shape[2]
        self.segments = segments
        self.shared = {
            "cu_seqlens": self.sequences.cu_seqlens,
            "T": q.shape[1],
            "scale": scale,
            "eps": eps,
            "HV": self.HV,
            "C": CHUNK,
            "SEGMENTS": segments,
            "ELU1": elu1,
            "NORMALIZE": normalize,
            "PACKED": self.sequences.is_packed,
            "PRECISION": dot_precision(q.dtype),
        }

    def scan(
        self,
        role: int,
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        image: Tensor | None = None,
        denominator: Tensor | None = None,
        d_denominator: Tensor | None = None,
        start: Tensor | None = None,
        start_z: Tensor | None = None,
        end: Tensor | None = None,
        end_z: Tensor | None = None,
        state_only: bool = False,
    ) -> None:
        """Launches the scan `role`; q, k and v are what it reads in their place."""
        K, V = k.shape[-1], v.shape[-1]
        tile = linear_scan_tile(K, V, q.dtype)
        blocks = -(-V // tile.block_v)
        launch_kernel(
            linear_attention_scan_kernel,
            self.sequences.count * self.segments * self.HV * blocks,
            q=q,
            k=k,
            v=v,
            out=out,
            image=image,
            denominator=denominator,
            d_denominator=d_denominator,
            start=start,
            start_z=start_z,
            end=end,
            end_z=end_z,
            HQ=q.shape[2],
            HK=k.shape[2],
            HX=v.shape[2],
            HR=1 if image is None else image.shape[2],
            K=K,
            V=V,
            BK=tile.block_k,
            BV=tile.block_v,
            ROLE=role,
            HAS_START=start is not None,
            STATE_ONLY=state_only,
            STAGES=tile.stages,
            num_warps=tile.warps,
            **self.shared,
        )

    def starts(
        self,
        role: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        initial: Tensor | None,
        initial_z: Tensor | None,
        *,
        start: Tensor,
        start_z: Tensor,
        denominator: Tensor | None = None,
        d_denominator: Tensor | None = None,
    ) -> None:
        """Writes where each segment's walk starts: memory `[N, S, HV, K, V]` and key sum."""
        local_end, local_end_z = torch.empty_like(start), torch.empty_like(start_z)
        self.scan(
            role,
            q=q,
            k=k,
            v=v,
            denominator=denominator,
            d_denominator=d_denominator,
            end=local_end,
            end_z=local_end_z,
            state_only=True,
        )
        join_sums(
            (local_end, initial, start),
            (local_end_z, initial_z, start_z) if self.shared["NORMALIZE"] else None,
            reverse=role != _FORWARD,
        )


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor | None,
    start_z: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    denominator: Tensor,
    q_image: Tensor,
    k_image: Tensor,
    d_out: Tensor,
    d_final: Tensor | None,
    d_final_z: Tensor | None,
    scale: float,
    eps: float,
    elu1: bool,  # noqa: FBT001 (an operator's schema has positional arguments)
    normalize: bool,  # noqa: FBT001
    segments: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, the initial memory and the initial key sum."""
    B, T, H, K = q.shape
    HV = v.shape[2]
    d_q, d_k, d_v, d_initial, d_initial_z = _allocate_gradients(q, v, cu_seqlens, normalize)
    options = _Options(q, v, cu_seqlens, scale, eps, elu1, normalize, segments)
    d_out = d_out.contiguous()
    d_start, d_start_z = (None if x is None else x.contiguous() for x in (d_final, d_final_z))
    if normalize and (d_start is None) != (d_start_z is None):
        d_start = torch.zeros_like(d_initial) if d_start is None else d_start
        d_start_z = torch.zeros_like(d_initial_z) if d_start_z is None else d_start_z
    d_denominator = torch.empty_like(denominator)
    with device_of(q):
        if normalize:
            _launch_denominator(out, d_out, denominator, d_denominator)
        if elu1:
            q, k = q_image, k_image
        if segments > 1:
            assert start is not None  # A split forward keeps what its segments start from.
            assert start_z is not None
            behind, behind_z = (
                d_initial.new_empty(start.shape),
                d_initial_z.new_empty(start_z.shape),
            )
            options.starts(
                _D_VALUE,
                k,
                q,
                d_out,
                d_start,
                d_start_z,
                start=behind,
                start_z=behind_z,
                denominator=denominator,
                d_denominator=d_denominator,
            )
            d_start, d_start_z = behind, behind_z
        scan = functools.partial(options.scan, denominator=denominator, d_denominator=d_denominator)
        reverse = functools.partial(scan, start=d_start, start_z=d_start_z)
        scan(_D_QUERY, q=d_out, k=v, v=k, out=d_q, image=q, start=start, start_z=start_z)
        reverse(_D_KEY, q=v, k=d_out, v=q, out=d_k, image=k)
        reverse(_D_VALUE, q=k, k=q, v=d_out, out=d_v, end=d_initial, end_z=d_initial_z)
    if HV > H:
        d_q, d_k = (x.view(B, T, H, HV // H, K).sum(3).to(q.dtype) for x in (d_q, d_k))
    return d_q, d_k, d_v, d_initial, d_initial_z


def _launch_denominator(
    out: Tensor, d_out: Tensor, denominator: Tensor, d_denominator: Tensor
) -> None:
    block_v = power_of_two(out.shape[-1])
    # About 4096 numbers a program, 32 a thread.
    block_r = max(1, 4096 // block_v)
    num_rows = denominator.numel()
    launch_kernel(
        linear_attention_denominator_bwd_kernel,
        -(-num_rows // block_r),
        out=out,
        d_out=d_out,
        denominator=denominator,
        d_denominator=d_denominator,
        num_rows=num_rows,
        V=out.shape[-1],
        BR=block_r,
        BV=block_v,
        num_warps=4,
    )


def _allocate_gradients(
    q: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    normalize: bool,  # noqa: FBT001 (private)
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients as the kernels write them: those of q and k per value head, to be summed.

    In float32 where there are several to a head: those of a normalised read are large and cancel,
    and each of them rounded put the sum beyond its tolerance.
    """
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    count = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    dtype = q.dtype if HV == H else torch.float32
    d_q, d_k = (q.new_empty((B, T, HV, K), dtype=dtype) for _ in range(2))
    d_initial = torch.empty((count, HV, K, V), dtype=torch.float32, device=v.device)
    shape = (count, HV, K) if normalize else (0,)
    d_initial_z = torch.empty(shape, dtype=torch.float32, device=v.device)
    return d_q, d_k, torch.empty_like(v), d_initial, d_initial_z


linear_attention_backward_op = torch.library.custom_op(
    "seedfront::linear_attention_backward", mutates_args=()
)(_gradients)
"""The backward as `torch.compile` sees it."""


@linear_attention_backward_op.register_fake
def _linear_attention_backward_fake(
    q,
    k,
    v,
    start,
    start_z,
    cu_seqlens,
    out,
    denominator,
    q_image,
    k_image,
    d_out,
    d_final,
    d_final_z,
    scale,
    eps,
    elu1,
    normalize,
    segments,
):
    others = _allocate_gradients(q, v, cu_seqlens, normalize)[2:]
    return torch.empty_like(q), torch.empty_like(k), *others


def _keep(ctx, inputs, output) -> None:
    """Keeps for the backward what it reads."""
    q, k, v, initial_state, initial_key_sum, cu_seqlens, *options = inputs
    out, _, _, denominator, start, start_z, *images = output
    ctx.set_materialize_grads(False)
    if options[-1] == 1:
        start, start_z = initial_state, initial_key_sum
    ctx.save_for_backward(q, k, v, start, start_z, cu_seqlens, out, denominator, *images)
    ctx.options = options


def _input_gradients(ctx, gradients, d_out, d_final, d_final_z):
    """A gradient for each input of the forward, None where none is asked for."""
    saved = ctx.saved_tensors
    if d_out is None:
        d_out = torch.zeros_like(saved[6])
    computed = gradients(*saved, d_out, d_final, d_final_z, *ctx.options)
    kept = (x if need else None for x, need in zip(computed, ctx.needs_input_grad, strict=False))
    return *kept, *(None,) * 6


def _op_backward(ctx, d_out, d_final, d_final_z, *_):
    return _input_gradients(ctx, linear_attention_backward_op, d_out, d_final, d_final_z)


linear_attention_op.register_autograd(_op_backward, setup_context=_keep)


class _LinearAttention(torch.autograd.Function):
    """The same outside of `torch.compile`, for a third of the host's time."""

    @staticmethod
    def forward(ctx, *inputs):
        output = _forward(*inputs)
        _keep(ctx, inputs, output)
        return output[:3]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out, d_final, d_final_z):
        return _input_gradients(ctx, _gradients, d_out, d_final, d_final_z)
