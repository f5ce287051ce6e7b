"""Device functions that kernels share, each beside its twin in PyTorch, in the interpreter.

They need a process with `TRITON_INTERPRET=1`; `test_interpreter.py` starts one.
"""

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

pytestmark = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")


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


def test_summed_decay_equals_its_twin() -> None:
    decay = -30 * torch.rand(64, generator=torch.Generator().manual_seed(0))
    out = torch.empty(64, dtype=torch.float64)
    decay_kernel[(1,)](decay, out, 64)
    torch.testing.assert_close(out, summed_decay_torch(decay[None], 64)[0])
    assert abs(float(out[-1]) / LOG2_E - float(decay.double().sum())) < 1e-9


def test_elu1_equals_its_twin() -> None:
    x = torch.linspace(-100, 100, 64)
    out = torch.empty(64)
    elu1_kernel[(1,)](x, out, 64)
    torch.testing.assert_close(out, elu1_torch(x))
