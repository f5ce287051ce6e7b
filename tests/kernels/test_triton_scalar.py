"""The scalar-decay kernels in Triton's interpreter, against the float64 loop.

They need a process with `TRITON_INTERPRET=1`; `test_interpreter.py` starts one.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import linear_attention_triton, scalar_delta_triton
from kernels.launch import is_interpreted
from tests.kernels.rules import RULES, Draw, constant, draw_inputs, evaluate, normal, uniform
from tests.kernels.tolerances import assert_close

SCALAR_RULES = ("gated-delta", "delta", "linear-scalar-decay", "linear", "linear-normalized")
pytestmark = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")


def strong(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Up to 30 nats a token."""
    return -30 * uniform(shape, source)


def weak_after_strong(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Weak decays whose sums have lost their digits to the strong ones before them."""
    decay = -0.01 * uniform(shape, source)
    decay[:, :40] = -30
    return decay


def at_the_end(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Strong in the last six tokens, weak before: the padding behind them must stay silent."""
    decay = -0.1 * uniform(shape, source)
    decay[:, -6:] = -30
    return decay


def up_to_two(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return 2 * uniform(shape, source)


def compare(name: str, inputs: dict[str, Tensor], **options: Any) -> None:
    """Results and gradients of the Triton kernels in float32 against the loop in float64."""
    expected = evaluate(RULES[name], inputs, impl="reference", **options)
    actual = evaluate(RULES[name], inputs, impl="triton", dtype=torch.float32, **options)
    assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("name", SCALAR_RULES)
@pytest.mark.parametrize("T", [1, 65])
def test_every_length_is_exact(name: str, T: int) -> None:
    compare(name, draw_inputs(RULES[name], T=T, K=20, V=16, strength=up_to_two))


@pytest.mark.parametrize("name", ["gated-delta", "linear-scalar-decay"])
@pytest.mark.parametrize("decay", [strong, weak_after_strong, at_the_end, constant(-20.0)])
def test_any_decay_is_exact(name: str, decay: Draw) -> None:
    compare(name, draw_inputs(RULES[name], T=70, K=16, V=24, log_decay=decay))


@pytest.mark.parametrize("name", SCALAR_RULES)
def test_channels_that_fill_no_tile_and_heads_that_share_keys(name: str) -> None:
    inputs = draw_inputs(RULES[name], B=2, T=37, H=1, HV=2, K=72, V=72)
    norm = {"qk_l2norm": True} if RULES[name].has_residual else {}
    compare(name, inputs, scale=0.3, **norm)


@pytest.mark.parametrize("name", SCALAR_RULES)
@pytest.mark.parametrize("bounds", [[0, 1, 37, 101], [0, 101]], ids=["three", "one"])
def test_packed_sequences_equal_the_loop(name: str, bounds: list[int]) -> None:
    inputs = draw_inputs(RULES[name], T=101, sequences=len(bounds) - 1)
    compare(name, inputs, cu_seqlens=torch.tensor(bounds))


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("gated-delta", None),
        ("gated-delta", [0, 137, 290]),
        ("linear-scalar-decay", [0, 137, 290]),
        ("linear-normalized", None),
    ],
    ids=["gated-whole", "gated-packed", "decay-packed", "normalized-whole"],
)
def test_a_sequence_that_is_split_into_segments_is_exact(
    name: str, bounds: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Four segments of one or two chunks; the second packed sequence leaves one of them empty.
    for module in (linear_attention_triton, scalar_delta_triton):
        monkeypatch.setattr(module, "num_segments", lambda *_: 4)
    count = None if bounds is None else len(bounds) - 1
    inputs = draw_inputs(RULES[name], T=290, sequences=count)
    compare(name, inputs, cu_seqlens=None if bounds is None else torch.tensor(bounds))


def test_linear_attention_with_a_decay_per_channel_is_exact() -> None:
    name = "linear-channel-decay"
    compare(name, draw_inputs(RULES[name], T=65, H=1, HV=2, K=20, V=16))


def test_zero_decay_makes_the_gated_rule_the_delta_rule() -> None:
    gated = draw_inputs(RULES["gated-delta"], T=65, log_decay=constant(0.0))
    plain = {name: x for name, x in gated.items() if name != "log_decay"}
    actual = evaluate(RULES["gated-delta"], gated, impl="triton", dtype=torch.float32)
    wanted = evaluate(RULES["delta"], plain, impl="triton", dtype=torch.float32)
    assert_close({name: actual[name] for name in wanted}, wanted, torch.float32)


def test_zero_strength_writes_nothing_but_has_a_gradient() -> None:
    compare("gated-delta", draw_inputs(RULES["gated-delta"], T=65, strength=constant(0.0)))


@pytest.mark.parametrize("name", ["gated-delta", "linear-normalized"])
def test_slices_of_a_fused_tensor_and_expanded_gradients(name: str) -> None:
    rule = RULES[name]
    inputs = {n: x.float() for n, x in draw_inputs(rule, B=2, T=37).items()}
    fused = torch.cat([inputs["q"], inputs["k"], inputs["v"]], -1).requires_grad_()
    gates = {n: inputs[n].requires_grad_() for n in rule.gates}

    def gradients(*parts: Tensor) -> tuple[Tensor, ...]:
        out = rule.op(*parts, **gates, **rule.options, impl="triton")[0]
        return torch.autograd.grad(out.sum(), (fused, *gates.values()))

    sliced = gradients(*fused.split(16, -1))
    copied = gradients(*(x.contiguous() for x in fused.split(16, -1)))
    assert all(torch.equal(a, b) for a, b in zip(sliced, copied, strict=True))


@pytest.mark.parametrize("results", [("final_state",), ("residual",)])
def test_each_result_alone_passes_its_gradient(results: tuple[str, ...]) -> None:
    rule, inputs = RULES["gated-delta"], draw_inputs(RULES["gated-delta"], T=65)
    # The queries have no part in these results.
    inputs["k"] = inputs["k"] + 0.1 * inputs["q"]
    options: dict[str, Any] = {"results": (*results, "out"), "qk_l2norm": True}
    expected = evaluate(rule, inputs, impl="reference", **options)
    actual = evaluate(rule, inputs, impl="triton", dtype=torch.float32, **options)
    assert_close(actual, expected, torch.float32)


@pytest.mark.parametrize("name", ["gated-delta", "linear-normalized"])
def test_equal_calls_give_equal_bits(name: str) -> None:
    inputs = draw_inputs(RULES[name], T=65, H=1, HV=2)
    first, second = (
        evaluate(RULES[name], inputs, impl="triton", dtype=torch.float32) for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("name", ["delta", "linear"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_that_cannot_be_served_are_refused(name: str, dtype: torch.dtype) -> None:
    inputs = {n: x.to(dtype) for n, x in draw_inputs(RULES[name], T=3).items()}
    del inputs["initial_state"]
    with pytest.raises(ValueError, match=r"q\.dtype is torch\."):
        RULES[name].op(**inputs, impl="triton")


def test_the_operators_keep_their_contract_with_the_compiler() -> None:
    source = torch.Generator().manual_seed(0)
    q, k, v = (normal((1, 5, 1, 16), source).float().requires_grad_() for _ in range(3))
    gate = uniform((1, 5, 1), source).float().requires_grad_()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(
        scalar_delta_triton.scalar_delta_op,
        (q, k, v, -gate, gate, None, None, 1.0, True, True, 1),
        test_utils=checks,
    )
    torch.library.opcheck(
        linear_attention_triton.linear_attention_op,
        (q, k, v, None, None, None, 1.0, 1e-6, True, True, 1),
        test_utils=checks,
    )
