"""How sequences are laid out in chunks, and which ones are split."""

import pytest
import torch

from kernels.sequences import num_segments, sequences


def test_a_batch_has_its_chunks_row_by_row() -> None:
    chunks = sequences(3, 130, 64, None)
    assert (chunks.count, chunks.num_chunks, chunks.mean_chunks) == (3, 9, 3)
    assert not chunks.is_packed


def test_every_chunk_slot_of_a_packing_names_its_sequence() -> None:
    chunks = sequences(1, 200, 64, torch.tensor([0, 64, 70, 200]))
    assert chunks.chunk_offsets is not None
    assert chunks.chunk_owners is not None
    assert chunks.chunk_offsets.tolist() == [0, 1, 2, 5, 5]
    # One slot is left over; it names the sequence past the last.
    assert chunks.chunk_owners.tolist() == [0, 1, 2, 2, 2, 3]


@pytest.mark.parametrize(
    ("programs", "chunks", "wanted"), [(128, 64, 1), (16, 512, 8), (16, 24, 1), (1, 512, 64)]
)
def test_only_what_leaves_the_device_idle_is_split(programs: int, chunks: int, wanted: int) -> None:
    assert num_segments(programs, chunks, 132) == wanted
