"""The parts start as they should and compute their formulas."""

import math

import pytest
import torch
from torch.nn import functional as F

from models.layers import (
    DecayGate,
    Embedding,
    Projection,
    RMSNorm,
    ShortConvolution,
    SwiGLU,
    residual_std,
)
from models.mixer import Layer, ParameterInfo, collect_parameter_info


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def started(layer: Layer) -> Layer:
    layer.reset_parameters(generator())
    return layer


QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@pytest.mark.parametrize(
    ("dt_init", "expected"),
    [
        # As the public code of arXiv 2607.07953 starts Kimi Delta Attention.
        ("loguniform", (0.465, 0.794, 0.932, 0.978, 0.994)),
        # The rate at quantile p is 16 − 15 p, its step exactly softplus(1).
        ("ones", tuple(math.exp(-(16 - 15 * p) * math.log1p(math.e)) for p in QUANTILES)),
    ],
)
def test_decay_at_a_zero_logit_starts_at_its_quantiles(
    dt_init: str, expected: tuple[float, ...]
) -> None:
    gate = DecayGate(200_000, None, dt_init)
    gate.reset_parameters(generator())
    decay = gate(torch.zeros(200_000)).detach().exp()
    for found, wanted in zip(decay.quantile(torch.tensor(QUANTILES)), expected, strict=True):
        assert float(found) == pytest.approx(wanted, rel=0.05)


def test_ones_starts_almost_without_memory() -> None:
    gate = DecayGate(100_001, None, "ones")
    gate.reset_parameters(generator())
    assert torch.equal(gate.dt_bias, torch.ones(100_001))
    assert float(gate(torch.zeros(100_001)).detach().exp().median()) == pytest.approx(
        1.4e-5, rel=0.05
    )


def test_the_step_size_of_a_zero_logit_is_log_uniform() -> None:
    gate = DecayGate(1_000, 64, "loguniform")
    gate.reset_parameters(generator())
    log_dt = F.softplus(gate.dt_bias.detach()).log()
    assert float(log_dt.min()) >= math.log(1e-3) - 1e-4
    assert float(log_dt.max()) <= math.log(1e-1) + 1e-4
    width = math.log(100)
    assert float(log_dt.mean()) == pytest.approx(math.log(1e-2), abs=0.02 * width)
    assert float(log_dt.std()) == pytest.approx(width / math.sqrt(12), rel=0.02)
    rates = gate.a_log.detach().exp()
    assert 1 <= float(rates.min()) <= float(rates.max()) <= 16


@pytest.mark.parametrize("channels", [None, 3], ids=["per_head", "per_channel"])
def test_log_decay_is_its_formula_in_float32(channels: int | None) -> None:
    gate = DecayGate(2, channels, "loguniform")
    gate.reset_parameters(generator())
    logits = torch.randn(4, 5, 2 * (channels or 1), generator=generator(1)).bfloat16()
    found = gate(logits)
    assert found.dtype == torch.float32
    assert (found <= 0).all()
    for head in range(2):
        for c in range(channels or 1):
            i = head * (channels or 1) + c
            step = F.softplus(logits[..., i].float() + gate.dt_bias[i])
            expected = -gate.a_log[head].exp() * step
            got = found[..., head] if channels is None else found[..., head, c]
            torch.testing.assert_close(got, expected)


def test_log_decay_is_float32_in_a_bfloat16_model() -> None:
    gate = DecayGate(2, 3, "loguniform")
    gate.reset_parameters(generator())
    assert gate.bfloat16()(torch.zeros(1, 6, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_decay_of_twenty_per_token_is_finite_with_its_gradient() -> None:
    gate = DecayGate(1, None, "ones")
    with torch.no_grad():
        gate.a_log.fill_(math.log(16))
        gate.dt_bias.fill_(1.0)
    gate(torch.tensor([[100.0], [-100.0]])).sum().backward()
    assert torch.isfinite(gate.a_log.grad).all()
    assert torch.isfinite(gate.dt_bias.grad).all()


@pytest.mark.parametrize(
    ("layer", "name", "std"),
    [
        (Projection(500, (("a", 300), ("b", 100))), "weight", 0.02),
        (Projection(500, (("out", 400),), std=residual_std(8)), "weight", 0.02 / 4),
        (Embedding(1_000, 200), "weight", 0.02),
        (ShortConvolution(50_000), "weight", 0.5 / math.sqrt(3)),
    ],
    ids=["projection", "residual", "embedding", "convolution"],
)
def test_values_start_around_zero_with_their_spread(layer: Layer, name: str, std: float) -> None:
    values = started(layer).get_parameter(name).detach()
    assert float(values.mean()) == pytest.approx(0, abs=0.02 * std)
    assert float(values.std()) == pytest.approx(std, rel=0.02)


def test_convolutions_start_within_half() -> None:
    weight = started(ShortConvolution(50_000)).get_parameter("weight").detach()
    assert float(weight.abs().max()) <= 0.5


def test_gains_start_at_one_and_biases_at_zero() -> None:
    assert torch.equal(started(RMSNorm(7, 1e-5)).get_parameter("weight"), torch.ones(7))
    biased = started(Projection(3, (("a", 4),), has_bias=True))
    assert torch.equal(biased.get_parameter("bias"), torch.zeros(4))


def test_a_fused_projection_is_its_blocks() -> None:
    fused = Projection(5, (("a", 2), ("b", 3)))
    fused.reset_parameters(generator())
    x = torch.randn(4, 5, generator=generator(1))
    a, b = fused.split(fused(x))
    torch.testing.assert_close(a, x @ fused.weight[:2].T)
    torch.testing.assert_close(b, x @ fused.weight[2:].T)
    assert fused.parameter_roles() == {"weight": ParameterInfo("matrix", (("a", 2), ("b", 3)))}


def test_swiglu_is_its_formula() -> None:
    mlp = SwiGLU(6, 10, num_layers=2)
    mlp.gate_up.reset_parameters(generator(0))
    mlp.down.reset_parameters(generator(1))
    x = torch.randn(3, 6, generator=generator(2))
    gate, up = mlp.gate_up.weight[:10], mlp.gate_up.weight[10:]
    expected = (F.silu(x @ gate.T) * (x @ up.T)) @ mlp.down.weight.T
    torch.testing.assert_close(mlp(x), expected)


def test_a_parameter_outside_a_layer_is_refused() -> None:
    class Stray(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(2))

    with pytest.raises(TypeError, match=r"Stray at 0 owns parameters \['weight'\]"):
        collect_parameter_info(torch.nn.Sequential(Stray()))


def test_an_unknown_role_is_refused() -> None:
    with pytest.raises(ValueError, match="'weights' is not one of embedding"):
        ParameterInfo("weights")
