"""The sliced cross-entropy of a linear head equals torch's over all logits."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels import cross_entropy, linear_cross_entropy
from tests.kernels.rules import generator, normal
from tests.kernels.tolerances import assert_close

F32, F64 = torch.float32, torch.float64


def draw(N: int = 23, D: int = 8, vocab: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    source = generator(0)
    targets = torch.randint(0, vocab, (N,), generator=source)
    return normal((N, D), source), normal((vocab, D), source), targets


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("slice_rows", [None, 1, 7, 23, 50])
def test_it_equals_the_loss_over_all_logits_with_all_gradients(
    slice_rows: int | None, reduction: str
) -> None:
    x, weight, targets = draw()
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    expected = functional.cross_entropy(x @ weight.T, targets, reduction=reduction)
    cotangent = normal(tuple(expected.shape), generator(1))
    expected_gradients = torch.autograd.grad(expected, leaves, cotangent)

    single = [leaf.detach().float().requires_grad_() for leaf in leaves]
    actual = linear_cross_entropy(
        single[0], single[1], targets, reduction=reduction, slice_rows=slice_rows
    )
    gradients = torch.autograd.grad(actual, single, cotangent.float())
    assert_close({"loss": actual}, {"loss": expected}, F32)
    for name, left, right in zip("xw", gradients, expected_gradients, strict=True):
        assert_close({name: left}, {name: right}, F32)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_derivatives_equal_finite_differences(reduction: str) -> None:
    x, weight, targets = draw(N=5, D=3, vocab=7)
    assert torch.autograd.gradcheck(
        lambda x, w: linear_cross_entropy(x, w, targets, reduction=reduction, slice_rows=2),
        [x.requires_grad_(), weight.requires_grad_()],
    )


def test_a_uniform_head_costs_the_log_of_the_vocabulary() -> None:
    x, weight, targets = draw()
    loss = linear_cross_entropy(x, torch.zeros_like(weight), targets)
    assert loss.item() == pytest.approx(torch.tensor(37.0, dtype=F64).log().item(), abs=1e-14)


def test_large_logits_stay_finite() -> None:
    x, weight, targets = (y.float() if y.is_floating_point() else y for y in draw())
    x, weight = (1e3 * x).requires_grad_(), (1e3 * weight).requires_grad_()
    loss = linear_cross_entropy(x, weight, targets)
    expected = functional.cross_entropy(x.double() @ weight.double().T, targets)
    assert_close({"loss": loss}, {"loss": expected}, F32)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, [x, weight]))


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("wanted", ["x", "weight"])
def test_only_the_gradients_that_are_asked_for(wanted: str, reduction: str) -> None:
    x, weight, targets = draw()
    leaf = {"x": x, "weight": weight}[wanted].requires_grad_()
    both = [y.detach().clone().requires_grad_() for y in (x, weight)]
    expected = torch.autograd.grad(
        functional.cross_entropy(both[0] @ both[1].T, targets), both[wanted == "weight"]
    )
    loss = linear_cross_entropy(x, weight, targets, reduction=reduction).mean()
    assert_close({"d": torch.autograd.grad(loss, leaf)[0]}, {"d": expected[0]}, F64)


def test_the_mean_needs_no_gradients_to_be_computed() -> None:
    x, weight, targets = draw()
    x.requires_grad_()
    with torch.no_grad():
        loss = linear_cross_entropy(x, weight, targets)
    assert not loss.requires_grad
    expected = functional.cross_entropy(x @ weight.T, targets)
    torch.testing.assert_close(loss, expected.detach())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_logits_of_all_tokens_are_never_held(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, targets = draw(N=64)
    rows: list[int] = []
    log_probabilities = cross_entropy._losses

    def counted(x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        rows.append(len(x))
        return log_probabilities(x, *rest)

    monkeypatch.setattr(cross_entropy, "_losses", counted)
    monkeypatch.setitem(cross_entropy.LOGITS_PER_SLICE, "cpu", 10 * 37 + 5)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    loss = linear_cross_entropy(x, weight, targets, reduction=reduction).mean()
    gradients = torch.autograd.grad(loss, leaves)
    assert max(rows) == 10
    assert sum(rows) == 64 * (1 if reduction == "mean" else 2)
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_bfloat16_gives_a_float32_loss_and_narrow_gradients() -> None:
    x, weight, targets = draw(N=200, D=32, vocab=64)
    narrow = [(y / 4).bfloat16().requires_grad_() for y in (x, weight)]
    loss = linear_cross_entropy(narrow[0], narrow[1], targets, slice_rows=50)
    wide = [y.detach().double().requires_grad_() for y in narrow]
    expected = functional.cross_entropy(wide[0] @ wide[1].T, targets)
    gradients = torch.autograd.grad(loss, narrow)
    assert loss.dtype == F32
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16] * 2
    assert_close({"loss": loss}, {"loss": expected}, torch.bfloat16)
    for name, left, right in zip("xw", gradients, torch.autograd.grad(expected, wide), strict=True):
        assert_close({name: left}, {name: right}, torch.bfloat16)


def test_what_does_not_fit_is_refused() -> None:
    x, weight, targets = draw()
    with pytest.raises(
        ValueError, match=r"x has shape \[23, 7\] and weight \[37, 8\]; expected \[N"
    ):
        linear_cross_entropy(x[:, :7], weight, targets)
    with pytest.raises(
        ValueError, match=r"targets has shape \[22\] and dtype torch.int64; expecte"
    ):
        linear_cross_entropy(x, weight, targets[1:])
    with pytest.raises(ValueError, match=r"dtype torch.int32; expected \[23\] and torch.int64"):
        linear_cross_entropy(x, weight, targets.int())
    with pytest.raises(ValueError, match=r"weight.dtype is torch.float32; expected torch.float64"):
        linear_cross_entropy(x, weight.float(), targets)
    with pytest.raises(ValueError, match="reduction='sum' is none of mean, none"):
        linear_cross_entropy(x, weight, targets, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("vocab", [5, 4096, 50_257])
def test_rows_of_any_width_may_be_overwritten(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    x = torch.randn(9, 8, generator=generator, dtype=dtype).mul_(3).requires_grad_()
    weight = torch.randn(vocab, 8, generator=generator, dtype=dtype).requires_grad_()
    targets = torch.randint(vocab, (9,), generator=generator)
    leaves = [x, weight]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = functional.cross_entropy(exact[0] @ exact[1].T, targets)
    loss = linear_cross_entropy(x, weight, targets)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=0)
    for actual, wanted in zip(
        torch.autograd.grad(loss, leaves), torch.autograd.grad(expected, exact), strict=True
    ):
        assert (actual.double() - wanted).norm() <= 1e-5 * wanted.norm()
