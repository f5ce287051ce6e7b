"""Routed signals are the ones named, reach the layers they should, and start without effect."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from models.attention_residuals import SourceQuery, Sources
from models.configs import (
    DeltaNetConfig,
    GatedDeltaNetConfig,
    ModelConfig,
    RoutingConfig,
)
from models.lm import LanguageModel
from models.recurrent import RecurrentMixer
from models.routing import HiddenRouting, SurpriseGate
from models.routing_config import ROUTING_KINDS
from tests.models.small_models import (
    ROUTED_CONFIGS,
    SMALL,
    build,
    build_moved,
    draw_tokens,
    relative_rms,
)

H, HV, K, V, D = 2, 4, 8, 12, SMALL.d_model
TOLERANCE = 1e-5
RESIDUALS = ("written", "decayed", "paper")

HOST = dataclasses.replace(SMALL, mixer=GatedDeltaNetConfig())
HYBRID = dataclasses.replace(HOST, stack="hybrid", softmax_layers=[1])


def routed(host: ModelConfig, **fields: Any) -> ModelConfig:
    return dataclasses.replace(host, routing=RoutingConfig(**fields))


def host_mixer(config: ModelConfig) -> RecurrentMixer:
    """A memory layer with decays and write strengths far from one, which no error may confuse."""
    mixer = build(config).blocks[0].mixer
    assert isinstance(mixer, RecurrentMixer)
    with torch.no_grad():
        mixer.in_proj.weight.mul_(20)
    return mixer


def draw_inputs(length: int = 19) -> Tensor:
    return torch.randn(2, length, D, generator=torch.Generator().manual_seed(3))


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def errors_by_hand(mixer: RecurrentMixer, x: Tensor) -> dict[str, Tensor]:
    """The three errors from a plain loop over tokens, and what they must differ by."""
    rows = x @ mixer.in_proj.weight.T
    convolved, _ = mixer._convolve(rows[..., : mixer.conv_width], None)
    _, k, v = mixer._split_heads(convolved)
    k = unit(k).repeat_interleave(HV // H, 2)
    gates = rows[..., mixer.conv_width :]
    if mixer.op == "gated_delta_rule":
        beta = gates[..., HV * V : HV * V + HV].sigmoid()
        alpha = mixer.decay(gates[..., HV * V + HV :]).exp()
    else:
        beta, alpha = gates.sigmoid(), torch.ones_like(gates)
    state = torch.zeros(x.shape[0], HV, K, V)
    errors: dict[str, list[Tensor]] = {name: [] for name in RESIDUALS}
    for t in range(x.shape[1]):
        read = torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        a, b = alpha[:, t, :, None], beta[:, t, :, None]
        written = b * (v[:, t] - a * read)
        state = a[..., None] * state + k[:, t, ..., None] * written[..., None, :]
        errors["written"].append(written)
        errors["decayed"].append(v[:, t] - a * read)
        errors["paper"].append(v[:, t] - read)
    return {name: torch.stack(steps, 1) for name, steps in errors.items()}


@pytest.mark.parametrize("residual", RESIDUALS)
@pytest.mark.parametrize("host", [GatedDeltaNetConfig, DeltaNetConfig], ids=lambda c: c.__name__)
@pytest.mark.parametrize("length", [1, 19, 70])
def test_the_routed_error_is_the_one_named(
    residual: str, host: type[DeltaNetConfig], length: int
) -> None:
    mixer, x = host_mixer(dataclasses.replace(SMALL, mixer=host())), draw_inputs(length)
    with torch.no_grad():
        expected = errors_by_hand(mixer, x)
        _, _, signals = mixer.routed(x, None, residual=residual)
    assert signals.error is not None
    assert relative_rms(signals.error, expected[residual]) < TOLERANCE


def test_the_three_errors_differ_where_decay_and_strength_are_not_one() -> None:
    with torch.no_grad():
        errors = errors_by_hand(host_mixer(HOST), draw_inputs())
    # Far beyond what rounding could explain, so that a mistaken name fails the test above.
    assert relative_rms(errors["written"], errors["decayed"]) > 1_000 * TOLERANCE
    assert relative_rms(errors["paper"], errors["decayed"]) > 1_000 * TOLERANCE
    assert relative_rms(errors["paper"], errors["written"]) > 1_000 * TOLERANCE


@pytest.mark.parametrize("residual", RESIDUALS)
def test_the_error_of_pieces_and_of_single_tokens_is_that_of_the_whole(residual: str) -> None:
    mixer, x = host_mixer(HOST), draw_inputs()
    with torch.no_grad():
        _, _, whole = mixer.routed(x, None, residual=residual)
        state = mixer.initial_state(2, torch.device("cpu"))
        _, state, first = mixer.routed(x[:, :8], state, residual=residual)
        pieces = [first.error]
        _, state, second = mixer.routed(x[:, 8:12], state, residual=residual)
        pieces.append(second.error)
        for t in range(12, 19):
            _, state, one = mixer.routed(x[:, t], state, residual=residual)
            assert one.error is not None
            pieces.append(one.error[:, None])
    assert whole.error is not None
    assert relative_rms(torch.cat([p for p in pieces if p is not None], 1), whole.error) < TOLERANCE


def test_a_gradient_through_the_plain_error_is_that_of_the_loop() -> None:
    mixer, x = host_mixer(HOST), draw_inputs()
    weights = torch.randn(2, 19, HV, V, generator=torch.Generator().manual_seed(5))
    found, expected = [], []
    for residual in RESIDUALS:
        _, _, signals = mixer.routed(x, None, residual=residual)
        assert signals.error is not None
        found.append(torch.autograd.grad((signals.error * weights).sum(), mixer.in_proj.weight)[0])
        by_hand = (errors_by_hand(mixer, x)[residual] * weights).sum()
        expected.append(torch.autograd.grad(by_hand, mixer.in_proj.weight)[0])
    for got, wanted in zip(found, expected, strict=True):
        assert relative_rms(got, wanted) < 1e-4


def test_a_first_token_with_full_strength_has_its_value_as_error() -> None:
    """An empty memory returns nothing, so every error but the scaled one is the value itself."""
    mixer, x = host_mixer(HOST), draw_inputs(1)
    with torch.no_grad():
        for residual in ("decayed", "paper"):
            _, _, signals = mixer.routed(x, None, residual=residual)
            assert torch.equal(signals.error, signals.value)


@pytest.mark.parametrize("config", ROUTED_CONFIGS.values(), ids=ROUTED_CONFIGS.keys())
def test_routing_starts_without_effect_and_then_has_one(config: ModelConfig) -> None:
    tokens = draw_tokens()
    host = build(dataclasses.replace(config, routing=RoutingConfig()))
    with torch.no_grad():
        expected, start = host(tokens), build(config)(tokens)
        moved = build_moved(config)(tokens)
    if config.routing.has_attention_residuals:
        # The plain average in the place of the sum is another model from the start.
        assert not torch.equal(start, expected)
    else:
        assert torch.equal(start, expected)
    assert relative_rms(moved, start) > 1e-3


@pytest.mark.parametrize("kind", [k for k in ROUTING_KINDS if RoutingConfig(kind=k).hidden_signal])
def test_one_step_moves_the_projection_off_zero(kind: str) -> None:
    model, tokens = build(routed(HYBRID, kind=kind)), draw_tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    for layer in (0, 2):
        assert model.blocks[layer].routing.up.weight.abs().max() > 0


@pytest.mark.parametrize("host", [HOST, HYBRID], ids=["pure", "hybrid"])
@pytest.mark.parametrize("gamma", ["scalar", "head", "channel"])
def test_cler_adds_the_error_of_the_nearest_lower_memory_layer(
    host: ModelConfig, gamma: str
) -> None:
    model, tokens = build_moved(routed(host, kind="cler", gamma=gamma)), draw_tokens()
    error: Tensor | None = None
    with torch.no_grad():
        x = model.embedding(tokens)
        for block in model.blocks:
            normed = block.mixer_norm(x)
            if isinstance(block.mixer, RecurrentMixer):
                factor = block.injection.gamma
                factor = factor[:, None] if gamma == "head" else factor
                shift = None if error is None else factor * error
                out, _, signals = block.mixer.routed(normed, None, shift=shift, residual="written")
                error = signals.error
            else:
                out = block.mixer(normed)
            x = x + out
            x = x + block.mlp(block.mlp_norm(x))
        expected = model.head(model.final_norm(x))
        assert relative_rms(model(tokens), expected) < TOLERANCE


def test_gamma_starts_where_it_is_told() -> None:
    model = build(routed(HOST, kind="cler", gamma="channel", gamma_init=0.05))
    for block in model.blocks:
        assert torch.equal(block.injection.gamma, torch.full((HV, V), 0.05))


def hidden_by_hand(model: LanguageModel, tokens: Tensor, kind: str) -> Tensor:
    """The logits of a pure stack with P s written out."""
    x = model.embedding(tokens)
    for block in model.blocks:
        out, _, (value, error) = block.mixer.routed(block.mixer_norm(x), None, residual="written")
        x = x + out
        x = x + block.mlp(block.mlp_norm(x))
        if kind == "surprise_gated":
            gate = block.routing.gate
            surprise = error.norm(dim=-1) / (value.norm(dim=-1) + 1e-6)
            value = value * (gate.slope * surprise + gate.offset).sigmoid()[..., None]
        signal = {
            "clvr": value.flatten(-2),
            "cler_h": error.flatten(-2),
            "concatenated": torch.cat([error.flatten(-2), value.flatten(-2)], -1),
            "surprise_gated": value.flatten(-2),
            "self_transform": x,
        }[kind]
        if block.routing.is_normalized:
            signal = signal / (signal.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        if block.routing.down is not None:
            signal = signal @ block.routing.down.weight.T
        x = x + signal @ block.routing.up.weight.T
    return model.head(model.final_norm(x))


@pytest.mark.parametrize(
    "kind", ["clvr", "cler_h", "concatenated", "surprise_gated", "self_transform"]
)
@pytest.mark.parametrize("fields", [{}, {"rank": 3}, {"normalized": True}], ids=str)
def test_hidden_routing_is_its_equation(kind: str, fields: dict[str, Any]) -> None:
    model, tokens = build_moved(routed(HOST, kind=kind, **fields)), draw_tokens()
    with torch.no_grad():
        assert relative_rms(model(tokens), hidden_by_hand(model, tokens, kind)) < TOLERANCE


def test_the_down_projection_starts_as_torch_starts_a_linear_layer() -> None:
    config = routed(HOST, kind="clvr", rank=512)
    routing = HiddenRouting(config)
    assert routing.down is not None
    routing.down.reset_parameters(torch.Generator().manual_seed(0))
    weight, bound = routing.down.weight.detach(), (HV * V) ** -0.5
    assert float(weight.abs().max()) <= bound
    assert float(weight.std()) == pytest.approx(bound / 3**0.5, rel=0.03)


def test_a_surprise_gate_without_error_is_half_open_and_has_finite_gradients() -> None:
    gate = SurpriseGate(HV)
    gate.reset_parameters(torch.Generator())
    value = draw_inputs()[..., : HV * 2].unflatten(-1, (HV, 2)).requires_grad_()
    error = torch.zeros_like(value, requires_grad=True)
    out = gate(value, error)
    torch.testing.assert_close(out, value / 2)
    out.sum().backward()
    assert error.grad is not None
    assert torch.isfinite(error.grad).all()


def test_attention_residuals_start_from_the_plain_average() -> None:
    """Every sub-layer reads the mean of embedding and contributions before it; so does the head."""
    model, tokens = build(routed(HYBRID, kind="attention_residuals")), draw_tokens()
    with torch.no_grad():
        sources = [model.embedding(tokens)]
        for block in model.blocks:
            for norm, part in ((block.mixer_norm, block.mixer), (block.mlp_norm, block.mlp)):
                sources.append(part(norm(torch.stack(sources).mean(0))))
        expected = model.head(model.final_norm(torch.stack(sources).mean(0)))
        assert relative_rms(model(tokens), expected) < TOLERANCE


def test_a_query_weighs_sources_by_their_normalised_match() -> None:
    query = SourceQuery(D)
    with torch.no_grad():
        query.weight.copy_(draw_inputs()[0, 0])
        parts = [draw_inputs()[:, i] * (i + 1) for i in range(3)]
        sources = Sources(parts[0])
        for part in parts[1:]:
            sources.append(part)
        found = query(sources)
        stacked = torch.stack(parts)
        normed = stacked / (stacked.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        shares = (normed @ query.weight).softmax(0)
        torch.testing.assert_close(found, (shares[..., None] * stacked).sum(0))
