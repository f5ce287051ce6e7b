"""The channel-decay kernels in Triton's interpreter, against the float64 loop.

They need a process with `TRITON_INTERPRET=1`; `test_interpreter.py` starts one.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import channel_delta_plan
from kernels.launch import is_interpreted
from tests.kernels.rules import RULES, Draw, constant, draw_inputs, evaluate, uniform
from tests.kernels.tolerances import assert_close

CHANNEL_RULES = ("kimi-delta", "gated-delta-2")
pytestmark = pytest.mark.skipif(not is_interpreted(), reason="needs TRITON_INTERPRET=1")


def mild(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Decays so weak that one cut serves a whole chunk."""
    return -0.1 * uniform(shape, source)


def strong(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Up to 30 nats a token."""
    return -30 * uniform(shape, source)


def one_channel(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """One channel forgets everything, the others next to nothing."""
    decay = -0.01 * uniform(shape, source)
    decay[..., 0] = -30
    return decay


def alternating(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Fully open, then e^-1, by turns."""
    decay = torch.zeros(shape, dtype=torch.float64)
    decay[:, ::2] = -1
    return decay


def at_the_end(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Strong in the last six tokens, weak before: the padding behind them must stay silent."""
    decay = -0.1 * uniform(shape, source)
    decay[:, -6:] = -30
    return decay


def compare(name: str, inputs: dict[str, Tensor], **options: Any) -> None:
    """Results and gradients of the Triton kernels in float32 against the loop in float64."""
    expected = evaluate(RULES[name], inputs, impl="reference", **options)
    actual = evaluate(RULES[name], inputs, impl="triton", dtype=torch.float32, **options)
    assert_close(actual, expected, torch.float32)


# Both rules run the same kernels, whose cuts depend on decays alone.
@pytest.mark.parametrize(
    ("name", "decay"),
    [("kimi-delta", d) for d in (mild, strong, one_channel, alternating, at_the_end)]
    + [("gated-delta-2", d) for d in (strong, one_channel, at_the_end)],
)
def test_any_decay_is_exact(name: str, decay: Draw) -> None:
    compare(name, draw_inputs(RULES[name], T=70, K=16, V=24, log_decay=decay))


@pytest.mark.parametrize("name", CHANNEL_RULES)
@pytest.mark.parametrize("T", [1, 63, 64, 65])
def test_every_length_is_exact(name: str, T: int) -> None:
    compare(name, draw_inputs(RULES[name], T=T, K=20, V=16), qk_l2norm=True)


@pytest.mark.parametrize("name", CHANNEL_RULES)
def test_channels_that_fill_no_tile_and_heads_that_share_keys(name: str) -> None:
    inputs = draw_inputs(RULES[name], B=2, T=37, H=1, HV=2, K=48, V=72)
    compare(name, inputs, qk_l2norm=True, scale=0.3)


@pytest.mark.parametrize("name", CHANNEL_RULES)
def test_packed_sequences_equal_the_loop(name: str) -> None:
    inputs = draw_inputs(RULES[name], T=101, K=16, V=16, sequences=3)
    bounds = torch.tensor([0, 1, 37, 101])
    compare(name, inputs, cu_seqlens=bounds, qk_l2norm=True)


@pytest.mark.parametrize(
    ("name", "bounds"),
    [("kimi-delta", None), ("gated-delta-2", [0, 137, 290])],
    ids=["kimi-delta-whole", "gated-delta-2-packed"],
)
def test_a_sequence_that_is_cut_into_segments_is_exact(
    name: str, bounds: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel_delta_plan, "num_segments", lambda *_: 3)
    count = None if bounds is None else len(bounds) - 1
    inputs = draw_inputs(RULES[name], T=290, K=16, V=16, sequences=count)
    compare(name, inputs, cu_seqlens=None if bounds is None else torch.tensor(bounds))


@pytest.mark.parametrize("name", CHANNEL_RULES)
def test_an_open_gate_keeps_everything(name: str) -> None:
    compare(name, draw_inputs(RULES[name], T=65, log_decay=constant(0.0), strength=constant(1.0)))


def test_equal_strengths_make_the_second_rule_the_first() -> None:
    inputs = draw_inputs(RULES["kimi-delta"], T=65, K=16, V=24)
    kimi = evaluate(RULES["kimi-delta"], inputs, impl="triton", dtype=torch.float32)
    beta = inputs.pop("beta")[..., None]
    inputs |= {"erase": beta.expand(-1, -1, -1, 16), "write": beta.expand(-1, -1, -1, 24)}
    second = evaluate(RULES["gated-delta-2"], inputs, impl="triton", dtype=torch.float32)
    shared = kimi.keys() - {"d_beta"}
    assert_close({n: second[n] for n in shared}, {n: kimi[n] for n in shared}, torch.float32)
    total = second["d_erase"].sum(-1) + second["d_write"].sum(-1)
    assert_close({"d_beta": total}, {"d_beta": kimi["d_beta"]}, torch.float32)


def test_slices_of_a_fused_tensor_and_expanded_gradients() -> None:
    rule = RULES["kimi-delta"]
    inputs = {n: x.float() for n, x in draw_inputs(rule, B=2, T=37, K=16, V=16).items()}
    fused = torch.cat([inputs["q"], inputs["k"], inputs["v"]], -1).requires_grad_()
    gates = {n: inputs[n].requires_grad_() for n in ("log_decay", "beta")}

    def gradients(*parts: Tensor) -> tuple[Tensor, ...]:
        out, state = rule.op(*parts, **gates, impl="triton")
        return torch.autograd.grad(out.sum() + state.sum(), (fused, *gates.values()))

    sliced = gradients(*torch.split(fused, 16, -1))
    copied = gradients(*(x.contiguous() for x in torch.split(fused, 16, -1)))
    assert all(torch.equal(a, b) for a, b in zip(sliced, copied, strict=True))


def test_equal_calls_give_equal_bits() -> None:
    inputs = draw_inputs(RULES["gated-delta-2"], T=65, H=1, HV=2)
    first, second = (
        evaluate(RULES["gated-delta-2"], inputs, impl="triton", dtype=torch.float32)
        for _ in range(2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_that_the_interpreter_cannot_serve_are_refused(dtype: torch.dtype) -> None:
    inputs = draw_inputs(RULES["kimi-delta"], T=3)
    q, k, v, log_decay, beta = (inputs[n].to(dtype) for n in ("q", "k", "v", "log_decay", "beta"))
    with pytest.raises(ValueError, match=r"v\.dtype is torch\."):
        RULES["kimi-delta"].op(q, k, v, log_decay=log_decay, beta=beta, impl="triton")
