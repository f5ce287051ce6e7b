"""Arguments that don't fit are refused with their name, what they are and what would be right."""

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor

from tests.kernels.rules import RULES, call, draw_inputs

Change = Callable[[dict[str, Tensor]], dict[str, Any]]


def replaced(**changes: Callable[[Tensor], Any]) -> Change:
    """The inputs with each named one put through its function."""
    return lambda inputs: inputs | {key: change(inputs[key]) for key, change in changes.items()}


REFUSED: dict[str, tuple[str, Change, str]] = {
    "rank": ("delta", replaced(q=lambda q: q[0]), r"q has shape \[9, 2, 16\]; expected \[B, T, H,"),
    "k-shape": (
        "delta",
        replaced(k=lambda k: k[..., :8]),
        r"k has shape \[2, 9, 2, 8\]; expected q's shape \[2, 9, 2, 16\]",
    ),
    "length": (
        "linear",
        replaced(v=lambda v: v[:, 1:]),
        r"v has shape \[2, 8, 2, 16\]; expected batch and length \[2, 9\]",
    ),
    "heads": (
        "linear",
        replaced(v=lambda v: v[:, :, [0, 1, 0]]),
        "v has 3 heads; expected a multiple of the 2 heads",
    ),
    "no-tokens": (
        "delta",
        replaced(q=lambda q: q[:, :0], k=lambda k: k[:, :0], v=lambda v: v[:, :0]),
        r"q has shape \[2, 0, 2, 16\]; expected every axis to be at least 1",
    ),
    "key-dim": (
        "linear",
        replaced(q=lambda q: q.repeat(1, 1, 1, 17), k=lambda k: k.repeat(1, 1, 1, 17)),
        "q and k have head dim 272; expected at most 256",
    ),
    "value-dim": (
        "linear",
        replaced(v=lambda v: v.repeat(1, 1, 1, 33)),
        "v has head dim 528; expected at most 512",
    ),
    "mixed-dtypes": (
        "delta",
        replaced(q=lambda q: q.float()),
        "q is torch.float32 on cpu; expected torch.float64 on cpu as v",
    ),
    "integers": (
        "delta",
        replaced(q=lambda q: q.long()),
        "q.dtype is torch.int64; expected a floating-point dtype",
    ),
    "gate-shape": (
        "gated-delta",
        replaced(beta=lambda beta: beta[:, :, :1]),
        r"beta has shape \[2, 9, 1\]; expected \[2, 9, 2\]",
    ),
    "scalar-decay-for-channels": (
        "kimi-delta",
        replaced(log_decay=lambda g: g[..., 0]),
        r"log_decay has shape \[2, 9, 2\]; expected \[2, 9, 2, 16\]",
    ),
    "channel-decay-for-scalars": (
        "gated-delta",
        replaced(log_decay=lambda g: g[..., None].expand(-1, -1, -1, 16)),
        r"log_decay has shape \[2, 9, 2, 16\]; expected \[2, 9, 2\]",
    ),
    "erase-shape": (
        "gated-delta-2",
        replaced(erase=lambda erase: erase[..., 0]),
        r"erase has shape \[2, 9, 2\]; expected \[2, 9, 2, 16\]",
    ),
    "gate-dtype": (
        "gated-delta",
        replaced(log_decay=lambda g: g.float()),
        "log_decay.dtype is torch.float32; expected torch.float64 beside v of torch.float64",
    ),
    "state-shape": (
        "delta",
        replaced(initial_state=lambda s: s[:1]),
        r"initial_state has shape \[1, 2, 16, 16\]; expected \[2, 2, 16, 16\]",
    ),
    "state-dtype": (
        "delta",
        replaced(initial_state=lambda s: s.bfloat16()),
        "initial_state.dtype is torch.bfloat16; expected torch.float64 for v of torch.float64",
    ),
    "key-sum-shape": (
        "linear-normalized",
        replaced(initial_key_sum=lambda z: z[..., None]),
        r"initial_state\[1\] has shape \[2, 2, 16, 1\]; expected \[2, 2, 16\]",
    ),
}


@pytest.mark.parametrize(("name", "change", "message"), REFUSED.values(), ids=REFUSED)
def test_arguments_that_do_not_fit_are_refused(name: str, change: Change, message: str) -> None:
    inputs = draw_inputs(RULES[name], B=2, T=9, H=2)
    call(RULES[name], inputs, impl="auto")
    with pytest.raises(ValueError, match=message):
        call(RULES[name], change(inputs), impl="auto")


def test_a_float32_gate_beside_bfloat16_values_is_welcome_and_a_float64_one_is_not() -> None:
    rule = RULES["gated-delta"]
    inputs = {key: x.bfloat16() for key, x in draw_inputs(rule, T=5).items()}
    inputs.pop("initial_state")
    call(rule, inputs | {"log_decay": inputs["log_decay"].float()}, impl="auto")
    with pytest.raises(ValueError, match=r"log_decay.dtype is torch.float64; expected torch.bflo"):
        call(rule, inputs | {"log_decay": inputs["log_decay"].double()}, impl="auto")


def test_the_state_of_the_normalized_form_is_a_pair_and_that_of_the_others_is_not() -> None:
    inputs = draw_inputs(RULES["linear"], T=5)
    state = inputs.pop("initial_state")
    q, k, v = inputs.values()
    op = RULES["linear"].op
    with pytest.raises(ValueError, match="initial_state is a Tensor; expected the pair"):
        op(q, k, v, normalize=True, initial_state=state)
    with pytest.raises(ValueError, match="initial_state is a pair; expected one tensor"):
        op(q, k, v, initial_state=(state, state[..., 0]))
    with pytest.raises(ValueError, match="initial_state is a list; expected a tensor"):
        RULES["delta"].op(q, k, v, beta=v[..., 0], initial_state=[state])


def test_a_decay_beside_the_normalized_read_is_refused() -> None:
    inputs = draw_inputs(RULES["linear-scalar-decay"], T=5)
    inputs.pop("initial_state")
    with pytest.raises(ValueError, match="log_decay is given with normalize=True"):
        call(RULES["linear-scalar-decay"], inputs, impl="auto", normalize=True)


def test_an_unknown_feature_map_is_refused() -> None:
    inputs = draw_inputs(RULES["linear"], T=5)
    with pytest.raises(ValueError, match="feature_map='relu' is none of elu1, identity"):
        call(RULES["linear"], inputs, impl="auto", feature_map="relu")


@pytest.mark.parametrize("name", ["linear-channel-decay", "gated-delta", "gated-delta-2"])
def test_check_refuses_a_decay_that_grows(name: str) -> None:
    inputs = draw_inputs(RULES[name], T=9)
    call(RULES[name], inputs, impl="auto", check=True)
    inputs["log_decay"][0, 4] = 0.25
    with pytest.raises(ValueError, match=r"log_decay holds 0.25; expected natural logs of decays"):
        call(RULES[name], inputs, impl="auto", check=True)


@pytest.mark.parametrize("name", RULES)
def test_check_refuses_every_input_that_is_not_finite(name: str) -> None:
    rule = RULES[name]
    call(rule, draw_inputs(rule, T=9), impl="auto", check=True)
    for key in draw_inputs(rule, T=9):
        for value in (float("nan"), float("-inf")):
            inputs = draw_inputs(rule, T=9)
            inputs[key].view(-1)[:3] = value
            reported = key.replace("initial_key_sum", r"initial_state\[1\]")
            with pytest.raises(ValueError, match=f"{reported} holds 3 values that are NaN or inf"):
                call(rule, inputs, impl="auto", check=True)
