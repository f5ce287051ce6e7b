"""Every implementation equals the float64 loop: results, final states, every gradient."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.chunk_layout import chunk_size
from tests.kernels.rules import (
    IMPLS,
    RULES,
    TABLES,
    call,
    draw_inputs,
    evaluate,
    generator,
    normal,
)
from tests.kernels.tolerances import assert_close

F32, F64 = torch.float32, torch.float64

SHAPES: dict[str, dict[str, Any]] = {
    "B2-T1-H2": {"B": 2, "T": 1, "H": 2},
    "T5-K2-V1": {"T": 5, "K": 2, "V": 1},
    "B2-T31-K8-V24": {"B": 2, "T": 31, "K": 8, "V": 24},
    "T63-H2-HV4-K24-V8": {"T": 63, "H": 2, "HV": 4, "K": 24, "V": 8},
    "T64": {"T": 64},
    "B2-T65-HV3": {"B": 2, "T": 65, "H": 1, "HV": 3},
    "T131-K20-V12": {"T": 131, "K": 20, "V": 12},
    "T95-K33-V8": {"T": 95, "K": 33, "V": 8},
    "T129-K64-V16": {"T": 129, "K": 64, "V": 16},
}


@pytest.fixture(params=RULES)
def rule_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_results_and_gradients_equal_the_loop(
    rule_name: str, shape: dict[str, Any], impl: str
) -> None:
    rule = RULES[rule_name]
    inputs = draw_inputs(rule, **shape)
    expected = evaluate(rule, inputs, impl="reference")
    assert_close(evaluate(rule, inputs, impl=impl, dtype=F32), expected, F32)


def test_the_chunked_form_is_the_same_function_in_float64(rule_name: str) -> None:
    rule = RULES[rule_name]
    inputs = draw_inputs(rule, B=2, T=70, H=2, HV=4, K=12, V=8)
    expected = evaluate(rule, inputs, impl="reference")
    assert_close(evaluate(rule, inputs, impl="chunked"), expected, F64)


@pytest.mark.parametrize("size", [1, 4, 128])
def test_the_size_of_chunks_changes_nothing(
    rule_name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = RULES[rule_name]
    inputs = draw_inputs(rule, T=70, K=8, V=12)
    expected = evaluate(rule, inputs, impl="chunked")
    table = TABLES[rule.op.__name__]
    monkeypatch.setitem(table, "chunked", partial(table["chunked"], size=size))
    assert_close(evaluate(rule, inputs, impl="chunked"), expected, F64)


def test_chunks_are_as_long_as_keys_are_wide_within_bounds() -> None:
    sizes = {key_dim: chunk_size(key_dim) for key_dim in (1, 16, 31, 32, 33, 64, 100, 256)}
    assert sizes == {1: 16, 16: 16, 31: 16, 32: 32, 33: 32, 64: 64, 100: 64, 256: 64}


@pytest.mark.parametrize("impl", IMPLS)
def test_strengths_up_to_two_and_unit_length_inside_the_op(impl: str) -> None:
    rule = RULES["gated-delta"]
    inputs = draw_inputs(
        rule,
        T=100,
        strength=lambda shape, source: 2 * torch.rand(shape, generator=source, dtype=F64),
    )
    inputs["k"] = 3 * inputs["k"]
    expected = evaluate(rule, inputs, impl="reference", qk_l2norm=True)
    assert_close(evaluate(rule, inputs, impl=impl, dtype=F32, qk_l2norm=True), expected, F32)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_scale_multiplies_the_read_alone(rule_name: str, impl: str) -> None:
    rule = RULES[rule_name]
    inputs = draw_inputs(rule, T=9, K=16)
    plain, scaled = (call(rule, inputs, impl=impl, scale=scale) for scale in (None, 0.5))
    torch.testing.assert_close(plain["final_state"], scaled["final_state"])
    if not rule.is_normalized:
        torch.testing.assert_close(scaled["out"], 2 * plain["out"])  # 0.5 against 16^-½


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_an_absent_initial_state_is_zero_and_gets_no_gradient(rule_name: str, impl: str) -> None:
    rule = RULES[rule_name]
    inputs = draw_inputs(rule, T=35)
    zero = {n: torch.zeros_like(x) if n.startswith("initial") else x for n, x in inputs.items()}
    absent = {n: x for n, x in inputs.items() if not n.startswith("initial")}
    expected = evaluate(rule, zero, impl=impl)
    actual = evaluate(rule, absent, impl=impl)
    assert {name for name in expected if name not in actual} == {
        f"d_{name}" for name in inputs if name.startswith("initial")
    }
    assert_close(actual, {name: expected[name] for name in actual}, F64)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
@pytest.mark.parametrize("result", ["out", "final_state"])
def test_a_loss_may_use_one_result_alone(rule_name: str, result: str, impl: str) -> None:
    rule = RULES[rule_name]
    leaves = {name: x.requires_grad_() for name, x in draw_inputs(rule, T=34).items()}
    unread = {"initial_key_sum"} | ({"q"} if result == "final_state" else set())
    gradients = torch.autograd.grad(
        call(rule, leaves, impl=impl)[result].sum(),
        [x for name, x in leaves.items() if name not in unread],
    )
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)


@pytest.mark.parametrize("impl", ["reference", *IMPLS])
def test_inputs_are_left_as_they_were(rule_name: str, impl: str) -> None:
    rule = RULES[rule_name]
    inputs = draw_inputs(rule, T=40)
    before = {name: x.clone() for name, x in inputs.items()}
    evaluate(rule, inputs, impl=impl)
    assert all(torch.equal(inputs[name], before[name]) for name in before)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_bfloat16_is_rounded_once_and_the_state_stays_float32(rule_name: str, impl: str) -> None:
    rule = RULES[rule_name]
    inputs = {
        name: x if name.startswith("initial") else x.bfloat16()
        for name, x in draw_inputs(rule, T=70).items()
    }

    def widened(x: Tensor, name: str) -> Tensor:
        return x.float() if name.startswith("initial") else x

    narrow = call(rule, {n: widened(x, n) for n, x in inputs.items()}, impl=impl)
    wide = call(rule, {n: x.double() for n, x in inputs.items()}, impl="reference")
    assert narrow["out"].dtype == torch.bfloat16
    assert narrow["final_state"].dtype == F32
    assert_close({"out": narrow["out"]}, {"out": wide["out"]}, torch.bfloat16)
    assert_close({"s": narrow["final_state"]}, {"s": wide["final_state"]}, F32)


@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_autocast_does_not_narrow_the_arithmetic(rule_name: str, impl: str) -> None:
    rule = RULES[rule_name]
    inputs = {name: x.float() for name, x in draw_inputs(rule, T=33).items()}
    expected = call(rule, inputs, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = call(rule, inputs, impl=impl)
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_normalized_gradients_equal_the_dense_quadratic_form() -> None:
    """The path from keys through the running sum to the denominator is part of dk."""
    source = generator(3)
    q, k = (torch.rand(2, 64, 2, 8, generator=source, dtype=F64) + 0.1 for _ in range(2))
    v = normal((2, 64, 2, 8), source)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    scores = (8**-0.5 * torch.einsum("bihk,bjhk->bhij", q, k)).tril()
    dense = torch.einsum("bhij,bjhv->bihv", scores / (scores.sum(-1, keepdim=True) + 1e-6), v)
    expected = torch.autograd.grad(dense.sum(), leaves)
    rule = RULES["linear-normalized"]
    for impl in ("reference", *IMPLS):
        dtype = F64 if impl == "reference" else F32
        inputs = [x.detach().to(dtype).requires_grad_() for x in leaves]
        out, _ = rule.op(*inputs, normalize=True, impl=impl)
        actual = torch.autograd.grad(out.sum(), inputs)
        names = ("dq", "dk", "dv")
        assert_close(
            dict(zip(names, actual, strict=True)), dict(zip(names, expected, strict=True)), dtype
        )
