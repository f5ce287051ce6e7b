"""Launches of the channel-decay delta rules: the backward.

Equations and symbols: `kernels.channel_delta_backward` and `kernels.channel_delta_key_grads`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.channel_delta_backward import (
    channel_delta_reverse_scan_kernel,
    channel_delta_value_grads_kernel,
)
from kernels.channel_delta_key_grads import channel_delta_key_grads_kernel
from kernels.channel_delta_launch import (
    Inputs,
    Prepared,
    located,
    per_channel,
    per_chunk,
    scan_tiles,
)
from kernels.channel_delta_plan import Call
from kernels.launcher import launch_kernel
from kernels.segments import join_segments
from kernels.tiles import CHUNK

# Axis letters: B batch, T time, H heads, HV value heads, K key dim, V value dim, C in a chunk.


class ValueGrads(NamedTuple):
    """What the value side of the backward hands on; `q_part` and `k_part` may be empty.

    Attributes:
        d_v: gradient of v.
        d_write: gradient of write, or the value side of dbeta `[B, T, HV]` in float32.
        d_scores: dP below the diagonal, and transposed, `[2, B, T, HV, C]`.
        d_lower: dL, likewise.
        d_diagonal: diagonal of dP `[B, T, HV]`, float32.
        q_part: q·dq `[B, T, HV]`, float32.
        k_part: k·dk `[B, T, HV]`, float32.
    """

    d_v: Tensor
    d_write: Tensor
    d_scores: Tensor
    d_lower: Tensor
    d_diagonal: Tensor
    q_part: Tensor
    k_part: Tensor


def backward(
    call: Call,
    inputs: Inputs,
    made: Prepared,
    out: Tensor,
    residual: Tensor,
    d_out: Tensor,
    d_final: Tensor | None,
    d_residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, log_decay, erase, write and the initial memory.

    With one strength per head, that of erase is the whole dbeta and that of write is empty.
    """
    B, T, H, HV, K, V = call.B, call.T, call.H, call.HV, call.K, call.V
    d_initial = out.new_empty((call.chunks.count, HV, K, V), dtype=torch.float32)
    d_solved, d_chunk_state = torch.empty_like(residual), torch.empty_like(made.chunk_state)
    start = d_final
    if call.segments > 1:
        summary = d_initial.new_empty(call.chunks.count, call.segments, HV, K, V)
        _reverse_scan(call, made, d_out, d_residual, None, end=summary)
        start = torch.empty_like(summary)
        join_segments(summary, made.transition, d_final, start, reverse=True)
    _reverse_scan(
        call,
        made,
        d_out,
        d_residual,
        start,
        end=d_initial,
        d_solved=d_solved,
        d_chunk_state=d_chunk_state,
    )
    # parts of dbeta: the value side, then each tile of channels, added in this order
    parts = None
    if not call.has_channel_gates:
        parts = d_initial.new_empty(1 + call.tiles_k, B, T, HV)
    values = _value_grads(
        call,
        inputs,
        made,
        torch.empty_like(inputs.write) if parts is None else parts[0],
        out=out,
        residual=residual,
        d_out=d_out,
        d_solved=d_solved,
        d_residual=d_residual,
    )
    d_erase = torch.empty_like(inputs.erase) if parts is None else parts[1:]
    d_q, d_k, d_log_decay = _key_grads(
        call,
        inputs,
        made,
        values,
        d_erase,
        residual=residual,
        d_out=d_out,
        d_solved=d_solved,
        d_chunk_state=d_chunk_state,
    )
    if HV != H:
        d_q, d_k = (x.view(B, T, H, HV // H, K).sum(3) for x in (d_q, d_k))
    if parts is not None:
        d_beta = parts.sum(0).to(inputs.erase.dtype)
        return d_q, d_k, values.d_v, d_log_decay, d_beta, out.new_empty(0), d_initial
    return d_q, d_k, values.d_v, d_log_decay, d_erase, values.d_write, d_initial


def _reverse_scan(
    call: Call,
    made: Prepared,
    d_out: Tensor,
    d_residual: Tensor | None,
    start: Tensor | None,
    *,
    end: Tensor,
    d_solved: Tensor | None = None,
    d_chunk_state: Tensor | None = None,
) -> None:
    """The reverse scan; a summary of each segment where `d_solved` isn't asked for."""
    launch_kernel(
        channel_delta_reverse_scan_kernel,
        call.chunks.count * call.segments * call.HV * call.tiles_v,
        **located(call),
        **scan_tiles(call),
        q_read=made.q_read,
        k_erase=made.k_erase,
        k_write=made.k_write,
        solve=made.solve,
        scores=made.scores,
        chunk_total=made.chunk_total,
        d_out=d_out,
        d_residual=d_residual,
        start=start,
        d_solved=d_solved,
        d_chunk_state=d_chunk_state,
        end=end,
        HAS_START=start is not None,
        HAS_RESIDUAL=d_residual is not None,
        SUMMARY=d_solved is None,
    )


def _value_grads(
    call: Call, inputs: Inputs, made: Prepared, d_write: Tensor, **tensors: Tensor | None
) -> ValueGrads:
    v = inputs.v
    pairs = (2, call.B, call.T, call.HV, CHUNK)
    rows = v.new_empty((3, call.B, call.T, call.HV), dtype=torch.float32)
    grads = ValueGrads(
        v.new_empty(v.shape), d_write, v.new_empty(pairs), v.new_empty(pairs), *rows.unbind()
    )
    launch_kernel(
        channel_delta_value_grads_kernel,
        call.chunks.num_chunks * call.HV,
        **per_chunk(call),
        **grads._asdict(),
        **tensors,
        v=v,
        write=inputs.write,
        strength=made.strength,
        stride_v=v.stride(1),
        BV=call.tiles.value,
        HAS_RESIDUAL=tensors["d_residual"] is not None,
        num_warps=call.tiles.value_warps,
        num_stages=1,
    )
    return grads


def _key_grads(
    call: Call,
    inputs: Inputs,
    made: Prepared,
    values: ValueGrads,
    d_erase: Tensor,
    **tensors: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and k by value head, and of the log decay; writes `d_erase`."""
    shape = (call.B, call.T, call.HV, call.K)
    d_q, d_k = inputs.q.new_empty(shape), inputs.q.new_empty(shape)
    d_log_decay = torch.empty_like(inputs.log_decay)
    read = values._asdict()
    del read["d_v"], read["d_write"]
    for one_cut in (True, False):
        launch_kernel(
            channel_delta_key_grads_kernel,
            call.chunks.num_chunks * call.HV * call.tiles_k,
            **per_channel(call, inputs),
            **read,
            **tensors,
            strength=made.strength,
            q_norm=made.q_norm,
            k_norm=made.k_norm,
            chunk_state=made.chunk_state,
            chunk_total=made.chunk_total,
            d_q=d_q,
            d_k=d_k,
            d_log_decay=d_log_decay,
            d_erase=d_erase,
            BK=call.tiles.grads_key,
            BV=call.tiles.grads_value,
            ONE_CUT=one_cut,
            STAGES=call.tiles.grads_stages,
            num_warps=call.tiles.grads_warps,
            maxnreg=call.tiles.grads_registers,
            num_stages=1,
        )
    return d_q, d_k, d_log_decay
