"""Small models of every kind, built from a seed."""

import dataclasses

import torch

from models.configs import (
    MIXER_CONFIGS,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GatedLinearConfig,
    HeadLayout,
    KimiDeltaConfig,
    LinearConfig,
    ModelConfig,
    RoutingConfig,
    SoftmaxConfig,
)
from models.lm import LanguageModel, build_model
from models.routing_config import ROUTING_KINDS

VOCAB = 61

# Value heads share key heads, query heads share key-value heads, K differs from V: what equal
# numbers would hide.
UNEVEN_HEADS = HeadLayout(
    softmax_heads=4,
    softmax_kv_heads=2,
    softmax_head_dim=8,
    key_heads=2,
    value_heads=4,
    key_dim=8,
    value_dim=12,
)

SMALL = ModelConfig(num_layers=3, d_model=24, ffn_dim=40, heads=UNEVEN_HEADS)


def _configs() -> dict[str, ModelConfig]:
    """Every mixer in every stack that it allows, and the options that add parameters."""
    configs = {}
    for name, options in MIXER_CONFIGS.items():
        configs[f"{name}-pure"] = dataclasses.replace(SMALL, mixer=options())
        if name != "softmax":
            configs[f"{name}-hybrid"] = dataclasses.replace(
                SMALL, mixer=options(), stack="hybrid", softmax_layers=[1]
            )
    configs["gated_deltanet2-lowrank"] = dataclasses.replace(
        SMALL, mixer=GatedDeltaNet2Config(variant="lowrank")
    )
    configs["linear-unused_beta"] = dataclasses.replace(SMALL, mixer=LinearConfig(unused_beta=True))
    for decay in ("head", "channel"):
        configs[f"gated_linear-{decay}"] = dataclasses.replace(
            SMALL, mixer=GatedLinearConfig(decay=decay)
        )
    configs["softmax-window"] = dataclasses.replace(SMALL, softmax=SoftmaxConfig(window=6))
    configs["deltanet-window_hybrid"] = dataclasses.replace(
        configs["deltanet-hybrid"], softmax=SoftmaxConfig(window=6)
    )
    configs["softmax-gate_norm"] = dataclasses.replace(
        SMALL, softmax=SoftmaxConfig(output_gate=True, qk_norm=True)
    )
    return configs


def _routed_configs() -> dict[str, ModelConfig]:
    """Every kind of routing in a hybrid, whose softmax layer lies between two memory layers."""
    host = dataclasses.replace(
        SMALL, mixer=GatedDeltaNetConfig(), stack="hybrid", softmax_layers=[1]
    )
    kinds = {kind: RoutingConfig(kind=kind) for kind in ROUTING_KINDS if kind != "none"}
    kinds |= {
        f"cler-{gamma}": RoutingConfig(kind="cler", gamma=gamma) for gamma in ("head", "channel")
    }
    kinds |= {
        f"cler-{name}": RoutingConfig(kind="cler", residual=name) for name in ("decayed", "paper")
    }
    kinds["cler_h-paper"] = RoutingConfig(kind="cler_h", residual="paper")
    kinds["clvr-rank"] = RoutingConfig(kind="clvr", rank=3)
    kinds["clvr-normalized"] = RoutingConfig(kind="clvr", normalized=True)
    kinds["self_transform-rank"] = RoutingConfig(kind="self_transform", rank=5)
    configs = {
        f"routed-{name}": dataclasses.replace(host, routing=routing)
        for name, routing in kinds.items()
    }
    configs["routed-kimi_delta"] = dataclasses.replace(
        host, mixer=KimiDeltaConfig(), routing=RoutingConfig(kind="cler_h")
    )
    configs["routed-linear"] = dataclasses.replace(
        host, mixer=LinearConfig(), routing=RoutingConfig(kind="clvr")
    )
    configs["routed-softmax"] = dataclasses.replace(
        SMALL, routing=RoutingConfig(kind="attention_residuals")
    )
    return configs


ROUTED_CONFIGS = _routed_configs()
CONFIGS = _configs() | ROUTED_CONFIGS


def build(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A model in float32 on the CPU, as it starts."""
    return build_model(config, VOCAB, torch.Generator().manual_seed(seed))


def build_moved(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A model whose routing has left its start at zero, so that what is routed counts."""
    model, generator = build(config, seed), torch.Generator().manual_seed(seed + 1)
    info = model.parameter_info()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if info[name].role.startswith("routing"):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def draw_tokens(batch: int = 2, length: int = 21, seed: int = 1) -> torch.Tensor:
    """Random tokens; by default several convolution widths and no power of two."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    """rms(got − expected) / rms(expected)."""
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())
