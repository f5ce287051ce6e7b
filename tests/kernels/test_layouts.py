"""Inputs and gradients of any strides, and memory behind the inputs that must not be read."""

import pytest
import torch
from torch import Tensor

from tests.kernels.rules import DECAYING_RULES, IMPLS, RULES, call, draw_inputs, evaluate
from tests.kernels.tolerances import assert_close

F32, F64 = torch.float32, torch.float64
ALL_IMPLS = ("reference", *IMPLS)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("T", [1, 5])
@pytest.mark.parametrize("K", [48, 60, 100])
@pytest.mark.parametrize("name", ["kimi-delta", "gated-delta-2", "linear-channel-decay"])
def test_what_lies_behind_the_decay_is_never_read(name: str, K: int, T: int, impl: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, T=T, K=K, V=16)
    expected = evaluate(rule, inputs, impl="reference")
    for filling in (1e30, float("nan")):
        count = inputs["log_decay"].numel()
        buffer = torch.full((count + 4096,), filling, dtype=F32)
        buffer[:count] = inputs["log_decay"].flatten()
        single = {key: x.float().requires_grad_() for key, x in inputs.items()}
        single["log_decay"] = buffer[:count].view_as(inputs["log_decay"]).requires_grad_()
        actual = call(rule, single, impl=impl)
        assert_close(actual, {key: expected[key] for key in actual}, F32)


def strided(x: Tensor) -> Tensor:
    """The same numbers with gaps between them and the last two axes swapped in memory."""
    wide = torch.full((*x.shape[:-2], 2 * x.shape[-1], x.shape[-2]), float("nan"), dtype=x.dtype)
    wide[..., ::2, :] = x.mT
    return wide[..., ::2, :].mT


@pytest.mark.parametrize("impl", ALL_IMPLS)
@pytest.mark.parametrize("name", RULES)
def test_strided_inputs_equal_contiguous_ones(name: str, impl: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, B=2, T=67, H=2, HV=4, K=8, V=12)
    views = {key: strided(x) for key, x in inputs.items()}
    assert all(torch.equal(views[key], x) for key, x in inputs.items())
    assert not any(x.is_contiguous() for x in views.values())
    assert_close(call(rule, views, impl=impl), call(rule, inputs, impl=impl), F64)


@pytest.mark.parametrize("impl", ALL_IMPLS)
@pytest.mark.parametrize("name", RULES)
def test_slices_of_one_fused_tensor_get_the_gradients_of_copies(name: str, impl: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, B=2, T=67, H=2, K=8, V=8)
    fused = torch.cat([inputs[key] for key in "qkv"], -1).requires_grad_()
    views = dict(zip("qkv", fused.tensor_split(3, -1), strict=True))
    out = call(rule, {**inputs, **views}, impl=impl)["out"]
    # The loss sees the output through a concatenation, which makes its gradient a strided slice.
    loss = torch.cat([out, 2 * out], -1)[..., 3:11].square().sum()
    (fused_gradient,) = torch.autograd.grad(loss, fused)

    copies = {key: inputs[key].clone().requires_grad_() for key in "qkv"}
    out = call(rule, {**inputs, **copies}, impl=impl)["out"]
    weight = torch.ones(8, dtype=F64)
    weight[:3] = 4.0
    loss = (out.square() * weight).sum()
    expected = torch.autograd.grad(loss, list(copies.values()))
    assert_close({"d": fused_gradient}, {"d": torch.cat(expected, -1)}, F64)


@pytest.mark.parametrize("impl", ALL_IMPLS)
@pytest.mark.parametrize("name", RULES)
def test_an_expanded_gradient_equals_a_contiguous_one(name: str, impl: str) -> None:
    """`.sum()` sends back a single number with strides of zero."""
    rule = RULES[name]
    leaves = {key: x.requires_grad_() for key, x in draw_inputs(rule, T=67, K=8, V=12).items()}
    results = call(rule, leaves, impl=impl)
    wanted = list(leaves.values())
    sums = [x.sum() for x in results.values()]
    expanded = torch.autograd.grad(sums, wanted, retain_graph=True)
    contiguous = torch.autograd.grad(
        list(results.values()), wanted, [torch.ones_like(x) for x in results.values()]
    )
    assert_close(
        dict(zip(leaves, expanded, strict=True)), dict(zip(leaves, contiguous, strict=True)), F64
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", DECAYING_RULES)
def test_gates_may_be_expanded(name: str, impl: str) -> None:
    """A gate shared by all heads, with a stride of zero."""
    rule = RULES[name]
    inputs = draw_inputs(rule, T=40, H=2, K=8, V=8)
    inputs["log_decay"] = inputs["log_decay"][:, :, :1].expand_as(inputs["log_decay"])
    copied = inputs | {"log_decay": inputs["log_decay"].clone()}
    assert_close(call(rule, inputs, impl=impl), call(rule, copied, impl=impl), F64)


@pytest.mark.parametrize("impl", ALL_IMPLS)
def test_grouped_value_heads_read_the_key_head_of_their_group(impl: str) -> None:
    rule = RULES["kimi-delta"]
    inputs = draw_inputs(rule, T=33, H=2, HV=6, K=8, V=4)
    grouped = call(rule, inputs, impl=impl)
    repeated = {key: inputs[key][:, :, [0, 0, 0, 1, 1, 1]] for key in "qk"}
    assert_close(grouped, call(rule, inputs | repeated, impl=impl), F64)
