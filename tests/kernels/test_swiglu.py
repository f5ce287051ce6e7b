"""The gated activation beside its equation in float64."""

import pytest
import torch
from torch.nn import functional

from kernels import swiglu


@pytest.mark.parametrize("shape", [(6,), (3, 8), (2, 5, 14)])
def test_values_and_gradients_equal_the_equation(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    gate, up = leaf.chunk(2, -1)
    expected = functional.silu(gate) * up
    weights = torch.randn(
        expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    (d_expected,) = torch.autograd.grad((expected * weights).sum(), leaf)
    own = x.clone().requires_grad_()
    out = swiglu(own)
    (d_own,) = torch.autograd.grad((out * weights).sum(), own)
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=0)
    torch.testing.assert_close(d_own, d_expected, rtol=1e-13, atol=1e-15)


def test_a_strided_input_and_gradient_are_read_in_place() -> None:
    x = torch.randn(4, 3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    strided = x.transpose(0, 1).requires_grad_()
    assert torch.autograd.gradcheck(lambda y: swiglu(y).transpose(0, 1), strided)


def test_the_result_keeps_the_dtype() -> None:
    assert swiglu(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_an_odd_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="5 channels"):
        swiglu(torch.ones(2, 5))


def test_a_compiled_call_is_one_graph_with_the_same_gradient() -> None:
    x = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    results = []
    for call in (swiglu, torch.compile(swiglu, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        out = call(leaf)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaf)))
    torch._dynamo.reset()
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(traced, eager)
