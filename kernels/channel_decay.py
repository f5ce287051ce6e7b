"""What the tokens of a chunk still see of each other, for one decay per key channel.

Equation, with G_i the log decay summed from the start of the chunk up to token i:

    X_ij = Σ_c a_ic k_jc exp(G_ic − G_jc) for j ≤ i, else 0
    entering_i = exp(G_i)        leaving_j = exp(G_C − G_j)

The exponential doesn't factor over a chunk without overflow. It does over two neighbouring halves
of a block: with the boundary between them as reference, a row in the second half has decayed since
the boundary, a key in the first half decays until it, and both exponents are sums of log decays,
hence at most 0 whatever the decay. Halves of 1, 2, 4, … C / 2 tokens cover every pair j < i exactly
once, at log2(C) exponentials for each token and channel, and the diagonal needs none. (The public
kernels use blocks of 16 and exact pairs inside them: 16 exponentials for each token and channel.)

No exponent is a difference of sums, so none loses digits; and the gradient of a log decay is a sum
over the exponents that hold it, in which no two terms cancel by construction.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Axis letters: Z chunks of all sequences · heads, C position in a chunk, K key dim, A kinds of
# rows.


@lru_cache(maxsize=32)
def _spans(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Which log decays each exponent sums, as zeros and ones `[1, (levels + 2) · C, C]`.

    Row i of the level with halves of h tokens: from the boundary to token i where i is in the
    second half of its block, else from token i + 1 to the boundary. The last two groups reach from
    the start of the chunk to token i, and from token i + 1 to its end.
    """
    row, column = torch.arange(size)[:, None], torch.arange(size)[None]
    groups = []
    for level in range(size.bit_length() - 1):
        half = 1 << level
        boundary = row // (2 * half) * (2 * half) + half
        is_since = (boundary <= column) & (column <= row)
        is_until = (row < column) & (column < boundary)
        groups.append(torch.where(row >= boundary, is_since, is_until))
    groups += [column <= row, column > row]
    return torch.cat(groups)[None].to(device, dtype)


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """First and second halves of the blocks of 2 · half tokens `[Z, C / 2half, half, ...]`."""
    blocks = x.unflatten(1, (-1, 2, half))
    return blocks[:, :, 0], blocks[:, :, 1]


def _lower_left(grams: Tensor, half: int) -> Tensor:
    """The blocks of second-half rows and first-half columns, as a view.

    Of grams `[Z, C, A, C]`, the rows of both axes together: `[Z, C / 2half, half · A, half]`.
    """
    Z, C, A, _ = grams.shape
    return grams.as_strided(
        (Z, C // (2 * half), half * A, half),
        (C * A * C, 2 * half * (A * C + 1), C, 1),
        grams.storage_offset() + half * A * C,
    )


def _decayed_rows(rows: Tensor, since: Tensor) -> Tensor:
    """Rows `[Z, blocks, half, A, K]` decayed since the boundary, `[Z, blocks, half · A, K]`."""
    return (rows * since.unsqueeze(3)).flatten(2, 3)


class _ChannelDecay(torch.autograd.Function):
    """See `channel_decay`; the rows of all kinds stand beside each other, `[Z, C, A, K]`."""

    @staticmethod
    def forward(
        ctx: Any, log_decay: Tensor, k: Tensor, rows: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        Z, C, K = k.shape
        spans = _spans(C, k.dtype, k.device).expand(Z, -1, -1)
        factors = torch.bmm(spans, log_decay).exp_().view(Z, -1, C, K)
        grams = k.new_zeros(Z, C, rows.shape[2], C)
        grams.diagonal(dim1=1, dim2=3).copy_((rows * k.unsqueeze(2)).sum(-1).mT)
        for level in range(factors.shape[1] - 2):
            half = 1 << level
            until, since = _halves(factors[:, level], half)[0], _halves(factors[:, level], half)[1]
            keys = _halves(k, half)[0] * until
            queries = _decayed_rows(_halves(rows, half)[1], since)
            _lower_left(grams, half).copy_(queries @ keys.mT)
        ctx.save_for_backward(factors, k, rows)
        return factors[:, -2].clone(), factors[:, -1].clone(), grams

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, d_entering: Tensor, d_leaving: Tensor, d_grams: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        factors, k, rows = ctx.saved_tensors
        d_grams, d_exponents = d_grams.contiguous(), torch.empty_like(factors)
        torch.mul(d_entering, factors[:, -2], out=d_exponents[:, -2])
        torch.mul(d_leaving, factors[:, -1], out=d_exponents[:, -1])
        d_diagonal = d_grams.diagonal(dim1=1, dim2=3).mT.unsqueeze(3)
        d_rows, d_k = d_diagonal * k.unsqueeze(2), (d_diagonal * rows).sum(2)
        for level in range(factors.shape[1] - 2):
            half = 1 << level
            until, since = _halves(factors[:, level], half)
            d_until, d_since = _halves(d_exponents[:, level], half)
            k_first, rows_second = _halves(k, half)[0], _halves(rows, half)[1]
            d_block = _lower_left(d_grams, half)
            d_keys = (d_block.mT @ _decayed_rows(rows_second, since)).mul_(until)
            d_queries = (d_block @ (k_first * until)).view_as(rows_second)
            d_queries.mul_(since.unsqueeze(3))
            _halves(d_k, half)[0].add_(d_keys)
            _halves(d_rows, half)[1].add_(d_queries)
            torch.mul(d_keys, k_first, out=d_until)
            torch.sum(d_queries.mul_(rows_second), 3, out=d_since)
        spans = _spans(k.shape[1], k.dtype, k.device).expand(len(k), -1, -1)
        return torch.bmm(spans.mT, d_exponents.flatten(1, 2)), d_k, d_rows


def channel_decay(
    log_decay: Tensor, k: Tensor, *rows: Tensor
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """`entering` and `leaving` `[Z, C, K]`, and X `[Z, C, C]` for each kind of rows.

    Args:
        log_decay: at most 0 `[Z, C, K]`; C is a power of two.
        k: keys `[Z, C, K]`.
        rows: a of each X, such as queries, or keys times their erase strength `[Z, C, K]`.
    """
    entering, leaving, grams = _ChannelDecay.apply(log_decay, k, torch.stack(rows, 2))
    return entering, leaving, tuple(grams.unbind(2))
