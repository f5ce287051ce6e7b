"""Depthwise causal convolution over time, followed by SiLU.

Equation, for channel c and a filter of W taps, the last of which meets the token itself:

    y_tc = SiLU(Σ_{i<W} weight_ci · x_{t−W+1+i, c})

Symbols: x and y `[B, T, C]`, channels last; weight `[C, W]`; the window `[B, W−1, C]` holds the
inputs before the first token, oldest first, zero where a sequence starts. No bias.

Source: Fu et al., "Hungry Hungry Hippos" (arXiv 2212.14052), section 3 (their shift SSM), in the
form of "Gated Delta Networks" (arXiv 2412.06464), width 4 after the projection of q, k and v.

Cost: 2·W FLOPs per token and channel. The backward keeps x and the sum before SiLU.
"""

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from kernels.arguments import check_cu_seqlens, state_dtype

# Axis letters: B batch, T time, C channels, W taps.


class _ConvSilu(torch.autograd.Function):
    """SiLU of the sum over taps, for inputs that begin with the W − 1 inputs of the window."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, weight: Tensor) -> Tensor:
        # One row for each tap: products with a strided column take a processor four times as long.
        taps = weight.T.contiguous()
        length = padded.shape[1] - len(taps) + 1
        total = padded[:, :length] * taps[0]
        for first, tap in enumerate(taps[1:], 1):
            total.addcmul_(padded[:, first : first + length], tap)
        ctx.save_for_backward(padded, taps, total)
        return functional.silu(total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, Tensor]:
        padded, taps, total = ctx.saved_tensors
        d_total = torch.ops.aten.silu_backward(d_out, total)
        d_padded, d_taps = torch.zeros_like(padded), torch.empty_like(taps)
        for first, tap in enumerate(taps):
            rows = slice(first, first + total.shape[1])
            d_padded[:, rows].addcmul_(d_total, tap)
            d_taps[first] = (d_total * padded[:, rows]).sum((0, 1))
        return d_padded, d_taps.T


def short_conv(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C W"],
    *,
    window: Float[Tensor, "N W-1 C"] | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
) -> tuple[Float[Tensor, "B T C"], Float[Tensor, "N W-1 C"]]:
    """(out, the window after the last token), for each batch row or packed sequence.

    Args:
        x: inputs.
        weight: one filter for each channel; the last tap meets the token itself.
        window: inputs before the first token, oldest first; None for zeros.
        cu_seqlens: boundaries of sequences packed into one row (B = 1), from 0 to T.

    Raises:
        ValueError: if shapes or dtypes don't fit, or the boundaries aren't those of x.
    """
    B, T, C, W = _check(x, weight, ndim=3)
    num_sequences = check_cu_seqlens(cu_seqlens, B, T)
    window = _check_window(window, x, (num_sequences, W - 1, C))
    dtype = state_dtype(x.dtype)
    if cu_seqlens is None:
        padded = torch.cat([window, x], 1)
        out = _ConvSilu.apply(padded.to(dtype), weight.to(dtype))
        return out.to(x.dtype), padded[:, T:]
    # Every sequence gets its window in front, so that no tap reaches into the sequence before.
    source, output, tail = _packed_rows(cu_seqlens, T, W)
    padded = torch.cat([window.flatten(0, 1), x[0]]).index_select(0, source)
    out = _ConvSilu.apply(padded[None].to(dtype), weight.to(dtype)).index_select(1, output)
    return out.to(x.dtype), padded.index_select(0, tail).unflatten(0, (num_sequences, W - 1))


def _packed_rows(
    cu_seqlens: Tensor, num_tokens: int, num_taps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the packed inputs with a window before each sequence, made on their device.

    Returns:
        Where each row comes from, counted through all windows and then all tokens; the row at which
        each token's filter starts; the rows of the windows after each sequence.
    """
    device, reach = cu_seqlens.device, num_taps - 1
    bounds, num_windowed = cu_seqlens.long(), (len(cu_seqlens) - 1) * reach
    sequence = torch.arange(len(bounds) - 1, device=device)
    token = torch.arange(num_tokens, device=device)
    owner = sequence.repeat_interleave(bounds.diff(), output_size=num_tokens)
    # Sequence i has the windows of sequences 0 to i before it, and its tokens behind its own.
    output = token + owner * reach
    window = (bounds[:-1] + sequence * reach)[:, None] + torch.arange(reach, device=device)
    source = torch.empty(num_windowed + num_tokens, dtype=torch.int64, device=device)
    source[window.flatten()] = torch.arange(num_windowed, device=device)
    source[output + reach] = num_windowed + token
    tail = (bounds[1:] + sequence * reach)[:, None] + torch.arange(reach, device=device)
    return source, output, tail.flatten()


def short_conv_step(
    x: Float[Tensor, "B C"],
    weight: Float[Tensor, "C W"],
    *,
    window: Float[Tensor, "B W-1 C"],
) -> tuple[Float[Tensor, "B C"], Float[Tensor, "B W-1 C"]]:
    """One token of `short_conv`: (out, the window after it).

    Raises:
        ValueError: if shapes or dtypes don't fit.
    """
    B, C, W = _check(x, weight, ndim=2)
    window = _check_window(window, x, (B, W - 1, C))
    dtype = state_dtype(x.dtype)
    padded = torch.cat([window, x[:, None]], 1)
    total = (padded.to(dtype) * weight.to(dtype).T).sum(1)
    return functional.silu(total).to(x.dtype), padded[:, 1:]


def _check(x: Tensor, weight: Tensor, *, ndim: int) -> tuple[int, ...]:
    """The sizes of x and the number of taps."""
    if x.ndim != ndim:
        expected = "[B, T, C]" if ndim == 3 else "[B, C]"
        raise ValueError(f"x has shape {list(x.shape)}; expected {expected}")
    if weight.ndim != 2 or weight.shape[0] != x.shape[-1]:
        raise ValueError(
            f"weight has shape {list(weight.shape)}; expected one row of taps for each of the "
            f"{x.shape[-1]} channels of x"
        )
    return (*x.shape, weight.shape[1])


def _check_window(window: Tensor | None, x: Tensor, expected: tuple[int, ...]) -> Tensor:
    """The window, or one of zeros."""
    if window is None:
        return x.new_zeros(expected)
    if tuple(window.shape) != expected or window.dtype != x.dtype:
        raise ValueError(
            f"window has shape {list(window.shape)} and dtype {window.dtype}; expected "
            f"{list(expected)} and {x.dtype}"
        )
    return window
