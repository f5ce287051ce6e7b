"""Launches of the channel-decay delta rules: what all share, and the forward.

Equations and symbols: `kernels.channel_delta_forward`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.channel_delta_forward import channel_delta_prepare_kernel, channel_delta_scan_kernel
from kernels.channel_delta_plan import Call
from kernels.intervals import LEVELS, ONE_CUT_TOTALS, interval_masks
from kernels.launcher import launch_kernel
from kernels.segments import join_segments
from kernels.tiles import CHUNK

# Axis letters: B batch, T time, H heads, HV value heads, K key dim, V value dim, C in a chunk,
# N sequences, S segments of each.


class Inputs(NamedTuple):
    """Inputs of a call as the kernels read them: gates contiguous, tokens of q, k, v at one stride.

    Attributes:
        q: queries `[B, T, H, K]`.
        k: keys `[B, T, H, K]`.
        v: values `[B, T, HV, V]`.
        log_decay: `[B, T, HV, K]`.
        erase: `[B, T, HV]`, or `[B, T, HV, K]` with channel gates.
        write: `[B, T, HV, V]` with channel gates; else not read, since erase serves for both.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    erase: Tensor
    write: Tensor

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, erase: Tensor, write: Tensor
    ) -> "Inputs":
        """Copies what isn't laid out so."""
        rows = (_by_token(x) for x in (q, k, v))
        return cls(*rows, *(x.contiguous() for x in (log_decay, erase, write)))


class Prepared(NamedTuple):
    """What the forward leaves for its backward; unused ones are empty.

    Attributes:
        q_norm: 1 / length of each query `[B, T, H]`, float32, where they are made unit vectors.
        k_norm: the same for keys.
        q_read: scale·q∘e^G `[B, T, HV, K]`.
        k_erase: erase∘k∘e^G `[B, T, HV, K]`.
        k_write: k∘e^{G_C − G} `[B, T, HV, K]`.
        solve: rows of (I + L)^-1 `[B, T, HV, C]`.
        scores: rows of P `[B, T, HV, C]`.
        strength: one strength per head `[B, T, HV]`, float32, which can be copied ahead.
        chunk_total: G_C in base 2 `[chunks, HV, K]`, float32.
        chunk_state: memory entering each chunk `[chunks, HV, K, V]`.
        transition: what each segment makes of the memory entering it `[N, S, HV, K, K]`, float32.
    """

    q_norm: Tensor
    k_norm: Tensor
    q_read: Tensor
    k_erase: Tensor
    k_write: Tensor
    solve: Tensor
    scores: Tensor
    strength: Tensor
    chunk_total: Tensor
    chunk_state: Tensor
    transition: Tensor


def _by_token(x: Tensor) -> Tensor:
    """`x` [B, T, heads, D] itself where tokens lie at one stride and heads are packed, or a copy.

    Slices of a fused projection qualify, so they reach the kernels without being copied.
    """
    B, T, _, D = x.shape
    even = B == 1 or x.stride(0) == T * x.stride(1)
    packed = x.stride(3) == 1 and (x.shape[2] == 1 or x.stride(2) == D)
    return x if even and packed and x.stride(1) > 0 else x.contiguous()


def outputs(call: Call, v: Tensor, *, train: bool) -> tuple[Tensor, Tensor, Tensor, Prepared]:
    """Unwritten out, final memory, residual and the rest of what the forward writes."""
    B, T, H, HV, K, V, chunks = call.B, call.T, call.H, call.HV, call.K, call.V, call.chunks

    def narrow(*shape: int, used: bool = True) -> Tensor:
        return v.new_empty(shape if used else (0,))

    def wide(*shape: int, used: bool = True) -> Tensor:
        return v.new_empty(shape if used else (0,), dtype=torch.float32)

    made = Prepared(
        q_norm=wide(B, T, H, used=call.is_unit),
        k_norm=wide(B, T, H, used=call.is_unit),
        q_read=narrow(B, T, HV, K),
        k_erase=narrow(B, T, HV, K),
        k_write=narrow(B, T, HV, K),
        solve=narrow(B, T, HV, CHUNK),
        scores=narrow(B, T, HV, CHUNK),
        strength=wide(B, T, HV, used=not call.has_channel_gates),
        chunk_total=wide(chunks.num_chunks, HV, K),
        chunk_state=narrow(chunks.num_chunks, HV, K, V, used=train),
        transition=wide(chunks.count, call.segments, HV, K, K, used=call.segments > 1),
    )
    return narrow(B, T, HV, V), wide(chunks.count, HV, K, V), narrow(B, T, HV, V), made


