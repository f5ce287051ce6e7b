"""Linear attention without decay on Triton: its scans as one differentiable operator.

Equations and symbols stand in `kernels.linear_attention_scan`. To `torch.compile` the operator is
opaque, `seedfront::linear_attention`, with its backward an operator of its own. Memory with one
decay per head is served by `kernels.scalar_delta_triton`.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.launcher import launch_kernel
from kernels.linear_attention_scan import (
    D_VALUE,
    FORWARD,
    feature_map_kernel,
    linear_attention_bwd_kernel,
    linear_attention_denominator_bwd_kernel,
    linear_attention_scan_kernel,
)
from kernels.sequences import num_chunk_slots, num_segments, sequences
from kernels.tiles import (
    CHUNK,
    check_dtype,
    device_of,
    dot_precision,
    linear_scan_tile,
    processors,
    tile_width,
)

# Axis letters: B batch, T time, H heads, K key dim, V value dim, N sequences.

_FORWARD, _D_VALUE = FORWARD.value, D_VALUE.value


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
        adds to memory and key sum, and φ(q), φ(k). What a call has no use for is empty.
    """
    outputs = _allocate(q, v, cu_seqlens, elu1, normalize, segments)
    out, final, final_z, denominator, added, added_z, *images = outputs
    scan = _Scan(q, v, cu_seqlens, scale, eps, normalize, segments)
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
        scan.segments(_FORWARD, q, k, v, added, added_z)
        launch_kernel(
            linear_attention_scan_kernel,
            scan.programs,
            q=q,
            k=k,
            v=v,
            out=out,
            denominator=denominator,
            d_denominator=None,
            initial=initial_state,
            initial_z=initial_key_sum,
            local_end=added,
            local_end_z=added_z,
            end=final,
            end_z=final_z,
            ROLE=_FORWARD,
            HAS_INITIAL=initial_state is not None,
            STATE_ONLY=False,
            **scan.shared,
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


class _Scan:
    """What all scans of one call share.

    Attributes:
        programs: of one scan over blocks of V.
        states: memories that are walked: sequences × segments × HV.
        tile: of a scan over blocks of V.
        shared: arguments of every kernel that scans.
    """

    def __init__(
        self,
        q: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None,
        scale: float,
        eps: float,
        normalize: bool,  # noqa: FBT001 (private)
        segments: int,
    ) -> None:
        rows = sequences(q.shape[0], q.shape[1], CHUNK, cu_seqlens)
        T, H, K = q.shape[1:]
        HV, V = v.shape[2:]
        self.tile = linear_scan_tile(K, V, q.dtype)
        self.states = rows.count * segments * HV
        self.programs = self.states * -(-V // self.tile.block_v)
        self.shared = {
            "cu_seqlens": rows.cu_seqlens,
            "T": T,
            "scale": scale,
            "eps": eps,
            "H": H,
            "HV": HV,
            "K": K,
            "V": V,
            "C": CHUNK,
            "BK": self.tile.block_k,
            "BV": self.tile.block_v,
            "SEGMENTS": segments,
            "NORMALIZE": normalize,
            "PACKED": rows.is_packed,
            "PRECISION": dot_precision(q.dtype),
            "STAGES": self.tile.stages,
            "num_warps": self.tile.warps,
        }

    def segments(
        self,
        role: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        added: Tensor,
        added_z: Tensor,
        denominator: Tensor | None = None,
        d_denominator: Tensor | None = None,
    ) -> None:
        """Writes what each segment of a split sequence adds to memory and key sum."""
        if self.shared["SEGMENTS"] == 1:
            return
        launch_kernel(
            linear_attention_scan_kernel,
            self.programs,
            q=q,
            k=k,
            v=v,
            out=None,
            denominator=denominator,
            d_denominator=d_denominator,
            initial=None,
            initial_z=None,
            local_end=added,
            local_end_z=added_z,
            end=None,
            end_z=None,
            ROLE=role,
            HAS_INITIAL=False,
            STATE_ONLY=True,
            **self.shared,
        )


def _gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor | None,
    initial_key_sum: Tensor | None,
    cu_seqlens: Tensor | None,
    out: Tensor,
    denominator: Tensor,
    added: Tensor,
    added_z: Tensor,
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
    HV, V = v.shape[2:]
    d_v, d_initial, d_initial_z = _allocate_gradients(v, K, cu_seqlens, normalize)
    # Several gradients of a normalised read to a key head are in float32 until they are summed:
    # they are large and cancel, and each of them rounded put the sum beyond its tolerance.
    dtype = torch.float32 if normalize else q.dtype
    per_head = q.new_empty((2, B, T, HV, K), dtype=dtype) if HV > H else None
    d_q, d_k = torch.empty_like(q), torch.empty_like(k)
    d_queries, d_keys = (d_q, d_k) if per_head is None else per_head
    scan = _Scan(q, v, cu_seqlens, scale, eps, normalize, segments)
    across = linear_scan_tile(V, K, q.dtype)
    d_out = d_out.contiguous()
    d_final, d_final_z = (None if x is None else x.contiguous() for x in (d_final, d_final_z))
    if normalize and (d_final is None) != (d_final_z is None):
        d_final = torch.zeros_like(d_initial) if d_final is None else d_final
        d_final_z = torch.zeros_like(d_initial_z) if d_final_z is None else d_final_z
    d_denominator = torch.empty_like(denominator)
    d_added, d_added_z = torch.empty_like(added), torch.empty_like(added_z)
    with device_of(q):
        if normalize:
            _launch_denominator(out, d_out, denominator, d_denominator)
        if elu1:
            q, k = q_image, k_image
        scan.segments(_D_VALUE, k, q, d_out, d_added, d_added_z, denominator, d_denominator)
        blocks = 2 * -(-K // across.block_v) + -(-V // scan.tile.block_v)
        constants = scan.shared | {"num_warps": max(scan.tile.warps, across.warps)}
        launch_kernel(
            linear_attention_bwd_kernel,
            scan.states * blocks,
            q=q,
            k=k,
            v=v,
            d_out=d_out,
            denominator=denominator,
            d_denominator=d_denominator,
            initial=initial_state,
            initial_z=initial_key_sum,
            local_end=added,
            local_end_z=added_z,
            d_final=d_final,
            d_final_z=d_final_z,
            d_local_end=d_added,
            d_local_end_z=d_added_z,
            d_q=d_queries,
            d_k=d_keys,
            d_v=d_v,
            d_initial=d_initial,
            d_initial_z=d_initial_z,
            BK_OF_V=across.block_k,
            BV_OF_K=across.block_v,
            ELU1=elu1,
            HAS_INITIAL=initial_state is not None,
            HAS_FINAL=d_final is not None,
            STAGES_OF_V=across.stages,
            **constants,
        )
    if per_head is not None:
        for d_x, x in zip((d_q, d_k), per_head.view(2, B, T, H, HV // H, K), strict=True):
            if x.dtype == d_x.dtype:
                torch.sum(x, 3, out=d_x)
            else:
                d_x.copy_(x.sum(3))
    return d_q, d_k, d_v, d_initial, d_initial_z


def _launch_denominator(
    out: Tensor, d_out: Tensor, denominator: Tensor, d_denominator: Tensor
) -> None:
    block_v = tile_width(out.shape[-1])
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
    v: Tensor,
    key_dim: int,
    cu_seqlens: Tensor | None,
    normalize: bool,  # noqa: FBT001 (private)
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v, the initial memory and the initial key sum."""
    HV, V = v.shape[2:]
    count = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    d_initial = torch.empty((count, HV, key_dim, V), dtype=torch.float32, device=v.device)
    shape = (count, HV, key_dim) if normalize else (0,)
    d_initial_z = torch.empty(shape, dtype=torch.float32, device=v.device)
    return torch.empty_like(v), d_initial, d_initial_z


linear_attention_backward_op = torch.library.custom_op(
    "seedfront::linear_attention_backward", mutates_args=()
)(_gradients)
"""The backward as `torch.compile` sees it."""


@linear_attention_backward_op.register_fake
def _linear_attention_backward_fake(
    q,
    k,
    v,
    initial_state,
    initial_key_sum,
    cu_seqlens,
    out,
    denominator,
    added,
    added_z,
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
    others = _allocate_gradients(v, q.shape[-1], cu_seqlens, normalize)
    return torch.empty_like(q), torch.empty_like(k), *others


def _keep(ctx, inputs, output) -> None:
    """Keeps for the backward what it reads."""
    out, _, _, *saved = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:6], out, *saved)
    ctx.options = inputs[6:]


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
