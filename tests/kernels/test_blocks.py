"""Device functions that kernels share, each beside its twin in PyTorch, in the interpreter."""

import os
import subprocess
import sys

import pytest
import torch
import triton
import triton.language as tl

from kernels.blocks import (
    LOG2_E,
    diagonal_blocks,
    elu1,
    elu1_torch,
    summed_decay,
    summed_decay_torch,
    unit_lower_inverse,
    unit_lower_inverse_torch,
)
from kernels.launch import is_interpreted
from kernels.sequences import num_segments, sequences

interpreted = pytest.mark.skipif(not is_interpreted(), reason="runs in an interpreting process")


@pytest.mark.skipif(is_interpreted(), reason="is that process")
def test_the_device_functions_pass_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-p", "no:cacheprovider"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@triton.jit
def inverse_kernel(x, x_t, out, C: tl.constexpr):
    o_c = tl.arange(0, C)
    o_cc = o_c[:, None] * C + o_c[None, :]
    b_blocks_t = diagonal_blocks(tl.load(x_t + o_cc), C)
    tl.store(out + o_cc, unit_lower_inverse(tl.load(x + o_cc), b_blocks_t, C, "tf32x3"))


@triton.jit
def decay_kernel(x, out, C: tl.constexpr):
    o_c = tl.arange(0, C)
    tl.store(out + o_c, summed_decay(tl.load(x + o_c)))


@triton.jit
def elu1_kernel(x, out, C: tl.constexpr):
    o_c = tl.arange(0, C)
    tl.store(out + o_c, elu1(tl.load(x + o_c)))


@interpreted
@pytest.mark.parametrize("C", [16, 32, 64])
@pytest.mark.parametrize("keys", ["random", "equal"])
def test_the_inverse_equals_its_twin(C: int, keys: str) -> None:
    source = torch.Generator().manual_seed(C)
    directions = torch.randn(C if keys == "random" else 1, 8, generator=source).expand(C, -1)
    directions = torch.nn.functional.normalize(directions, dim=-1)
    # Equal keys and strengths near 2 make the powers of the triangle grow like binomials.
    strengths = 2 * torch.rand(C, 1, generator=source)
    lower = strengths * (directions @ directions.T)
    out = torch.empty(C, C)
    inverse_kernel[(1,)](lower, lower.T.contiguous(), out, C)
    wanted = unit_lower_inverse_torch(lower.double())
    assert (out - wanted).norm() <= 3e-6 * wanted.norm()


@interpreted
def test_summed_decay_equals_its_twin() -> None:
    decay = -30 * torch.rand(64, generator=torch.Generator().manual_seed(0))
    out = torch.empty(64, dtype=torch.float64)
    decay_kernel[(1,)](decay, out, 64)
    torch.testing.assert_close(out, summed_decay_torch(decay[None], 64)[0])
    assert abs(float(out[-1]) / LOG2_E - float(decay.double().sum())) < 1e-9


@interpreted
def test_elu1_equals_its_twin() -> None:
    x = torch.linspace(-100, 100, 64)
    out = torch.empty(64)
    elu1_kernel[(1,)](x, out, 64)
    torch.testing.assert_close(out, elu1_torch(x))


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