def located(call: Call) -> dict[str, Any]:
    """Where the sequences lie, for kernels that walk them."""
    return {
        "cu_seqlens": call.chunks.cu_seqlens,
        "chunk_offsets": call.chunks.chunk_offsets,
        "T": call.T,
        "HV": call.HV,
        "V": call.V,
        "C": CHUNK,
        "PACKED": call.chunks.is_packed,
        "PRECISION": call.precision,
    }


def per_chunk(call: Call) -> dict[str, Any]:
    """The same for kernels with a program for each chunk."""
    return {
        **located(call),
        "chunk_owners": call.chunks.chunk_owners,
        "num_sequences": call.chunks.count,
        "tokens": call.B * call.T,
        "scale": call.scale,
        "UNIT": call.is_unit,
        "CHANNEL_GATES": call.has_channel_gates,
    }


def per_channel(call: Call, inputs: Inputs) -> dict[str, Any]:
    """What the kernels that exponentiate decays share."""
    q, k = inputs.q, inputs.k
    return {
        **per_chunk(call),
        "q": q,
        "k": k,
        "log_decay": inputs.log_decay,
        "erase": inputs.erase,
        "masks": interval_masks(q.device),
        "stride_q": q.stride(1),
        "stride_k": k.stride(1),
        "H": call.H,
        "K": call.K,
        "LEVELS": LEVELS,
        "EXACT": call.dtype == torch.float32,
        "ONE_CUT_TOTAL": ONE_CUT_TOTALS[call.dtype],
    }


def scan_tiles(call: Call) -> dict[str, Any]:
    """How the scans are cut."""
    return {
        "K": call.K,
        "KP": call.scan_key,
        "BV": call.tiles.value,
        "SEGMENTS": call.segments,
        "STAGES": call.tiles.scan_stages,
        "num_warps": call.tiles.scan_warps,
    }


def forward(
    call: Call, inputs: Inputs, state: Tensor | None, *, train: bool
) -> tuple[Tensor, Tensor, Tensor, Prepared]:
    """out, final memory, residual and what the backward reads; chunk states only with `train`."""
    out, final, residual, made = outputs(call, inputs.v, train=train)
    _prepare(call, inputs, made)
    start = state
    if call.segments > 1:
        summary = final.new_empty(call.chunks.count, call.segments, *final.shape[1:])
        _scan(call, inputs, made, None, end=summary, summary=True)
        start = torch.empty_like(summary)
        join_segments(summary, made.transition, state, start)
    _scan(call, inputs, made, start, end=final, out=out, residual=residual)
    return out, final, residual, made


def _prepare(call: Call, inputs: Inputs, made: Prepared) -> None:
    written = made._asdict()
    del written["chunk_state"], written["transition"]
    arguments = per_channel(call, inputs) | written
    del arguments["V"], arguments["tokens"]
    launch_kernel(
        channel_delta_prepare_kernel,
        call.chunks.num_chunks * call.HV,
        **arguments,
        BK=call.tiles.prepare_key,
        num_warps=call.tiles.prepare_warps,
        maxnreg=call.tiles.prepare_registers,
        num_stages=1,
    )


def _scan(
    call: Call,
    inputs: Inputs,
    made: Prepared,
    start: Tensor | None,
    *,
    end: Tensor,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    summary: bool = False,
) -> None:
    """One scan: of the whole call, or of what each segment does to the memory entering it."""
    read = made._asdict()
    del read["q_norm"], read["k_norm"]
    columns = call.tiles_v + (-(-call.K // call.tiles.value) if summary else 0)
    launch_kernel(
        channel_delta_scan_kernel,
        call.chunks.count * call.segments * call.HV * columns,
        **located(call),
        **scan_tiles(call),
        **read,
        v=inputs.v,
        write=inputs.write,
        start=start,
        out=out,
        residual=residual,
        end=end,
        stride_v=inputs.v.stride(1),
        CHANNEL_GATES=call.has_channel_gates,
        HAS_START=start is not None,
        SUMMARY=summary,
        STORE_STATES=not summary and made.chunk_state.numel() > 0,
    )
