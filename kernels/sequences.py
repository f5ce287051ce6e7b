"""How the rows of a call fall into sequences, chunks and segments, for launching kernels.

A batch `[B, T]` and a packing by `cu_seqlens` look alike to a kernel: rows of a flattened token
axis, sequences of consecutive rows, chunks of `chunk` tokens that never span two sequences. All of
a packing's tables are made on its device, so that a launch never waits for the GPU.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one call and their chunks.

    Attributes:
        count: number of sequences.
        length: tokens of each sequence of a batch; all tokens of a packing.
        chunk: tokens in a chunk.
        num_chunks: chunk slots over all sequences; a packing has at most that many chunks.
        cu_seqlens: boundaries `[count + 1]` of a packing.
        chunk_offsets: index of each packed sequence's first chunk, `[count + 2]`, the last two
            being the number of chunks, so that a slot behind them can be looked up as well.
        chunk_owners: sequence of each chunk slot, `[num_chunks]`; `count` behind the last chunk.
    """

    count: int
    length: int
    chunk: int
    num_chunks: int
    cu_seqlens: Tensor | None = None
    chunk_offsets: Tensor | None = None
    chunk_owners: Tensor | None = None

    @property
    def is_packed(self) -> bool:
        """Whether several sequences share one row of the batch."""
        return self.cu_seqlens is not None

    @property
    def mean_chunks(self) -> int:
        """Chunks of a sequence of average length, rounded up."""
        return -(-self.num_chunks // self.count)


def num_chunk_slots(batch: int, length: int, chunk: int, cu_seqlens: Tensor | None) -> int:
    """Chunks of a batch, or the most that a packing of `length` tokens can have."""
    if cu_seqlens is None:
        return batch * (-(-length // chunk))
    # Each sequence adds at most one chunk that is not full.
    return length // chunk + cu_seqlens.shape[0] - 1


def sequences(batch: int, length: int, chunk: int, cu_seqlens: Tensor | None) -> Sequences:
    """The sequences of a call with `batch` rows of `length` tokens."""
    slots = num_chunk_slots(batch, length, chunk, cu_seqlens)
    if cu_seqlens is None:
        return Sequences(batch, length, chunk, slots)
    chunks = (cu_seqlens.diff() + chunk - 1) // chunk
    ends = chunks.cumsum(0)
    offsets = torch.cat([torch.zeros_like(ends[:1]), ends, ends[-1:]]).to(torch.int32)
    slot = torch.arange(slots, device=cu_seqlens.device)
    owners = torch.searchsorted(ends, slot, right=True).to(torch.int32)
    return Sequences(
        cu_seqlens.shape[0] - 1, length, chunk, slots, cu_seqlens.contiguous(), offsets, owners
    )


def num_segments(programs: int, mean_chunks: int, processors: int) -> int:
    """Segments to split each sequence into, so that a scan fills the device; 1 where it does not.

    A scan runs one program per sequence, head and value block, each a chain over all chunks. Where
    the programs would leave most of the device idle, the chain is cut: a pass over every segment
    from an empty memory, a combination of the segments, and the scan itself from the right start.

    The extra pass reads nearly as much as the scan, so less than four segments gain nothing
    (assumed from the count of products, not measured); a segment keeps at least 8 chunks, to be
    worth its start.

    Args:
        programs: programs of the scan without a split.
        mean_chunks: chunks of a sequence of average length.
        processors: multiprocessors of the device.
    """
    segments = 1
    while programs * segments * 2 <= processors and mean_chunks >= segments * 2 * 8:
        segments *= 2
    return segments if segments >= 4 else 1
