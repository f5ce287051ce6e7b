"""The short convolution equals torch's depthwise one, step by step and packed."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import short_conv, short_conv_step
from tests.kernels.rules import generator, normal
from tests.kernels.tolerances import assert_close

F32, F64 = torch.float32, torch.float64


def draw(B: int = 2, T: int = 9, C: int = 3, W: int = 4, seed: int = 0) -> tuple[Tensor, ...]:
    """x, weight and window."""
    source = generator(seed)
    return normal((B, T, C), source), normal((C, W), source), normal((B, W - 1, C), source)


def by_torch(x: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    padded = torch.cat([window, x], 1).mT
    return functional.silu(functional.conv1d(padded, weight[:, None], groups=len(weight))).mT


@pytest.mark.parametrize("W", [1, 2, 4])
@pytest.mark.parametrize("T", [1, 2, 9])
def test_it_equals_the_depthwise_convolution_with_all_gradients(T: int, W: int) -> None:
    names = ("x", "weight", "window") if W > 1 else ("x", "weight")
    expected_leaves = [x.requires_grad_() for x in draw(T=T, W=W)]
    expected = by_torch(*expected_leaves)
    actual_leaves = [x.detach().float().requires_grad_() for x in expected_leaves]
    x, weight, window = actual_leaves
    actual, _ = short_conv(x, weight, window=window)
    cotangent = normal(tuple(expected.shape), generator(1))
    assert_close({"out": actual}, {"out": expected}, F32)
    pairs = zip(
        names,
        torch.autograd.grad(actual, actual_leaves[: len(names)], cotangent.float()),
        torch.autograd.grad(expected, expected_leaves[: len(names)], cotangent),
        strict=True,
    )
    for name, left, right in pairs:
        assert_close({name: left}, {name: right}, F32)


def test_derivatives_equal_finite_differences() -> None:
    x, weight, window = (x.requires_grad_() for x in draw(T=5))
    assert torch.autograd.gradcheck(
        lambda *a: short_conv(a[0], a[1], window=a[2]), [x, weight, window]
    )


def test_no_window_is_a_window_of_zeros() -> None:
    x, weight, window = draw()
    zero = short_conv(x, weight, window=torch.zeros_like(window))
    for actual, expected in zip(short_conv(x, weight), zero, strict=True):
        assert torch.equal(actual, expected)


def test_the_last_tap_meets_the_token_itself() -> None:
    x = torch.zeros(1, 5, 1, dtype=F64)
    x[0, 2] = 1.0
    weight = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=F64)
    expected = functional.silu(torch.tensor([0.0, 0.0, 4.0, 3.0, 2.0], dtype=F64))
    assert torch.equal(short_conv(x, weight)[0][0, :, 0], expected)


@pytest.mark.parametrize("split", [1, 2, 6])
def test_the_window_joins_two_halves(split: int) -> None:
    x, weight, window = draw()
    whole, last = short_conv(x, weight, window=window)
    first, between = short_conv(x[:, :split], weight, window=window)
    second, end = short_conv(x[:, split:], weight, window=between)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    assert torch.equal(end, last)


def test_steps_equal_the_whole() -> None:
    x, weight, window = draw()
    whole, last = short_conv(x, weight, window=window)
    outs = []
    for t in range(x.shape[1]):
        out, window = short_conv_step(x[:, t], weight, window=window)
        outs.append(out)
    torch.testing.assert_close(torch.stack(outs, 1), whole)
    assert torch.equal(window, last)


def test_packed_sequences_equal_each_alone_with_gradients() -> None:
    x, weight, _ = (y.requires_grad_() for y in draw(B=1, T=12))
    _, _, window = (y.requires_grad_() for y in draw(B=4, T=1, seed=1))
    cu_seqlens = torch.tensor([0, 1, 4, 6, 12])
    out, last = short_conv(x, weight, window=window, cu_seqlens=cu_seqlens)
    parts = [
        short_conv(x[:, start:end], weight, window=window[i : i + 1])
        for i, (start, end) in enumerate([(0, 1), (1, 4), (4, 6), (6, 12)])
    ]
    expected, ends = (
        torch.cat(y, dim) for y, dim in zip(zip(*parts, strict=True), (1, 0), strict=True)
    )
    assert_close({"out": out, "last": last}, {"out": expected, "last": ends}, F64)
    actual, alone = (
        torch.autograd.grad(y.square().sum() + z.sum(), [x, weight, window])
        for y, z in ((out, last), (expected, ends))
    )
    for left, right in zip(actual, alone, strict=True):
        assert_close({"d": left}, {"d": right}, F64)


def test_a_packed_sequence_does_not_see_its_neighbour() -> None:
    x, weight, _ = draw(B=1, T=12)
    changed = x.clone()
    changed[:, :5] = 7.0
    cu_seqlens = torch.tensor([0, 5, 12])
    before, after = (short_conv(y, weight, cu_seqlens=cu_seqlens)[0] for y in (x, changed))
    assert torch.equal(before[:, 5:], after[:, 5:])
    assert not torch.equal(before[:, 5:], short_conv(x, weight)[0][:, 5:])


def test_gradients_that_are_not_contiguous() -> None:
    x, weight, _ = (y.requires_grad_() for y in draw())
    out, _ = short_conv(x, weight)
    expanded = torch.autograd.grad(out.sum(), [x, weight], retain_graph=True)
    plain = torch.autograd.grad(out, [x, weight], torch.ones_like(out), retain_graph=True)
    strided = torch.autograd.grad(out, [x, weight], torch.ones_like(out.mT).mT)
    for left, middle, right in zip(expanded, plain, strided, strict=True):
        assert torch.equal(left, middle)
        assert torch.equal(right, middle)


def test_bfloat16_is_rounded_once() -> None:
    x, weight, window = (y.bfloat16() for y in draw(T=50, C=16))
    out, last = short_conv(x, weight, window=window)
    expected = by_torch(x.double(), weight.double(), window.double())
    assert out.dtype == last.dtype == torch.bfloat16
    assert_close({"out": out}, {"out": expected}, torch.bfloat16)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, window = draw()
    with pytest.raises(ValueError, match=r"x has shape \[9, 3\]; expected \[B, T, C\]"):
        short_conv(x[0], weight)
    with pytest.raises(ValueError, match=r"x has shape \[2, 9, 3\]; expected \[B, C\]"):
        short_conv_step(x, weight, window=window)
    with pytest.raises(ValueError, match=r"weight has shape .* each of the 3 channels of x"):
        short_conv(x, weight[:2])
    with pytest.raises(ValueError, match=r"window has shape \[2, 2, 3\] .*; expected \[2, 3, 3\]"):
        short_conv(x, weight, window=window[:, 1:])
    with pytest.raises(ValueError, match=r"dtype torch.float32; expected \[2, 3, 3\] and torch.fl"):
        short_conv(x, weight, window=window.float())
    with pytest.raises(ValueError, match="cu_seqlens with a batch of 2"):
        short_conv(x, weight, cu_seqlens=torch.tensor([0, 9]))
