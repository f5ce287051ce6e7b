"""Each mixer is its equations: projections, convolution, gates and rule written out token by token.

B batch, T time, H key heads, HV value heads, K key dim, V value dim.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import models.mixers
from models.configs import (
    MIXER_CONFIGS,
    DecayConfig,
    DeltaNetConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GatedLinearConfig,
    KimiDeltaConfig,
    LinearConfig,
    MixerConfig,
    ModelConfig,
    SoftmaxConfig,
)
from models.layers import DecayGate
from models.mixer import Mixer
from models.mixers import MIXERS
from models.mixers.gated_linear import GatedLinear
from models.recurrent import RecurrentMixer
from tests.models.small_models import SMALL, build, relative_rms

H, HV, K, V, D = 2, 4, 8, 12, SMALL.d_model
TOLERANCE = 1e-5


def shaken(mixer: Mixer) -> Mixer:
    """The mixer with every parameter moved, so that gains of one and biases of zero count."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return mixer


def mixer_of(options: MixerConfig, softmax: SoftmaxConfig | None = None) -> Mixer:
    config = dataclasses.replace(SMALL, mixer=options, softmax=softmax or SoftmaxConfig())
    mixer = build(config).blocks[0].mixer
    assert isinstance(mixer, Mixer)
    return shaken(mixer)


def inputs() -> Tensor:
    return torch.randn(2, 19, D, generator=torch.Generator().manual_seed(3))


def rms(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + SMALL.norm_eps).sqrt() * gain


def unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def convolved(mixer: RecurrentMixer, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k repeated per value head, v, and what is left of the projection."""
    rows = x @ mixer.in_proj.weight.T
    channels, taps = mixer.conv.weight.shape
    padded = F.pad(rows[..., :channels], (0, 0, taps - 1, 0))
    mixed = F.silu(
        sum(padded[:, i : i + x.shape[1]] * mixer.conv.weight[:, i] for i in range(taps))
    )
    q = mixed[..., : H * K].reshape(*x.shape[:2], H, K).repeat_interleave(HV // H, 2)
    k = mixed[..., H * K : 2 * H * K].reshape(*x.shape[:2], H, K).repeat_interleave(HV // H, 2)
    return q, k, mixed[..., 2 * H * K :].reshape(*x.shape[:2], HV, V), rows[..., channels:]


def delta(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, b: Tensor, w: Tensor) -> Tensor:
    """S~ = Diag(α) S, u = w ∘ v − S~ᵀ(b ∘ k), S = S~ + k uᵀ, o = K^-½ Sᵀ q."""
    q, k = unit(q), unit(k)
    state, outs = torch.zeros(q.shape[0], HV, K, V), []
    for t in range(q.shape[1]):
        state = alpha[:, t, ..., None] * state
        read = torch.einsum("bhkv,bhk->bhv", state, b[:, t] * k[:, t])
        written = w[:, t] * v[:, t] - read
        state = state + k[:, t, ..., None] * written[..., None, :]
        outs.append(K**-0.5 * torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outs, 1)


def alpha_of(gate: DecayGate, logits: Tensor) -> Tensor:
    """exp(−exp(A_log) softplus(a + dt_bias)), `[B, T, heads, channels]`."""
    step = F.softplus(logits + gate.dt_bias).reshape(*logits.shape[:2], gate.heads, -1)
    return (-gate.a_log.exp()[:, None] * step).exp()


def finished(mixer: RecurrentMixer, out: Tensor, gate: Tensor | float = 1.0) -> Tensor:
    return (rms(out, mixer.out_norm.weight) * gate).flatten(-2) @ mixer.out_proj.weight.T


def expected_linear(mixer: RecurrentMixer, x: Tensor) -> Tensor:
    q, k, v, _ = convolved(mixer, x)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    scores = torch.einsum("bthk,bshk->bhts", q, k).tril()
    weights = scores / (scores.sum(-1, keepdim=True) + 1e-6)
    return finished(mixer, torch.einsum("bhts,bshv->bthv", weights, v))


def expected_linear_unnormalized(mixer: RecurrentMixer, x: Tensor) -> Tensor:
    q, k, v, _ = convolved(mixer, x)
    scores = K**-0.5 * torch.einsum("bthk,bshk->bhts", unit(q), unit(k)).tril()
    return finished(mixer, torch.einsum("bhts,bshv->bthv", scores, v))


def expected_deltanet(mixer: RecurrentMixer, x: Tensor, scale: float = 1.0) -> Tensor:
    q, k, v, beta = convolved(mixer, x)
    strength = scale * beta.sigmoid()[..., None]
    return finished(mixer, delta(q, k, v, torch.ones_like(k), strength, strength))


def expected_gated_deltanet(mixer: RecurrentMixer, x: Tensor, scale: float = 1.0) -> Tensor:
    q, k, v, rows = convolved(mixer, x)
    z, beta, a = rows.split([HV * V, HV, HV], -1)
    strength = scale * beta.sigmoid()[..., None]
    out = delta(q, k, v, alpha_of(mixer.decay, a).expand_as(k), strength, strength)
    return finished(mixer, out, F.silu(z).reshape(*x.shape[:2], HV, V))


def expected_kimi_delta(mixer: RecurrentMixer, x: Tensor, scale: float = 1.0) -> Tensor:
    q, k, v, beta = convolved(mixer, x)
    decay_low, output_low = (x @ mixer.bottleneck.weight.T).split([V, V], -1)
    strength = scale * beta.sigmoid()[..., None]
    alpha = alpha_of(mixer.decay, decay_low @ mixer.decay_up.weight.T)
    gate = (output_low @ mixer.output_up.weight.T + mixer.output_up.bias).sigmoid()
    out = delta(q, k, v, alpha, strength, strength)
    return finished(mixer, out, gate.reshape(*x.shape[:2], HV, V))


def expected_gated_deltanet2(mixer: RecurrentMixer, x: Tensor, scale: float = 1.0) -> Tensor:
    q, k, v, rows = convolved(mixer, x)
    if mixer.bottleneck is None:
        erase, write, a, z = rows.split([H * K, HV * V, H * K, HV * V], -1)
    else:
        erase, write = rows.split([H * K, HV * V], -1)
        decay_low, output_low = (x @ mixer.bottleneck.weight.T).split([V, V], -1)
        a = decay_low @ mixer.decay_up.weight.T
        z = output_low @ mixer.output_up.weight.T + mixer.output_up.bias
    b = scale * erase.sigmoid().reshape(*x.shape[:2], H, K).repeat_interleave(HV // H, 2)
    alpha = alpha_of(mixer.decay, a).repeat_interleave(HV // H, 2)
    out = delta(q, k, v, alpha, b, write.sigmoid().reshape(*x.shape[:2], HV, V))
    return finished(mixer, out, F.silu(z).reshape(*x.shape[:2], HV, V))


def expected_gated_linear(mixer: GatedLinear, x: Tensor) -> Tensor:
    blocks = (x @ mixer.in_proj.weight.T).split(mixer.in_proj.rows, -1)
    q, k = (
        (F.elu(rows) + 1).reshape(*x.shape[:2], H, K).repeat_interleave(HV // H, 2)
        for rows in blocks[:2]
    )
    v = blocks[2].reshape(*x.shape[:2], HV, V)
    alpha = torch.ones_like(k)
    if mixer.decay is not None:
        alpha = alpha_of(mixer.decay, blocks[4]).expand_as(k)
    state, key_sum, outs = torch.zeros(len(x), HV, K, V), torch.zeros(len(x), HV, K), []
    for t in range(x.shape[1]):
        state = alpha[:, t, ..., None] * state + k[:, t, ..., None] * v[:, t, :, None]
        key_sum = alpha[:, t] * key_sum + k[:, t]
        read = torch.einsum("bhkv,bhk->bhv", state, q[:, t])
        outs.append(read / ((key_sum * q[:, t]).sum(-1, keepdim=True) + 1e-6))
    gated = torch.stack(outs, 1).flatten(-2) * blocks[3].sigmoid()
    return gated @ mixer.out_proj.weight.T


def expected_softmax(mixer: Mixer, x: Tensor) -> Tensor:
    heads, kv_heads, dim = 4, 2, 8
    blocks = (x @ mixer.in_proj.weight.T).split(mixer.in_proj.rows, -1)
    q, k, v = (
        rows.reshape(*x.shape[:2], count, dim)
        for rows, count in zip(blocks[:3], (heads, kv_heads, kv_heads), strict=True)
    )
    if mixer.q_norm is not None:
        q, k = rms(q, mixer.q_norm.weight), rms(k, mixer.k_norm.weight)
    angles = torch.arange(x.shape[1])[:, None] * 5e5 ** (-torch.arange(0, dim, 2) / dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    q, k = (
        torch.view_as_real(turn * torch.complex(y[..., : dim // 2], y[..., dim // 2 :]))
        .transpose(-1, -2)
        .flatten(-2)
        for y in (q, k)
    )
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * dim**-0.5
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    if mixer.window is not None:
        later = later | torch.ones_like(later).tril(-mixer.window)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    out = torch.einsum("bhts,bshd->bthd", weights, v).flatten(-2)
    if len(blocks) == 4:
        out = out * blocks[3].sigmoid()
    return out @ mixer.out_proj.weight.T


def doubled(expected: Callable[..., Tensor]) -> Callable[[RecurrentMixer, Tensor], Tensor]:
    return lambda mixer, x: expected(mixer, x, 2.0)


CASES: dict[str, tuple[MixerConfig, Callable[..., Tensor]]] = {
    "softmax": (MixerConfig(), expected_softmax),
    "linear": (LinearConfig(), expected_linear),
    "linear-unused_beta": (LinearConfig(unused_beta=True), expected_linear),
    "linear_unnormalized": (
        MIXER_CONFIGS["linear_unnormalized"](),
        expected_linear_unnormalized,
    ),
    "gated_linear": (GatedLinearConfig(), expected_gated_linear),
    "gated_linear-head": (GatedLinearConfig(decay="head"), expected_gated_linear),
    "gated_linear-channel": (GatedLinearConfig(decay="channel"), expected_gated_linear),
    "deltanet": (DeltaNetConfig(), expected_deltanet),
    "deltanet-negative": (DeltaNetConfig(negative_eigenvalues=True), doubled(expected_deltanet)),
    "gated_deltanet": (GatedDeltaNetConfig(), expected_gated_deltanet),
    "gated_deltanet-ones": (GatedDeltaNetConfig(dt_init="ones"), expected_gated_deltanet),
    "gated_deltanet-negative": (
        GatedDeltaNetConfig(negative_eigenvalues=True),
        doubled(expected_gated_deltanet),
    ),
    "kimi_delta": (KimiDeltaConfig(), expected_kimi_delta),
    "kimi_delta-negative": (
        KimiDeltaConfig(negative_eigenvalues=True),
        doubled(expected_kimi_delta),
    ),
    "gated_deltanet2-full": (GatedDeltaNet2Config(), expected_gated_deltanet2),
    "gated_deltanet2-lowrank": (GatedDeltaNet2Config(variant="lowrank"), expected_gated_deltanet2),
    "gated_deltanet2-negative": (
        GatedDeltaNet2Config(negative_eigenvalues=True),
        doubled(expected_gated_deltanet2),
    ),
}


@pytest.mark.parametrize(("options", "expected"), CASES.values(), ids=CASES.keys())
def test_a_mixer_is_its_equations(options: MixerConfig, expected: Callable[..., Tensor]) -> None:
    mixer, x = mixer_of(options), inputs()
    with torch.no_grad():
        assert relative_rms(mixer(x), expected(mixer, x)) < TOLERANCE


@pytest.mark.parametrize("gate", [False, True], ids=["", "gate"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_softmax_options_are_their_equations(gate: bool, norm: bool) -> None:  # noqa: FBT001
    mixer = mixer_of(MixerConfig(), SoftmaxConfig(output_gate=gate, qk_norm=norm))
    x = inputs()
    with torch.no_grad():
        assert relative_rms(mixer(x), expected_softmax(mixer, x)) < TOLERANCE


@pytest.mark.parametrize("window", [1, 6, 40])
def test_a_window_reads_its_last_tokens(window: int) -> None:
    mixer, x = mixer_of(MixerConfig(), SoftmaxConfig(window=window)), inputs()
    with torch.no_grad():
        assert relative_rms(mixer(x), expected_softmax(mixer, x)) < TOLERANCE


@pytest.mark.parametrize("options", [GatedDeltaNetConfig, KimiDeltaConfig, GatedDeltaNet2Config])
@pytest.mark.parametrize("dt_init", ["loguniform", "ones"])
def test_every_gated_rule_starts_its_decay_as_asked(
    options: type[DecayConfig], dt_init: str
) -> None:
    config = dataclasses.replace(SMALL, mixer=options(dt_init=dt_init))
    decay = build(config).blocks[0].mixer.decay
    assert torch.equal(decay.dt_bias, torch.ones_like(decay.dt_bias)) == (dt_init == "ones")
    sizes = {
        "gated_deltanet": (HV, HV),
        "kimi_delta": (HV, HV * K),
        "gated_deltanet2": (H, H * K),
    }
    assert (len(decay.a_log), len(decay.dt_bias)) == sizes[config.mixer.name]


def test_every_file_of_the_folder_is_registered() -> None:
    folder = Path(models.mixers.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    registered = {module.__module__.rsplit(".", 1)[1] for _, module in MIXERS.values()}
    assert registered == files


def test_the_registry_names_the_config_classes() -> None:
    assert {name: options for name, (options, _) in MIXERS.items()} == MIXER_CONFIGS
    for name, options in MIXER_CONFIGS.items():
        assert ModelConfig(mixer=options(name=name)).layer_mixers()[0] == name
