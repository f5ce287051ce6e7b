"""Triton device functions that find the tokens of a chunk or of a segment of chunks.

Tokens of all batch rows are counted through: token t of batch row b is b·T + t, and a tensor
[B, T, H, D] is read as [B·T, H, D]. A chunk is at most C tokens of one sequence. Dense calls find
their chunks by arithmetic; packed calls read a table, since sequences have lengths of their own.

Where a tensor is larger than 2^31 elements, offsets need 64 bits; inside a tile they don't. So a
kernel adds the 64-bit offset of a tile's first element to the pointer, one number for the whole
tile, and addresses the tile's elements by 32-bit offsets from there, in half the registers.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
"""1 / ln 2: log decays are kept in base 2, the base in which the hardware exponentiates."""


@triton.jit
def chunk_rows(i_chunk, chunk_table, T, C: tl.constexpr, PACKED: tl.constexpr):
    """First token of a chunk and the token after its last, both int64.

    Args:
        i_chunk: number of the chunk, int64.
        chunk_table: int64 [chunks, 2], first token and end; read where PACKED.
        T: tokens in a batch row.
        C: tokens in a full chunk.
        PACKED: whether `chunk_table` describes the chunks.
    """
    if PACKED:
        start = tl.load(chunk_table + i_chunk * 2)
        end = tl.load(chunk_table + i_chunk * 2 + 1)
    else:
        per_row = tl.cdiv(T, C)
        i_b = i_chunk // per_row
        start = i_b * T + (i_chunk % per_row) * C
        end = tl.minimum(start + C, (i_b + 1) * T)
    return start, end


@triton.jit
def segment_rows(
    i_segment, segment_table, T, SEGMENTS, SEGMENT_CHUNKS, C: tl.constexpr, PACKED: tl.constexpr
):
    """First token of a segment, the token after its last, and its first chunk, all int64.

    Args:
        i_segment: number of the segment, int64; each batch row has SEGMENTS of them.
        segment_table: int64 [segments, 3]; read where PACKED.
        T: tokens in a batch row.
        SEGMENTS: segments of a batch row.
        SEGMENT_CHUNKS: chunks of a segment; the last one of a row may have fewer.
        C: tokens in a full chunk.
        PACKED: whether `segment_table` describes the segments.
    """
    if PACKED:
        start = tl.load(segment_table + i_segment * 3)
        end = tl.load(segment_table + i_segment * 3 + 1)
        chunk = tl.load(segment_table + i_segment * 3 + 2)
    else:
        i_b = i_segment // SEGMENTS
        first = (i_segment % SEGMENTS) * SEGMENT_CHUNKS
        start = i_b * T + first * C
        end = tl.minimum(start + SEGMENT_CHUNKS * C, (i_b + 1) * T)
        chunk = i_b * tl.cdiv(T, C) + first
    return start, end, chunk
