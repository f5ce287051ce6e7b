"""Decays that overflow, underflow or cancel in a careless chunked form.

Each case has been a fault of some public kernel. Inputs are float32, the loop is float64.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.rules import (
    DECAYING_RULES,
    IMPLS,
    RULES,
    Rule,
    constant,
    draw_inputs,
    evaluate,
    uniform,
)
from tests.kernels.tolerances import assert_close

F32, F64 = torch.float32, torch.float64

WIDE: dict[str, Any] = {"K": 64, "V": 8}
"""Keys so wide that chunks hold 64 tokens; see `chunk_size`."""


def assert_equals_the_loop(rule: Rule, inputs: dict[str, Tensor], impl: str) -> None:
    rounded = {name: x.float().double() for name, x in inputs.items()}
    expected = evaluate(rule, rounded, impl="reference")
    assert_close(evaluate(rule, rounded, impl=impl, dtype=F32), expected, F32)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", DECAYING_RULES)
@pytest.mark.parametrize("T", [64, 100])
@pytest.mark.parametrize("log_decay", [-20.0, -30.0])
def test_a_strong_decay_at_every_token(name: str, log_decay: float, T: int, impl: str) -> None:
    """Masked exponents are +20 per token of distance, and exp of them infinite.

    The gradient of the decay is e^−20 of what a token does to itself and to slots beyond the end.
    """
    rule = RULES[name]
    inputs = draw_inputs(rule, T=T, **WIDE, log_decay=constant(log_decay), strength=constant(1.0))
    assert_equals_the_loop(rule, inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", DECAYING_RULES)
@pytest.mark.parametrize("T", [70, 81])
def test_strong_decay_before_a_ragged_end(name: str, T: int, impl: str) -> None:
    """Slots beyond the end must not be seen from behind a strong decay."""
    rule = RULES[name]
    inputs = draw_inputs(rule, T=T, **WIDE)
    inputs["log_decay"][:, -6:] = -30.0
    assert_equals_the_loop(rule, inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", DECAYING_RULES)
@pytest.mark.parametrize("T", [32, 64, 128])
def test_random_decays_down_to_minus_twenty(name: str, T: int, impl: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(
        rule, T=T, **WIDE, log_decay=lambda shape, source: -20 * uniform(shape, source)
    )
    assert_equals_the_loop(rule, inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", DECAYING_RULES)
def test_a_weak_decay_after_a_strong_one_keeps_its_digits(name: str, impl: str) -> None:
    """After 40 tokens at −30 a float32 sum stands at −1200, with steps of 1e-4."""
    rule = RULES[name]
    inputs = draw_inputs(rule, T=64, **WIDE)
    inputs["log_decay"] = 0.01 * inputs["log_decay"]
    inputs["log_decay"][:, :40] = -30.0
    assert_equals_the_loop(rule, inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["kimi-delta", "gated-delta-2", "linear-channel-decay"])
def test_one_channel_fades_at_once_while_the_others_stay(name: str, impl: str) -> None:
    """Clamping the two factors of a decay one by one would change their product."""
    rule = RULES[name]
    inputs = draw_inputs(rule, T=64, **WIDE, log_decay=constant(-0.01))
    inputs["log_decay"][..., 0] = -30.0
    assert_equals_the_loop(rule, inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", DECAYING_RULES)
def test_a_decay_alternating_between_open_and_minus_one(name: str, impl: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, T=130, **WIDE, log_decay=constant(0.0))
    inputs["log_decay"][:, 1::2] = -1.0
    assert_equals_the_loop(rule, inputs, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["gated-delta", "kimi-delta", "gated-delta-2"])
@pytest.mark.parametrize("strength", [3.0, 72.0], ids=["A3", "A72"])
def test_gradients_reach_the_parameters_of_the_gate(name: str, strength: float, impl: str) -> None:
    """log_decay = −A softplus(x + bias), down to −20 a token and, for A = 72, far beyond."""
    rule = RULES[name]
    inputs = draw_inputs(
        rule, T=64, **WIDE, log_decay=lambda shape, source: 8 * uniform(shape, source) - 2
    )
    x = inputs.pop("log_decay")

    def gradients(impl: str, dtype: torch.dtype) -> dict[str, Tensor]:
        a_log = torch.tensor(strength, dtype=dtype).log().requires_grad_()
        bias = torch.zeros(x.shape[2:], dtype=dtype, requires_grad=True)
        softplus = torch.nn.functional.softplus(x.to(dtype) + bias)
        arguments = {key: value.to(dtype) for key, value in inputs.items()}
        q, k, v = (arguments.pop(key) for key in "qkv")
        out, _ = rule.op(q, k, v, log_decay=-a_log.exp() * softplus, **arguments, impl=impl)
        found = torch.autograd.grad(out.square().sum(), [a_log, bias])
        return dict(zip(("d_log_decay", "d_bias"), found, strict=True))

    expected = gradients("reference", F64)
    assert all(gradient.any() for gradient in expected.values())
    actual = gradients(impl, F32)
    # Both are sums of decay gradients and share their tolerance.
    for name_, value in expected.items():
        assert_close({"d_log_decay": actual[name_]}, {"d_log_decay": value}, F32)
