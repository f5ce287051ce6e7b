"""Rules that are special cases of each other agree, forward and in every gradient."""

import pytest
import torch
from torch import Tensor

from tests.kernels.rules import RULES, call, constant, draw_inputs, evaluate, generator, normal
from tests.kernels.tolerances import assert_close

F64 = torch.float64
IMPLS = ("reference", "chunked")


def spread(gate: Tensor, width: int) -> Tensor:
    """A gate `[B, T, HV]` as the same number for every channel `[B, T, HV, width]`."""
    return gate[..., None].expand(*gate.shape, width).clone()


def without(results: dict[str, Tensor], *names: str) -> dict[str, Tensor]:
    return {name: x for name, x in results.items() if name not in names}


@pytest.mark.parametrize("impl", IMPLS)
def test_one_strength_for_all_channels_turns_gated_delta_2_into_the_kimi_rule(impl: str) -> None:
    inputs = draw_inputs(RULES["kimi-delta"], T=70, H=1, HV=2, K=8, V=12)
    beta = inputs["beta"]
    kimi = evaluate(RULES["kimi-delta"], inputs, impl=impl)
    widened = without(inputs, "beta") | {"erase": spread(beta, 8), "write": spread(beta, 12)}
    general = evaluate(RULES["gated-delta-2"], widened, impl=impl)
    general["d_beta"] = general.pop("d_erase").sum(-1) + general.pop("d_write").sum(-1)
    assert_close(general, kimi, F64)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("channel", "scalar"),
    [("kimi-delta", "gated-delta"), ("linear-channel-decay", "linear-scalar-decay")],
    ids=["kimi-delta", "linear"],
)
def test_one_decay_for_all_channels_is_the_decay_of_a_head(
    channel: str, scalar: str, impl: str
) -> None:
    inputs = draw_inputs(RULES[scalar], T=70, H=1, HV=2, K=8, V=12)
    per_head = evaluate(RULES[scalar], inputs, impl=impl)
    widened = inputs | {"log_decay": spread(inputs["log_decay"], 8)}
    per_channel = evaluate(RULES[channel], widened, impl=impl)
    per_channel["d_log_decay"] = per_channel["d_log_decay"].sum(-1)
    assert_close(per_channel, per_head, F64)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize(
    ("decaying", "plain"),
    [
        ("gated-delta", "delta"),
        ("kimi-delta", "delta"),
        ("linear-scalar-decay", "linear"),
        ("linear-channel-decay", "linear"),
    ],
    ids=["gated-delta", "kimi-delta", "linear-scalar", "linear-channel"],
)
@pytest.mark.parametrize("dtype", [F64, torch.float32], ids=["float64", "float32"])
def test_an_open_gate_is_no_gate(decaying: str, plain: str, dtype: torch.dtype, impl: str) -> None:
    inputs = draw_inputs(RULES[decaying], T=130, H=2, K=8, V=12, log_decay=constant(0.0))
    gated = evaluate(RULES[decaying], inputs, impl=impl, dtype=dtype)
    ungated = evaluate(RULES[plain], without(inputs, "log_decay"), impl=impl)
    assert_close(without(gated, "d_log_decay"), ungated, dtype)


@pytest.mark.parametrize("impl", IMPLS)
def test_no_erasure_and_full_writing_is_additive_memory(impl: str) -> None:
    inputs = draw_inputs(RULES["gated-delta-2"], T=70, K=8, V=12)
    inputs["erase"], inputs["write"] = 0 * inputs["erase"], 0 * inputs["write"] + 1
    results = ("out", "final_state")
    general = evaluate(RULES["gated-delta-2"], inputs, impl=impl, results=results)
    additive = evaluate(RULES["linear-channel-decay"], without(inputs, "erase", "write"), impl=impl)
    torch.testing.assert_close(general["residual"], inputs["v"])
    assert_close(without(general, "residual", "d_erase", "d_write"), additive, F64)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("split", [1, 64, 69])
def test_two_halves_equal_the_whole(name: str, split: int, impl: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, B=2, T=70, K=8, V=12)
    whole = call(rule, inputs, impl=impl)
    state_names = [key for key in inputs if key.startswith("initial")]
    first = {key: x if key in state_names else x[:, :split] for key, x in inputs.items()}
    results = call(rule, first, impl=impl)
    second = {key: x[:, split:] for key, x in inputs.items() if key not in state_names}
    second |= {key: results[key.replace("initial", "final")] for key in state_names}
    rest = call(rule, second, impl=impl)
    joined = {key: rest[key] for key in rest if key.startswith("final")}
    joined |= {
        key: torch.cat([results[key], rest[key]], 1) for key in ("out", "residual") if key in rest
    }
    assert_close(joined, whole, F64)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", RULES)
def test_a_later_token_leaves_earlier_results_bit_equal(name: str, impl: str) -> None:
    rule = RULES[name]
    inputs = {key: x.float() for key, x in draw_inputs(rule, B=2, T=100, H=2, K=8, V=12).items()}
    before = call(rule, inputs, impl=impl)
    for position in (1, 37, 64, 99):
        changed = dict(inputs)
        for key, x in inputs.items():
            if not key.startswith("initial"):
                changed[key] = x.clone()
                noise = normal(tuple(x[:, position:].shape), generator(9)).float()
                changed[key][:, position:] = -noise.abs() if key == "log_decay" else noise
        after = call(rule, changed, impl=impl)
        for key in ("out", "residual"):
            if key in before:
                assert torch.equal(before[key][:, :position], after[key][:, :position])
                assert not torch.equal(before[key][:, position:], after[key][:, position:])


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", RULES)
def test_a_batch_row_alone_equals_the_row_in_the_batch(name: str, impl: str) -> None:
    rule = RULES[name]
    inputs = draw_inputs(rule, B=3, T=66, H=2, HV=4, K=8, V=12)
    together = call(rule, inputs, impl=impl)
    alone = call(rule, {key: x[1:2] for key, x in inputs.items()}, impl=impl)
    assert_close(alone, {key: x[1:2] for key, x in together.items()}, F64)
