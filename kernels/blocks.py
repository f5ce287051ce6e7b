"""Triton device functions that several kernels share, each beside a twin in PyTorch.

Dialect of every kernel of the project: `i_` program indices (64 bit before they are multiplied),
`o_` offsets, `m_` masks, `b_` values held by the program, capitals for compile-time constants.
Offsets and masks are written out; block pointers no longer exist in Triton 3.9. `C` is the number
of tokens in a chunk; tensors of tokens are contiguous, `[rows, heads, channels]`, where a row is a
token of the flattened batch.

Two rules hold everywhere. No dot result is ever transposed to feed another dot: Triton 3.4 to 3.7.0
stores such a tile wrongly on Hopper for some widths (flash-linear-attention issue 640), so the
transposed product is formed directly. And every exponent is at most 0 before `exp2` sees it, also
in the half of a tile that a mask removes afterwards.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def sequence_bounds(cu_seqlens, i_n, T, PACKED: tl.constexpr):
    """First row and length of sequence `i_n`: packed by `cu_seqlens`, or one of equal rows of T."""
    if PACKED:
        i_first = tl.load(cu_seqlens + i_n).to(tl.int64)
        num_tokens = (tl.load(cu_seqlens + i_n + 1).to(tl.int64) - i_first).to(tl.int32)
    else:
        i_first = i_n.to(tl.int64) * T
        num_tokens = T
    return i_first, num_tokens


@triton.jit
def first_chunk(chunk_offsets, i_n, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Index of the first chunk of sequence `i_n` among the chunks of all sequences, 64 bit."""
    if PACKED:
        i_chunk = tl.load(chunk_offsets + i_n).to(tl.int64)
    else:
        i_chunk = i_n.to(tl.int64) * tl.cdiv(T, C)
    return i_chunk


@triton.jit
def locate_chunk(chunk_owners, chunk_offsets, i_chunk, T, C: tl.constexpr, PACKED: tl.constexpr):
    """Sequence that chunk `i_chunk` belongs to, and the chunk's position inside it.

    A slot behind the last chunk of a packing names the sequence past the last one.
    """
    if PACKED:
        i_n = tl.load(chunk_owners + i_chunk).to(tl.int64)
        i_c = (i_chunk - tl.load(chunk_offsets + i_n).to(tl.int64)).to(tl.int32)
    else:
        num_chunks = tl.cdiv(T, C)
        i_n = i_chunk // num_chunks
        i_c = (i_chunk % num_chunks).to(tl.int32)
    return i_n, i_c


@triton.jit
def summed_decay(b_log_decay):
    """Log decay summed inside the chunk, inclusive, in base 2 and float64: [C].

    The sum of 64 strong decays is so large that float32 would lose the digits of a weak decay that
    follows them: after -30 a token for a chunk, a difference of two sums is off by 2e-4.
    """
    return tl.cumsum(b_log_decay.to(tl.float64), 0) * _LOG2_E


@triton.jit
def decay_between(b_sum_i, b_sum_j):
    """2 ** (b_sum_i - b_sum_j) in float32, at most 1; the arguments broadcast, later token first.

    Pairs in the wrong order have a positive exponent; it is bounded here, and masked by the caller.
    """
    return tl.math.exp2(tl.minimum((b_sum_i - b_sum_j).to(tl.float32), 0.0))


def summed_decay_torch(log_decay: Tensor, chunk: int) -> Tensor:
    """Twin of `summed_decay` for `[B, T, ...]`: float64 sums in base 2 that restart every chunk."""
    parts = [part.double().cumsum(1) * LOG2_E for part in log_decay.split(chunk, 1)]
    return torch.cat(parts, 1)


@triton.jit
def diagonal_blocks(b_x, C: tl.constexpr):
    """The 16 × 16 blocks on the diagonal of a float32 [C, C]: [C / 16, 16, 16]."""
    N: tl.constexpr = C // 16
    o_n = tl.arange(0, N)
    m_diagonal = (o_n[:, None] == o_n[None, :])[:, None, :, None]
    return tl.sum(tl.where(m_diagonal, tl.reshape(b_x, [N, 16, N, 16]), 0.0), 2)


