"""Layer patterns are exact, and what cannot be built is refused with one sentence."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest

from models.configs import (
    MIXER_CONFIGS,
    DeltaNetConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    HeadLayout,
    KimiDeltaConfig,
    MixerConfig,
    ModelConfig,
    SoftmaxConfig,
)


def hybrid(num_layers: int, **fields: Any) -> ModelConfig:
    return ModelConfig(mixer=DeltaNetConfig(), stack="hybrid", num_layers=num_layers, **fields)


@pytest.mark.parametrize(
    ("num_layers", "every", "expected"),
    [
        (3, 3, [2]),
        (20, 3, [2, 5, 8, 11, 14, 17]),
        (22, 3, [2, 5, 8, 11, 14, 17, 20]),
        (24, 3, [2, 5, 8, 11, 14, 17, 20, 23]),
        (20, 4, [3, 7, 11, 15, 19]),
        (6, 2, [1, 3, 5]),
    ],
)
def test_every_nth_layer_of_a_hybrid_is_softmax(
    num_layers: int, every: int, expected: list[int]
) -> None:
    config = hybrid(num_layers, softmax_every=every)
    assert list(config.softmax_indices()) == expected
    assert [i for i, name in enumerate(config.layer_mixers()) if name == "softmax"] == expected
    assert config.layer_mixers().count("deltanet") == num_layers - len(expected)


def test_softmax_layers_are_where_they_are_named() -> None:
    config = hybrid(5, softmax_layers=[4, 0], softmax_every=3)
    assert config.layer_mixers() == ("softmax", "deltanet", "deltanet", "deltanet", "softmax")


@pytest.mark.parametrize("name", sorted(MIXER_CONFIGS))
def test_a_pure_stack_has_one_mixer_whatever_the_hybrid_options_say(name: str) -> None:
    config = ModelConfig(mixer=MIXER_CONFIGS[name](), softmax_every=2, softmax_layers=[1])
    assert config.layer_mixers() == (name,) * 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixer": MixerConfig(name="mamba")}, r"model.mixer.name='mamba' must be one of deltanet"),
        ({"mixer": MixerConfig(name="deltanet")}, "needs options of type DeltaNetConfig"),
        ({"stack": "mixed"}, "model.stack='mixed' must be one of pure, hybrid"),
        ({"stack": "hybrid"}, "mixes softmax with itself"),
        ({"num_layers": 0}, "model.num_layers=0 must be at least 1"),
        ({"d_model": -4}, "model.d_model=-4 must be at least 1"),
        ({"ffn_dim": 0}, "model.ffn_dim=0 must be at least 1"),
        ({"norm_eps": 0.0}, "model.norm_eps=0.0 must be positive"),
        ({"impl": "cuda"}, "model.impl='cuda' must be one of auto, reference, chunked, triton"),
        ({"softmax": None}, "model.softmax=null leaves the softmax layers"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"softmax_every": 4}, "model.softmax_every=4 must lie between 2 and model.num_layers=3"),
        ({"softmax_every": 1}, "model.softmax_every=1 must lie between 2"),
        ({"softmax_every": None}, "model.softmax_every=None must lie between 2"),
        ({"softmax_layers": []}, "leaves a hybrid without a softmax layer"),
        ({"softmax_layers": [1, 3]}, r"model.softmax_layers=\[1, 3\] has 3, outside 0 to 2"),
        ({"softmax_layers": [-1]}, r"model.softmax_layers=\[-1\] has -1, outside 0 to 2"),
        ({"softmax_layers": [1, 1]}, "names a layer twice"),
        ({"softmax_layers": [0, 1, 2]}, "leaves no other layer in a hybrid"),
        ({"softmax": None}, "model.softmax=null leaves the softmax layers"),
    ],
)
def test_a_hybrid_without_both_kinds_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hybrid(3, **fields)


def test_a_pure_stack_without_softmax_needs_no_softmax_options() -> None:
    assert ModelConfig(mixer=DeltaNetConfig(), softmax=None).softmax_indices() == ()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("softmax_kv_heads", 3, "softmax_kv_heads=3 must divide model.heads.softmax_heads=2"),
        ("softmax_head_dim", 7, "softmax_head_dim=7 must be even"),
        ("value_heads", 3, "value_heads=3 must be a multiple of model.heads.key_heads=2"),
        ("key_dim", 0, "key_dim=0 must be at least 1"),
    ],
)
def test_heads_that_do_not_fit_are_refused(field: str, value: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeadLayout(**{field: value})


@pytest.mark.parametrize(("field", "value"), [("key_dim", 257), ("value_dim", 513)])
def test_head_dims_beyond_the_recurrences_are_refused_where_there_is_one(
    field: str, value: int
) -> None:
    heads = HeadLayout(**{field: value})
    with pytest.raises(ValueError, match=f"model.heads.{field}={value} must be at most"):
        ModelConfig(mixer=DeltaNetConfig(), heads=heads)
    ModelConfig(heads=heads)


@pytest.mark.parametrize("options", [GatedDeltaNetConfig, KimiDeltaConfig, GatedDeltaNet2Config])
def test_an_unknown_decay_start_is_refused(options: type[GatedDeltaNetConfig]) -> None:
    with pytest.raises(ValueError, match="dt_init='zeros' must be one of loguniform, ones"):
        options(dt_init="zeros")


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="variant='half' must be one of full, lowrank"):
        GatedDeltaNet2Config(variant="half")


def test_a_rotary_base_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.softmax\.rope_base=1\.0 must be greater than 1"):
        SoftmaxConfig(rope_base=1.0)


def test_a_config_is_checked_again_when_a_field_is_replaced() -> None:
    with pytest.raises(ValueError, match=r"model\.softmax_every=4"):
        dataclasses.replace(hybrid(6, softmax_every=4), num_layers=3)


def test_configs_and_accounting_import_no_torch() -> None:
    code = "import sys, models.accounting, models.configs; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
