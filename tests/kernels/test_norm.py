"""The normalisations equal their formulas, and gradients their numerical derivatives."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernels import l2_norm, rms_norm, rms_norm_gated
from tests.kernels.rules import generator, normal
from tests.kernels.tolerances import assert_close

F32, F64 = torch.float32, torch.float64


def test_rms_norm_by_hand() -> None:
    x = torch.tensor([[3.0, -4.0, 0.0, 0.0]], dtype=F64)  # mean square 25 / 4
    gain = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)
    expected = torch.tensor([[1.2, -3.2, 0.0, 0.0]], dtype=F64)
    torch.testing.assert_close(rms_norm(x, gain, eps=0.0), expected)
    torch.testing.assert_close(rms_norm(x, gain, eps=18.75), expected / 2)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_the_gate_multiplies_after_the_normalisation(activation: str) -> None:
    x, gate, gain = (normal(shape, generator(0)) for shape in ((3, 2, 8), (3, 2, 8), (8,)))
    factor = gate.sigmoid() * (gate if activation == "silu" else 1)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain * factor
    actual = rms_norm_gated(x, gate, gain, activation=activation)
    assert_close({"out": actual}, {"out": expected}, F64)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_derivatives_equal_finite_differences(activation: str) -> None:
    x, gate, gain = (
        normal(shape, generator(i)).requires_grad_()
        for i, shape in enumerate(((2, 5), (2, 5), (5,)))
    )
    assert torch.autograd.gradcheck(rms_norm, [x, gain])
    assert torch.autograd.gradcheck(
        lambda *a: rms_norm_gated(*a, activation=activation), [x, gate, gain]
    )
    assert torch.autograd.gradcheck(l2_norm, [x])


def test_l2_norm_gives_unit_length_and_zero_for_zero() -> None:
    x = 100 * normal((4, 8), generator(1))
    torch.testing.assert_close(
        l2_norm(x).square().sum(-1), torch.ones(4, dtype=F64), rtol=1e-9, atol=0
    )
    zero = torch.zeros(2, 8, dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(l2_norm(zero).sum(), zero)
    assert not l2_norm(zero).any()
    torch.testing.assert_close(gradient, torch.full_like(zero, 1e3))  # 1 / sqrt(eps)


def test_bfloat16_is_rounded_once() -> None:
    x, gate, gain = (
        normal(shape, generator(i)).bfloat16()
        for i, shape in enumerate(((40, 64), (40, 64), (64,)))
    )
    cases: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "rms_norm": lambda x, z, w: rms_norm(x, w),
        "rms_norm_gated": lambda x, z, w: rms_norm_gated(x, z, w, activation="silu"),
        "l2_norm": lambda x, z, w: l2_norm(x),
    }
    for name, norm in cases.items():
        out = norm(x, gate, gain)
        assert out.dtype == torch.bfloat16
        expected = norm(x.double(), gate.double(), gain.double())
        assert_close({name: out}, {name: expected}, torch.bfloat16)


def test_what_does_not_fit_is_refused() -> None:
    x, gain = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(
        ValueError, match=r"weight has shape \[2\]; expected one gain for each of t"
    ):
        rms_norm(x, gain[:2])
    with pytest.raises(ValueError, match=r"gate has shape \[2, 4\]; expected x's \[2, 8\]"):
        rms_norm_gated(x, x[:, :4], gain, activation="silu")
    with pytest.raises(ValueError, match="activation='relu' is none of silu, sigmoid"):
        rms_norm_gated(x, x, gain, activation="relu")
