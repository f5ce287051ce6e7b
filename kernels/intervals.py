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


@triton.jit
def is_later(rows, HALF: tl.constexpr):
    """Whether each row stands behind the cut of its interval of 2·HALF rows."""
    return (rows // HALF) % 2 == 1


@triton.jit
def separated(rows, cols, HALF: tl.constexpr):
    """Which (row, column) pairs the cuts of this level separate, the row behind the cut."""
    same = rows[:, None] // (2 * HALF) == cols[None, :] // (2 * HALF)
    return same & is_later(rows, HALF)[:, None] & (is_later(cols, HALF)[None, :] == 0)


@triton.jit
def single_rows(log_decay):
    """(prefix, suffix, total) of the intervals of one row each, in base 2."""
    prefix = log_decay.to(tl.float32) * LOG2_E
    return prefix, tl.zeros_like(prefix), prefix


@triton.jit
def to_cut(prefix, suffix, later):
    """exp of the decay between each row and the cut of its interval, in [0, 1]."""
    return tl.math.exp2(tl.where(later[:, None], prefix, suffix))


@triton.jit
def join(prefix, suffix, total, later, HALF: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """(prefix, suffix, total) of the intervals of 2·HALF rows from those of HALF rows.

    `total` holds the sum over a row's interval in every row of it.
    """
    pairs: tl.constexpr = C // (2 * HALF)
    tile = tl.reshape(total, (pairs, 2, HALF, BK))
    half = tl.arange(0, 2)[None, :, None, None]
    # each half of an interval holds one number, so adding zeros to it moves it without rounding
    earlier = tl.sum(tl.where(half == 0, tile, 0.0), axis=1)
    behind = tl.sum(tl.where(half == 1, tile, 0.0), axis=1)
    earlier = tl.broadcast_to(tl.expand_dims(earlier, 1), (pairs, 2, HALF, BK))
    behind = tl.broadcast_to(tl.expand_dims(behind, 1), (pairs, 2, HALF, BK))
    earlier = tl.reshape(earlier, (C, BK))
    behind = tl.reshape(behind, (C, BK))
    prefix += tl.where(later[:, None], earlier, 0.0)
    suffix += tl.where(later[:, None], 0.0, behind)
    return prefix, suffix, earlier + behind


@triton.jit
def unit_lower_inverse(lower, rows, C: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangular tile [C, C], level by level of the same tree.

    With A and D the inverted halves of a diagonal block and B the block below the diagonal, the
    inverse of the whole block is [[A, 0], [−D B A, D]]. All blocks of a level are handled by two
    products of full tiles. Like substitution by blocks, and unlike powers of `lower`, this forms no
    intermediate that is larger than the result.
    """
    first = tl.where(separated(rows, rows, 1), lower, 0.0)
    inverse = tl.where(rows[:, None] == rows[None, :], 1.0, 0.0) - first
    for level in tl.static_range(1, LEVELS):
        below = tl.where(separated(rows, rows, 2**level), lower, 0.0)
        below = tl.dot(below, inverse, input_precision=PRECISION)
        inverse -= tl.dot(inverse, below, input_precision=PRECISION)
    return inverse
