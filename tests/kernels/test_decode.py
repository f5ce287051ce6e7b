"""Token by token equals the whole sequence: outputs, residuals, memory, gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.rules import RULES, Rule, call, draw_inputs
from tests.kernels.tolerances import assert_close

F64 = torch.float64


def pack_state(rule: Rule, inputs: dict[str, Tensor]) -> Any:
    state = inputs["initial_state"]
    return (state, inputs["initial_key_sum"]) if rule.is_normalized else state


def decode(rule: Rule, inputs: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """The results of `call`, one token at a time."""
    state, rows = pack_state(rule, inputs), []
    tokens = {key: x for key, x in inputs.items() if not key.startswith("initial")}
    if rule.has_residual:
        options["return_residual"] = True
    for t in range(inputs["q"].shape[1]):
        token = {key: x[:, t] for key, x in tokens.items()}
        q, k, v = (token.pop(key) for key in "qkv")
        out, state, *residual = rule.step(q, k, v, **token, **rule.options, state=state, **options)
        rows.append((out, *residual))
    names = ("out", "residual") if rule.has_residual else ("out",)
    results = {
        name: torch.stack(x, 1) for name, x in zip(names, zip(*rows, strict=True), strict=True)
    }
    if rule.is_normalized:
        return results | {"final_state": state[0], "final_key_sum": state[1]}
    return results | {"final_state": state}


@pytest.mark.parametrize("name", RULES)
def test_decoding_equals_the_parallel_form(name: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, B=2, T=70, H=2, HV=4, K=8, V=12)
    expected = call(rule, inputs, impl="chunked")
    assert_close(decode(rule, inputs) | {}, {key: expected[key] for key in expected}, F64)


@pytest.mark.parametrize("name", RULES)
def test_decoding_goes_on_from_a_prefilled_memory(name: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, B=2, T=70, K=8, V=12)
    whole = call(rule, inputs, impl="chunked")
    is_state = {key: key.startswith("initial") for key in inputs}
    prefix = {key: x if is_state[key] else x[:, :65] for key, x in inputs.items()}
    prefilled = call(rule, prefix, impl="chunked")
    rest = {
        key: prefilled[key.replace("initial", "final")] if is_state[key] else x[:, 65:]
        for key, x in inputs.items()
    }
    expected = {key: x if key.startswith("final") else x[:, 65:] for key, x in whole.items()}
    assert_close(decode(rule, rest), expected, F64)


@pytest.mark.parametrize("name", RULES)
def test_in_place_writes_the_same_memory_over_the_old_one(name: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, B=2, T=5, K=8, V=12)
    expected = decode(rule, inputs)
    kept = {key: x.clone() for key, x in inputs.items()}
    actual = decode(rule, inputs, in_place=True)
    assert all(torch.equal(actual[key], expected[key]) for key in expected)
    assert actual["final_state"] is inputs["initial_state"]
    for key, x in kept.items():
        assert torch.equal(inputs[key], x) != key.startswith("initial")


@pytest.mark.parametrize("name", RULES)
def test_a_step_leaves_the_old_memory_alone(name: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, T=3)
    kept = inputs["initial_state"].clone()
    decode(rule, inputs)
    assert torch.equal(inputs["initial_state"], kept)


@pytest.mark.parametrize("name", RULES)
def test_gradients_flow_through_steps(name: str) -> None:
    rule = RULES[name]
    leaves = {key: x.requires_grad_() for key, x in draw_inputs(rule, T=4, K=4, V=4).items()}
    wanted = list(leaves.values())
    actual, expected = (
        torch.autograd.grad([x.square().sum() for x in results.values()], wanted)
        for results in (decode(rule, leaves), call(rule, leaves, impl="reference"))
    )
    assert_close(
        dict(zip(leaves, actual, strict=True)), dict(zip(leaves, expected, strict=True)), F64
    )


@pytest.mark.parametrize("name", RULES)
def test_in_place_is_refused_where_a_gradient_is_wanted(name: str) -> None:
    rule = RULES[name]
    inputs = {key: x.requires_grad_() for key, x in draw_inputs(rule, T=1).items()}
    with pytest.raises(ValueError, match="in_place=True with inputs that require gradients"):
        decode(rule, inputs, in_place=True)
    with torch.no_grad():
        decode(rule, inputs, in_place=True)


def test_unit_length_and_scale_are_those_of_the_whole_sequence() -> None:
    rule = RULES["gated-delta"]
    inputs = draw_inputs(rule, T=6)
    inputs["k"] = 3 * inputs["k"]
    options: dict[str, Any] = {"scale": 0.7, "qk_l2norm": True}
    expected = call(rule, inputs, impl="reference", **options)
    assert_close(decode(rule, inputs, **options), expected, F64)


def test_bfloat16_tokens_leave_the_memory_in_float32() -> None:
    rule = RULES["kimi-delta"]
    inputs = draw_inputs(rule, T=20)
    narrow = {key: x.bfloat16() for key, x in inputs.items()}
    narrow["initial_state"] = inputs["initial_state"].float()
    results = decode(rule, narrow)
    expected = decode(rule, {key: x.double() for key, x in narrow.items()})
    assert results["final_state"].dtype == torch.float32
    assert results["out"].dtype == torch.bfloat16
    assert_close({"s": results["final_state"]}, {"s": expected["final_state"]}, torch.float32)
    assert_close({"out": results["out"]}, {"out": expected["out"]}, torch.bfloat16)


@pytest.mark.parametrize("name", RULES)
def test_a_step_refuses_what_does_not_fit(name: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, B=2, T=1)
    state = pack_state(rule, inputs)
    token = {key: x[:, 0] for key, x in inputs.items() if not key.startswith("initial")}
    q, k, v = (token.pop(key) for key in "qkv")
    with pytest.raises(ValueError, match=r"q has shape \[2, 1, 1, 16\]; expected one token"):
        rule.step(q[:, None], k, v, **token, **rule.options, state=state)
    short = (state[0][:1], state[1]) if rule.is_normalized else state[:1]
    with pytest.raises(ValueError, match=r"state\S* has shape \[1, 1, 16, 16\]; expected \[2, 1"):
        rule.step(q, k, v, **token, **rule.options, state=short)
    for gate in token:
        with pytest.raises(ValueError, match=f"{gate} has shape"):
            rule.step(q, k, v, **token | {gate: token[gate][:1]}, **rule.options, state=state)
