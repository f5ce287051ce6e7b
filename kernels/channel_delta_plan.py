"""How a call of the channel-decay delta rules is cut into chunks, segments and tiles: host side.

A scan over chunks has one program per sequence, value head and tile of value columns. Where those
are too few to fill a GPU (one long sequence), a sequence is cut into segments that are scanned at
the same time, after a pass that finds what each does to the memory entering it.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kernels.intervals import CHUNK

SCAN_PROGRAMS = 128
"""Programs that a scan should have at least: about one for each multiprocessor of an H200."""

SCAN_PROGRAMS_ENOUGH = 96
"""Programs from which a scan isn't cut: the extra pass costs more than idle multiprocessors."""

MIN_SEGMENT_CHUNKS = 8
"""Chunks below which a segment isn't cut further: its summary must stay small beside its scan."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile widths, warps and pipeline stages of the kernels for one dtype and pair of head dims.

    Attributes:
        key: channels of a tile in the token-parallel kernels.
        value: value columns of a tile, in all kernels.
        scan_warps: warps of the scans.
        scan_stages: chunks whose loads are in flight in a scan.
        token_warps: warps of the token-parallel kernels.
        precision: of products of float32 tiles; the tree's inverse has such tiles for all dtypes.
    """

    key: int
    value: int
    scan_warps: int
    scan_stages: int
    token_warps: int
    precision: str


def tiles(dtype: torch.dtype, key_dim: int, value_dim: int) -> Tiles:
    """Tiles for inputs of `dtype` on Hopper.

    A value tile is 64 wide even for smaller heads: with 32 columns and 4 warps, Triton 3.6 builds
    kernels that fail with an illegal memory access. Tiles of 32 channels leave the most registers,
    except that for heads of at most 32 channels the assembler of Triton 3.6 then loses a descriptor
    (`kernels.uniform_registers`); 64 channels, half of them masked, are clean.
    """
    if dtype == torch.float32:
        return Tiles(min(32, power_of_two(key_dim)), 64, 8, 1, 8, "tf32x3")
    if key_dim <= 64:
        return Tiles(32 if key_dim > 32 else 64, 64, 4, 2, 4, "tf32")
    if key_dim <= 128:
        return Tiles(32, 64, 4, 2, 4, "tf32")
    return Tiles(32, 64, 8, 1, 4, "tf32")


def power_of_two(size: int) -> int:
    """The smallest power of two that holds `size` and the least side of a matrix product, 16."""
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Plan:
    """Chunks and segments of one call.

    Attributes:
        sequences: number of sequences, the batch rows or the packed ones.
        chunks: upper bound of the number of chunks, from the shapes alone.
        segments: upper bound of the number of segments, likewise.
        segments_per_row: segments of each batch row; 1 where no sequence is cut.
        segment_chunks: chunks of a segment.
    """

    sequences: int
    chunks: int
    segments: int
    segments_per_row: int
    segment_chunks: int

    @property
    def is_cut(self) -> bool:
        """Whether sequences are cut into segments."""
        return self.segments > self.sequences


def plan(batch: int, length: int, programs_per_sequence: int, packed: int | None) -> Plan:
    """The plan for `batch` rows of `length` tokens, or for `packed` sequences in one row.

    It depends on shapes alone, so that a compiler which knows only those sees the same sizes.

    Args:
        batch: batch rows.
        length: tokens of a row.
        programs_per_sequence: value heads × tiles of value columns.
        packed: number of packed sequences, or None.
    """
    sequences = batch if packed is None else packed
    per_row = -(-length // CHUNK)
    chunks = batch * per_row if packed is None else length // CHUNK + packed
    programs = sequences * programs_per_sequence
    if programs >= SCAN_PROGRAMS_ENOUGH:
        return Plan(sequences, chunks, sequences, 1, max(chunks, 1))
    wanted = -(-SCAN_PROGRAMS // programs_per_sequence)
    segment_chunks = max(MIN_SEGMENT_CHUNKS, -(-chunks // wanted))
    if packed is not None:
        segments = chunks // segment_chunks + packed
        return Plan(sequences, chunks, segments, 1, segment_chunks)
    cuts = -(-per_row // segment_chunks)
    return Plan(sequences, chunks, batch * cuts, cuts, segment_chunks)


@dataclass(frozen=True, slots=True)
class Tables:
    """Where the chunks and segments of packed sequences lie; None for dense calls.

    Attributes:
        chunks: int64 [chunks, 2], first token and end.
        segments: int64 [segments, 3], first token, end and first chunk.
        sequences: int64 [sequences + 1], first segment of each sequence.
    """

    chunks: Tensor | None
    segments: Tensor | None
    sequences: Tensor | None


def tables(cu_seqlens: Tensor | None, plan: Plan) -> Tables:
    """The tables of packed sequences. Reads the boundaries, for which the host waits.

    Chunks and segments up to the plan's bounds that no sequence needs are empty ones at token 0.
    """
    if cu_seqlens is None:
        return Tables(None, None, None)
    chunks: list[tuple[int, int]] = []
    segments: list[tuple[int, int, int]] = []
    sequences = [0]
    bounds = cu_seqlens.tolist()
    span = plan.segment_chunks * CHUNK if plan.is_cut else max(bounds[-1], 1)
    for start, end in pairwise(bounds):
        for first in range(start, end, span):
            stop = min(first + span, end)
            segments.append((first, stop, len(chunks)))
            chunks += [(t, min(t + CHUNK, stop)) for t in range(first, stop, CHUNK)]
        sequences.append(len(segments))
    chunks += [(0, 0)] * (plan.chunks - len(chunks))
    segments += [(0, 0, 0)] * (plan.segments - len(segments))
    device = cu_seqlens.device
    return Tables(
        torch.tensor(chunks, dtype=torch.int64, device=device),
        torch.tensor(segments, dtype=torch.int64, device=device),
        torch.tensor(sequences, dtype=torch.int64, device=device),
    )
