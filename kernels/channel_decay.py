"""Decay factors between the tokens of a chunk, for one decay per key channel, and their Gram matrix.

exp(G_i − G_j) does not factor over a chunk without overflow. It does over two neighbouring halves
of a block: with the boundary between them as reference, a query in the second half has decayed
since the boundary, a key in the first half decays until it, and both exponents are sums of log
decays, hence at most 0 whatever the decay. Halves of 1, 2, 4, … tokens up to C / 2 cover every pair
j < i exactly once, at log2(C) exponentials for each token and channel. (The public kernels use
blocks of 16 and exact pairs inside them, which is 16 exponentials and a sum in each of them.)

No exponent is a difference of sums, so none loses digits, and the gradient of the decay is a sum of
those of the exponents, in which nothing cancels.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Axis letters: C position in a chunk, K key dim; the leading axes are chunks and heads.


@lru_cache(maxsize=32)
def _spans(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Which log decays each exponent sums, as zeros and ones `[(levels + 2) · C, C]`.

    Row i of level s: from the boundary to token i where i is in the second half of its block of 2s
    tokens, else from token i + 1 to the boundary. The last two groups reach from the start of the
    chunk to token i, and from token i + 1 to its end.
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
    return torch.cat(groups).to(device, dtype)


def channel_factors(log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The exponentials of a chunk with these log decays `[..., C, K]`; C is a power of two.

    Returns:
        The halves' factors for `decayed_gram` `[..., log2(C), C, K]`; exp(G_i), what is left of
        the entering state; exp(G_C − G_j), what is left of a token's write at the end.
    """
    size, K = log_decay.shape[-2:]
    spans = _spans(size, log_decay.dtype, log_decay.device)
    factors = (spans @ log_decay).exp().unflatten(-2, (-1, size))
    return factors[..., :-2, :, :], factors[..., -2, :, :], factors[..., -1, :, :]


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """The first and the second halves of all blocks of 2 · half rows `[..., C / 2half, half, K]`."""
    blocks = x.unflatten(-2, (-1, 2, half))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _lower_left(gram: Tensor, half: int) -> Tensor:
    """The blocks of second-half rows and first-half columns: a view `[Z, C / 2half, half, half]`."""
    Z, C, _ = gram.shape
    return gram.as_strided(
        (Z, C // (2 * half), half, half),
        (C * C, 2 * half * (C + 1), C, 1),
        gram.storage_offset() + half * C,
    )


class _DecayedGram(torch.autograd.Function):
    """See `decayed_gram`."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, k: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        Z, C, _ = k.shape
        grams = tuple(k.new_zeros(Z, C, C) for _ in rows)
        for row, gram in zip(rows, grams, strict=True):
            gram.diagonal(dim1=-2, dim2=-1).copy_((row * k).sum(-1))
        for level in range(factors.shape[1]):
            half = 1 << level
            until, since = _halves(factors[:, level], half)
            keys = (_halves(k, half)[0] * until).mT
            for row, gram in zip(rows, grams, strict=True):
                _lower_left(gram, half).copy_((_halves(row, half)[1] * since) @ keys)
        ctx.save_for_backward(factors, k, *rows)
        return grams

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_grams: Tensor) -> tuple[Tensor, ...]:
        factors, k, *rows = ctx.saved_tensors
        d_grams = tuple(d_gram.contiguous() for d_gram in d_grams)
        d_factors, d_k, d_rows = torch.zeros_like(factors), torch.zeros_like(k), []
        for row, d_gram in zip(rows, d_grams, strict=True):
            d_diagonal = d_gram.diagonal(dim1=-2, dim2=-1)[..., None]
            d_rows.append(d_diagonal * k)
            d_k += d_diagonal * row
        for level in range(factors.shape[1]):
            half = 1 << level
            until, since = _halves(factors[:, level], half)
            d_until, d_since = _halves(d_factors[:, level], half)
            k_first, d_k_first = _halves(k, half)[0], _halves(d_k, half)[0]
            keys, d_keys = k_first * until, torch.zeros_like(k_first)
            for row, d_row, d_gram in zip(rows, d_rows, d_grams, strict=True):
                row_second, d_block = _halves(row, half)[1], _lower_left(d_gram, half)
                d_queries = d_block @ keys
                d_keys += d_block.mT @ (row_second * since)
                d_since += d_queries * row_second
                _halves(d_row, half)[1].add_(d_queries * since)
            d_until += d_keys * k_first
            d_k_first += d_keys * until
        return d_factors, d_k, *d_rows


def decayed_gram(factors: Tensor, k: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """X_ij = Σ_c row_ic k_jc exp(G_ic − G_jc) for j ≤ i, else 0, for each of the `rows`.

    Args:
        factors: as `channel_factors` returns them `[Z, log2(C), C, K]`.
        k: keys `[Z, C, K]`.
        rows: queries, or keys times their erase strength `[Z, C, K]`.

    Returns:
        One lower triangular matrix `[Z, C, C]` for each of the rows.
    """
    return _DecayedGram.apply(factors, k, *rows)
