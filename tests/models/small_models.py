"""Small models of every kind, built from a seed."""

import dataclasses

import torch

from models.configs import (
    MIXER_CONFIGS,
    GatedDeltaNet2Config,
    HeadLayout,
    LinearConfig,
    ModelConfig,
    SoftmaxConfig,
)
from models.lm import LanguageModel, build_model

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
    configs["softmax-gate_norm"] = dataclasses.replace(
        SMALL, softmax=SoftmaxConfig(output_gate=True, qk_norm=True)
    )
    return configs


CONFIGS = _configs()


def build(config: ModelConfig, seed: int = 0) -> LanguageModel:
    """A model in float32 on the CPU."""
    return build_model(config, VOCAB, torch.Generator().manual_seed(seed))


def draw_tokens(batch: int = 2, length: int = 21, seed: int = 1) -> torch.Tensor:
    """Random tokens; by default several convolution widths and no power of two."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def relative_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    """rms(got − expected) / rms(expected)."""
    return float((got - expected).square().mean().sqrt() / expected.square().mean().sqrt())