@triton.jit
def unit_lower_inverse(b_lower, b_blocks_t, C: tl.constexpr, PRECISION: tl.constexpr):
    """Inverse of I + the strictly lower triangle of `b_lower`, float32 [C, C]; C is 16, 32 or 64.

    The 16 × 16 blocks on the diagonal are inverted row by row, all at once. Two merges then use
    [[A, 0], [B, D]]⁻¹ = [[A⁻¹, 0], [-D⁻¹ B A⁻¹, D⁻¹]] for 32 and 64 rows; as full-width products of
    masked matrices they run on the matrix units. A series of powers would be shorter but loses all
    digits for keys that point the same way, whose powers grow like binomials.

    Args:
        b_lower: float32 [C, C]; diagonal and upper triangle are ignored.
        b_blocks_t: its diagonal blocks, each transposed, [C / 16, 16, 16]; diagonal and lower
            triangle are ignored. A row of a block is needed as factors of rows, which it is as a
            column of the transpose; the caller forms that for less than transposing costs.
        C: rows.
        PRECISION: `input_precision` of the merges: `tf32` where the inverse is rounded to 16 bit
            afterwards, else `tf32x3`.
    """
    B: tl.constexpr = 16
    N: tl.constexpr = C // B
    o_c = tl.arange(0, C)
    o_n = tl.arange(0, N)
    o_b = tl.arange(0, B)
    m_diagonal = (o_n[:, None] == o_n[None, :])[:, None, :, None]
    b_t = tl.where((o_b[:, None] < o_b[None, :])[None, :, :], -b_blocks_t, 0.0)
    m_identity = (o_b[:, None] == o_b[None, :])[None, :, :]
    b_x = tl.where(m_identity, 1.0, tl.zeros([N, B, B], tl.float32))
    for i in range(1, B):
        b_factor = tl.sum(tl.where((o_b == i)[None, None, :], b_t, 0.0), 2)
        b_row = tl.sum(b_factor[:, :, None] * b_x, 1)
        b_x += tl.where((o_b == i)[None, :, None], b_row[:, None, :], 0.0)

    b_inverse = tl.reshape(tl.where(m_diagonal, b_x[:, :, None, :], 0.0), [C, C])
    b_neg = tl.where(o_c[:, None] > o_c[None, :], -b_lower, 0.0)
    if C > 16:
        m_pair = o_c[:, None] // 32 == o_c[None, :] // 32
        m_pair = m_pair & (o_c[:, None] // 16 > o_c[None, :] // 16)
        b_half = tl.dot(tl.where(m_pair, b_neg, 0.0), b_inverse, input_precision=PRECISION)
        b_inverse += tl.dot(b_inverse, b_half, input_precision=PRECISION)
    if C > 32:
        m_pair = o_c[:, None] // 32 > o_c[None, :] // 32
        b_half = tl.dot(tl.where(m_pair, b_neg, 0.0), b_inverse, input_precision=PRECISION)
        b_inverse += tl.dot(b_inverse, b_half, input_precision=PRECISION)
    return b_inverse


def unit_lower_inverse_torch(lower: Tensor) -> Tensor:
    """Twin of `unit_lower_inverse`: (I + strict lower triangle of `lower`)⁻¹ over `[..., C, C]`."""
    identity = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    inverse: Tensor = torch.linalg.solve_triangular(
        identity + lower.tril(-1), identity.expand_as(lower), upper=False, unitriangular=True
    )
    return inverse


@triton.jit
def elu1(b_x):
    """elu(x) + 1 in float32: x + 1 where x is positive, else e^x."""
    b_x = b_x.to(tl.float32)
    return tl.where(b_x > 0, b_x + 1.0, tl.math.exp2(tl.minimum(b_x, 0.0) * _LOG2_E))


@triton.jit
def elu1_slope(b_x):
    """Derivative of `elu1`: 1 where x is positive, else e^x."""
    return tl.math.exp2(tl.minimum(b_x.to(tl.float32), 0.0) * _LOG2_E)


def elu1_torch(x: Tensor) -> Tensor:
    """Twin of `elu1`."""
    return x.clamp(max=0).exp() + x.relu()
