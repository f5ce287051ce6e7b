"""The channel-decay delta rules on Triton as one differentiable operator.

It serves both rules: with one strength per head for erase and write it is the Kimi delta rule, with
channel-wise `erase` and `write` the gated delta rule 2. The kernels are launched in
`kernels.channel_delta_launch` and `kernels.channel_delta_launch_backward`. To `torch.compile`
forward and backward are one opaque op each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels.channel_delta_launch import Inputs, Prepared, forward, outputs
from kernels.channel_delta_launch_backward import backward
from kernels.channel_delta_plan import call
from kernels.launch import is_interpreted
from kernels.tiles import device_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    erase: Tensor,
    write: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    unit: bool,  # noqa: FBT001 (an operator's schema has positional arguments)
    train: bool,  # noqa: FBT001
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor,
]:  # fmt: skip
    """(out, final_state, residual, *Prepared); chunk states are kept where `train` is set."""
    with device_of(v):
        planned = call(q, v, erase, cu_seqlens, scale, unit)
        inputs = Inputs.of(q, k, v, log_decay, erase, write)
        state = None if initial_state is None else initial_state.contiguous()
        out, final_state, residual, made = forward(planned, inputs, state, train=train)
    return (out, final_state, residual, *made)


channel_delta_op = torch.library.custom_op("seedfront::channel_delta", mutates_args=())(_forward)
"""The forward as `torch.compile` sees it; its own calls cost more than a launch, so eager code
goes past it."""


@channel_delta_op.register_fake
def _channel_delta_fake(
    q, k, v, log_decay, erase, write, initial_state, cu_seqlens, scale, unit, train
):
    planned = call(q, v, erase, cu_seqlens, scale, unit, located=False)
    out, final_state, residual, made = outputs(planned, v, train=train)
    return (out, final_state, residual, *made)


def _gradients(
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
    unit: bool,  # noqa: FBT001 (an operator's schema has positional arguments)
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, erase, write and the initial state; see `backward`."""
    with device_of(v):
        planned = call(q, v, erase, cu_seqlens, scale, unit)
        inputs = Inputs.of(q, k, v, log_decay, erase, write)
        d_final, d_left = (
            None if x is None else x.contiguous() for x in (d_final_state, d_residual)
        )
        return backward(
            planned, inputs, Prepared(*made), out, residual, d_out.contiguous(), d_final, d_left
        )


channel_delta_backward_op = torch.library.custom_op(
    "seedfront::channel_delta_backward", mutates_args=()
)(_gradients)
"""The backward as `torch.compile` sees it."""


@channel_delta_backward_op.register_fake
def _channel_delta_backward_fake(
    q, k, v, log_decay, erase, write, cu_seqlens, out, residual, made, d_out, d_final_state,
    d_residual, scale, unit,
):  # fmt: skip
    planned = call(q, v, erase, cu_seqlens, scale, unit, located=False)
    like = [x.new_empty(x.shape) for x in (q, k, v, log_decay, erase)]
    d_write = write.new_empty(write.shape if planned.has_channel_gates else (0,))
    state = (planned.chunks.count, planned.HV, planned.K, planned.V)
    return (*like, d_write, q.new_empty(state, dtype=torch.float32))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keeps for the backward what it reads."""
    q, k, v, log_decay, erase, write, _, cu_seqlens, scale, unit, _ = inputs
    out, _, residual, *made = output
    ctx.save_for_backward(q, k, v, log_decay, erase, write, cu_seqlens, out, residual, *made)
    ctx.scale, ctx.unit = scale, unit
    ctx.set_materialize_grads(False)


def _input_gradients(
    ctx: Any,
    gradients: Callable[..., tuple[Tensor, ...]],
    d_out: Tensor | None,
    d_final: Tensor | None,
    d_residual: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """A gradient for each input of the forward, None where none is asked for."""
    q, k, v, log_decay, erase, write, cu_seqlens, out, residual, *made = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    computed = gradients(
        q, k, v, log_decay, erase, write, cu_seqlens, out, residual, made, d_out, d_final,
        d_residual, ctx.scale, ctx.unit,
    )  # fmt: skip
    kept = (x if need else None for x, need in zip(computed, ctx.needs_input_grad, strict=False))
    return *kept, None, None, None, None


def _op_backward(ctx, d_out, d_final, d_residual, *_):
    if Prepared(*ctx.saved_tensors[9:]).chunk_state.numel() == 0:
        raise RuntimeError("seedfront::channel_delta ran without train, so it cannot go back")
    return _input_gradients(ctx, channel_delta_backward_op, d_out, d_final, d_residual)


channel_delta_op.register_autograd(_op_backward, setup_context=_keep)


class _ChannelDelta(torch.autograd.Function):
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
    run: Callable[..., tuple[Tensor, ...]]
    if torch.compiler.is_compiling():
        run = channel_delta_op
    else:
        run = _ChannelDelta.apply if train else _forward
    out, final_state, residual, *_ = run(*given, cu_seqlens, scale, qk_l2norm, train)
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
