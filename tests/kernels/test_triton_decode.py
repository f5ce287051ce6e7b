"""The decode kernel in Triton's interpreter, against the float64 loop over the same tokens.

They need a process with `TRITON_INTERPRET=1`; `test_interpreter.py` starts one.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.decode_triton import recurrent, recurrent_
from kernels.launch import is_interpreted
from tests.kernels.rules import RULES, Rule, call, draw_inputs
from tests.kernels.tolerances import assert_close

F32 = torch.float32
pytestmark = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")


def arguments(rule: Rule, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
    """The kernel's arguments for a rule's inputs, in float32; scale K^-½."""
    x = {name: value.float() for name, value in inputs.items()}
    beta, elu = x.get("beta"), rule.is_normalized
    erase, write = x.get("erase", beta), x.get("write", beta)
    tensors = (x["q"], x["k"], x["v"], x.get("log_decay"), erase, write, x["initial_state"])
    scale, eps = x["q"].shape[-1] ** -0.5, 1e-6
    return (*tensors, x.get("initial_key_sum"), scale, eps, False, elu, rule.has_residual)


def named(rule: Rule, out: Tensor, state: Tensor, residual: Tensor, key_sum: Tensor) -> Any:
    results = {"out": out, "final_state": state}
    if rule.is_normalized:
        return results | {"final_key_sum": key_sum}
    return results | ({"residual": residual} if rule.has_residual else {})


@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_tokens_in_a_row_equal_the_loop(name: str, T: int) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, B=2, T=T, H=1, HV=2, K=20, V=40)
    expected = call(rule, inputs, impl="reference")
    assert_close(named(rule, *recurrent(*arguments(rule, inputs))), expected, F32)


@pytest.mark.parametrize("name", RULES)
def test_in_place_overwrites_the_memory_with_the_same_numbers(name: str) -> None:
    rule = RULES[name]
    given = arguments(rule, draw_inputs(rule, B=2, T=2, K=16, V=40))
    out, state, _, key_sum = recurrent(*given)
    again, _ = recurrent_(*given)
    assert torch.equal(again, out)
    assert torch.equal(given[6], state)
    if rule.is_normalized:
        assert torch.equal(given[7], key_sum)


@pytest.mark.parametrize("op_name", ["recurrent", "recurrent_"])
@pytest.mark.parametrize("name", RULES)
def test_a_public_step_reaches_the_kernel(
    name: str, op_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = RULES[name]
    calls: list[str] = []
    inputs = {n: x.float() for n, x in draw_inputs(rule, B=2, T=1, H=1, HV=2, V=24).items()}
    expected = call(rule, inputs, impl="reference")
    state: Any = inputs.pop("initial_state").clone()
    if rule.is_normalized:
        state = (state, inputs.pop("initial_key_sum").clone())

    def counted(*given: Any) -> Any:
        calls.append(op_name)
        return (recurrent_ if op_name == "recurrent_" else recurrent)(*given)

    monkeypatch.setattr(f"kernels.decode_triton.{op_name}", counted)
    token = {n: x[:, 0] for n, x in inputs.items()}
    q, k, v = (token.pop(n) for n in "qkv")
    options = dict(rule.options) | {"state": state, "in_place": op_name == "recurrent_"}
    with torch.no_grad():
        out, new = rule.step(q, k, v, **token, **options)
    assert calls == [op_name]
    memory = new[0] if rule.is_normalized else new
    actual = {"out": out[:, None], "final_state": memory}
    assert_close(actual, {n: expected[n] for n in actual}, F32)


def test_a_memory_that_is_no_block_cannot_be_overwritten() -> None:
    given = list(arguments(RULES["delta"], draw_inputs(RULES["delta"], T=1)))
    given[6] = given[6].mT
    with pytest.raises(ValueError, match="contiguous memory to overwrite"):
        recurrent_(*given)
