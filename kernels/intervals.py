"""Decay per channel inside a chunk: the chunk as a binary tree of intervals.

The decay between two tokens j < i of a chunk is exp(Σ_{j<t≤i} log_decay_t), one number for every
channel. Written as exp(G_i − G_j) with the running sum G it does not factor into something that a
matrix product can use: exp(−G_j) overflows as soon as a chunk forgets much.

Split the chunk in the middle instead, and each half again, down to single tokens. Any pair j < i is
separated by exactly one of these cuts, the one at the highest bit in which i and j differ, and

    Σ_{j<t≤i} log_decay_t  =  Σ from the token after j to the cut  +  Σ from the cut to i

Both sums run over non-positive numbers, so both exponentials lie in [0, 1], and both are additions
alone: nothing is ever subtracted, so that neither a decay of e^-30 a token nor one of exactly 1
loses digits. With C = 64 there are six levels of cuts. At each, a row stands on one side only:
one exponential per row, channel and level, and one matrix product for all pairs of the level.

Which tokens a row's sum at a level holds is a 0/1 matrix (`interval_masks`). The sums are its
product with the log decays; the gradient of the log decays is the product of its transpose with the
gradient of the sums. Tensor cores do both.

Where a chunk forgets little, no tree is needed: relative to half of the chunk's whole decay every
row has a factor 2^D and its inverse, and the product of the query's factor and the key's inverse is
right for all pairs j < i, as long as neither factor leaves the range of floats. A tile of channels
of which every one keeps at least 2^`ONE_CUT_TOTALS` goes that way, with one product for all pairs;
the others go through the tree. Which way a tile goes depends on its own decays alone.

Chunk-wise kernels elsewhere (fla, FlashKDA) anchor blocks of 16 rows, which needs a bounded decay
or a pairwise loop on the diagonal blocks.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.blocks import LOG2_E
from kernels.tiles import CHUNK

_LOG2_E = tl.constexpr(LOG2_E)

LEVELS = CHUNK.bit_length() - 1
"""Levels of cuts in a chunk, log2 of `CHUNK`."""


ONE_CUT_TOTALS = {torch.bfloat16: -120.0, torch.float16: -12.0, torch.float32: -16.0}
"""Least base-2 log decay of a whole chunk for which one factor a row serves.

A factor reaches the square root of the inverse decay: 2^60 in bfloat16, whose range is that of
float32, where the decay itself is still a normal number. float16 would lose digits
below 2^-14. In float32 sums of 16 are wrong by 1e-6, which is what is wanted there.
"""


@lru_cache(maxsize=16)
def interval_masks(device: torch.device) -> Tensor:
    """Which tokens each row's sum holds: bfloat16 0/1 [2, LEVELS + 2, C, C].

    The first half is [level, row, token], the second its transpose [level, token, row]. Behind a
    cut a row's sum holds the row itself and those between it and the cut, before a cut those after
    the row. The last two levels are for the chunk as a whole: all tokens up to the row, and all
    after it. Equal on every call, so one copy is kept for each device.
    """
    token = torch.arange(CHUNK, device=device)
    until = token[None, :] <= token[:, None]
    masks = []
    for level in range(LEVELS):
        half = token >> level
        behind = (half & 1 == 1)[:, None]
        masks.append(torch.where(behind, until, ~until) & (half[:, None] == half[None, :]))
    stacked = torch.stack([*masks, until, ~until])
    return torch.stack([stacked, stacked.mT]).to(torch.bfloat16)


@triton.jit
def is_later(rows, level):
    """Whether each row stands behind the cut of its interval of 2·2^level rows."""
    return (rows >> level) & 1 == 1


# The masks below compare a number made of the row with one made of the column. What is left for
# each pair is one comparison; the compiler would otherwise keep tiles of row-column terms alive.


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
def base_2(b_log_decay):
    """Natural log decays in float32 and base 2, in which the hardware exponentiates."""
    return b_log_decay.to(tl.float32) * _LOG2_E


@triton.jit
def split(b_x):
    """A float32 tile as a sum of two in bfloat16, which the matrix units take.

    They hold 16 bits of the fraction: a decay of e^-20 is right to 1e-4, one of e^-1 to 4e-6, where
    the bfloat16 operands around it are right to 2e-3.
    """
    b_high = b_x.to(tl.bfloat16)
    return b_high, (b_x - b_high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def interval_sums(b_mask, b_x, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """What the rows of a 0/1 mask [C, C] sum up of `b_x` [C, BK]: float32, to 16 bits of b_x."""
    if EXACT:
        b_sum = tl.dot(b_mask.to(tl.float32), b_x, input_precision=PRECISION)
    else:
        b_high, b_low = split(b_x)
        b_sum = tl.dot(b_mask, b_high)
        b_sum = tl.dot(b_mask, b_low, b_sum)
    return b_sum


@triton.jit
def add_interval_grads(b_dg, b_mask_t, b_dsum, EXACT: tl.constexpr, PRECISION: tl.constexpr):
    """`b_dg` and what log decays get from sums with the gradient `b_dsum`; a transposed mask."""
    if EXACT:
        b_dg = tl.dot(b_mask_t.to(tl.float32), b_dsum, b_dg, input_precision=PRECISION)
    else:
        b_dg = tl.dot(b_mask_t, b_dsum.to(tl.bfloat16), b_dg)
    return b_dg


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
