"""What routing adds is what was published, and routing without its signal is refused."""

import dataclasses
from typing import Any

import pytest

from models.accounting import count_parameters
from models.configs import (
    MIXER_CONFIGS,
    DeltaNetConfig,
    GatedDeltaNetConfig,
    HeadLayout,
    ModelConfig,
    RoutingConfig,
    SoftmaxConfig,
)
from tests.models.small_models import SMALL


def routed(host: ModelConfig, **fields: Any) -> ModelConfig:
    return dataclasses.replace(host, routing=RoutingConfig(**fields))


SOFTMAX_350M = {"softmax_heads": 16, "softmax_kv_heads": 4, "softmax_head_dim": 64}
GDN_20 = ModelConfig(
    mixer=GatedDeltaNetConfig(),
    stack="hybrid",
    softmax=SoftmaxConfig(output_gate=True),
    num_layers=20,
    d_model=1024,
    ffn_dim=2816,
    heads=HeadLayout(**SOFTMAX_350M, key_heads=4, value_heads=8, key_dim=64, value_dim=64),
)
DELTANET_20 = dataclasses.replace(
    GDN_20,
    mixer=DeltaNetConfig(),
    softmax=SoftmaxConfig(),
    heads=HeadLayout(**SOFTMAX_350M, key_heads=4, value_heads=4, key_dim=64, value_dim=128),
)
GDN_1P3B = dataclasses.replace(
    GDN_20,
    num_layers=24,
    d_model=2048,
    ffn_dim=5632,
    heads=HeadLayout(
        softmax_heads=16,
        softmax_kv_heads=8,
        softmax_head_dim=128,
        key_heads=8,
        value_heads=16,
        key_dim=64,
        value_dim=64,
    ),
)


@pytest.mark.parametrize(
    ("host", "fields", "added"),
    [
        (GDN_20, {"kind": "cler"}, 14),
        (GDN_20, {"kind": "cler_h"}, 7_340_032),
        (GDN_20, {"kind": "clvr"}, 7_340_032),
        (GDN_20, {"kind": "clvr", "rank": 64}, 1_376_256),
        (GDN_20, {"kind": "clvr", "rank": 16}, 344_064),
        (GDN_20, {"kind": "concatenated"}, 2 * 7_340_032),
        (GDN_20, {"kind": "attention_residuals"}, 40_960),
        (GDN_20, {"kind": "attention_residuals_clvr"}, 7_340_032 + 40_960),
        (DELTANET_20, {"kind": "clvr"}, 7_340_032),
        (GDN_1P3B, {"kind": "clvr"}, 33_554_432),
        (GDN_1P3B, {"kind": "cler_h", "rank": 64}, 3_145_728),
    ],
    ids=str,
)
def test_added_parameters_are_the_published_ones(
    host: ModelConfig, fields: dict[str, Any], added: int
) -> None:
    plain, with_routing = (
        count_parameters(config, 32_000).total for config in (host, routed(host, **fields))
    )
    assert with_routing - plain == added


def test_totals_with_routing_are_the_published_ones() -> None:
    assert count_parameters(routed(GDN_20, kind="clvr"), 32_000).total == 297_601_120
    assert count_parameters(routed(DELTANET_20, kind="cler_h"), 32_000).total == 283_798_272


def test_wider_feed_forward_controls_have_the_published_size() -> None:
    base = count_parameters(GDN_20, 32_000).total
    for width, added in ((2936, 7_372_800), (2840, 1_474_560)):
        wider = dataclasses.replace(GDN_20, ffn_dim=width)
        assert count_parameters(wider, 32_000).total - base == added


@pytest.mark.parametrize(
    ("mixer", "fields", "message"),
    [
        ("softmax", {"kind": "clvr"}, "has no signal in model.mixer.name='softmax'"),
        ("gated_linear", {"kind": "clvr"}, "has no signal in model.mixer.name='gated_linear'"),
        ("linear", {"kind": "cler"}, "its hosts are deltanet, gated_deltanet, kimi_delta"),
        (
            "kimi_delta",
            {"kind": "cler_h", "residual": "paper"},
            "with model.routing.residual='paper' has no signal",
        ),
        ("deltanet", {"kind": "clev"}, "model.routing.kind='clev' must be one of none, cler"),
        ("deltanet", {"residual": "r"}, "model.routing.residual='r' must be one of written"),
        ("deltanet", {"gamma": "token"}, "model.routing.gamma='token' must be one of scalar"),
        ("deltanet", {"kind": "clvr", "rank": 0}, "model.routing.rank=0 must be at least 1"),
    ],
)
def test_routing_without_its_signal_is_refused(
    mixer: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        routed(dataclasses.replace(SMALL, mixer=MIXER_CONFIGS[mixer]()), **fields)
