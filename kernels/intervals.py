"""Triton device functions for decay per channel: a chunk as a binary tree of intervals.

The decay between two tokens j < i of a chunk is exp(Σ_{j<t≤i} log_decay_t), one number for every
channel. Written as exp(G_i − G_j) with the running sum G it does not factor into something that a
matrix product can use: exp(−G_j) overflows as soon as a chunk forgets much.

Split the chunk in the middle instead, and each half again, down to single tokens. Any pair j < i is
separated by exactly one of these cuts, the one at the highest bit in which i and j differ, and

    Σ_{j<t≤i} log_decay_t  =  suffix_j + prefix_i

where suffix_j sums from the token after j to the cut and prefix_i from the cut to i. Both are sums
of non-positive numbers, so both exponentials lie in [0, 1], and both are formed by additions alone:
nothing is ever subtracted, so that neither a decay of e^-30 a token nor one of exactly 1 loses
digits. With C = 64 there are six levels of cuts. At each, a row stands on one side only, hence one
exponential per row, channel and level, and one matrix product serves all pairs of the level.

Chunk-wise kernels elsewhere (fla, FlashKDA) anchor blocks of 16 rows, which needs a bounded decay
or a pairwise loop on the diagonal blocks; the tree needs neither. Its price is six products instead
of two or three.

Names: a row is `later` at a level when it stands behind the cut. All tiles are [C, BK] float32.
"""

import triton
import triton.language as tl

from kernels.rows import LOG2_E


# The masks of a level compare two numbers made of the row and of the column. What is left for each
# pair is one comparison; the compiler would otherwise keep tiles of row-column terms in registers.


@triton.jit
def is_later(rows, level):
    """Whether each row stands behind the cut of its interval of 2·2^level rows."""
    return (rows >> level) & 1 == 1


@triton.jit
def separated(rows, level):
    """Which (row, column) pairs the cuts of this level separate, in either order."""
    half = rows >> level
    return (half ^ 1)[:, None] == half[None, :]


@triton.jit
def separated_below(rows, level):
    """Which of them have the row behind the cut, that is below the diagonal."""
    half = rows >> level
    odd = half & 1 == 1
    return tl.where(odd, half, -1)[:, None] == tl.where(odd, -2, half + 1)[None, :]


@triton.jit
def between(rows, level):
    """Which tokens (rows) lie between a token (column) and the cut of its interval.

    Behind the cut that is the token itself and those before it, before the cut those after it.
    """
    half = rows >> level
    odd = half & 1 == 1
    sign = tl.where(odd, 1, -1)
    in_order = (rows * sign)[:, None] <= tl.where(odd, rows, -rows - 1)[None, :]
    return in_order & (half[:, None] == half[None, :])


@triton.jit
def single_rows(log_decay):
    """(prefix, suffix) of the intervals of one row each, in base 2."""
    prefix = log_decay.to(tl.float32) * LOG2_E
    return prefix, tl.zeros_like(prefix)


@triton.jit
def to_cut(prefix, suffix, later):
    """exp of the decay between each row and the cut of its interval, in [0, 1]."""
    return tl.math.exp2(tl.where(later, prefix, suffix))


@triton.jit
def join(prefix, suffix, rows, level):
    """(prefix, suffix) of the intervals of 2·2^level rows from those of 2^level rows.

    A row's prefix and suffix add up to the sum over its interval, so the sum over the interval on
    the other side of the cut is any of its rows'.
    """
    behind = is_later(rows, level)[:, None]
    sibling = tl.broadcast_to((rows ^ (1 << level))[:, None], prefix.shape)
    sibling = tl.gather(prefix + suffix, sibling, 0)
    prefix += tl.where(behind, sibling, 0.0)
    suffix += tl.where(behind, 0.0, sibling)
    return prefix, suffix


@triton.jit
def unit_lower_inverse(lower, rows, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 of a strictly lower triangular tile [C, C], level by level of the same tree.

    With A and D the inverted halves of a diagonal block and B the block below the diagonal, the
    inverse of the whole block is [[A, 0], [−D B A, D]]. All blocks of a level are handled by two
    products of full tiles. Like substitution by blocks, and unlike powers of `lower`, this forms no
    intermediate that is larger than the result.
    """
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0)
    inverse -= tl.where(separated_below(rows, 0), lower, 0.0)
    for level in range(1, LEVELS):
        below = tl.where(separated_below(rows, level), lower, 0.0)
        below = tl.dot(below, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, below, input_precision=PRECISION)
    return inverse
