"""Counts from a config equal what is allocated, what is computed and what was published."""

import dataclasses

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.accounting import (
    count_parameters,
    flops_per_token,
    forward_flops_per_token,
    kv_bytes_per_token,
    recurrent_memory_numbers,
    softmax_reference,
    solve_ffn_dim,
    state_bytes,
)
from models.configs import (
    MIXER_CONFIGS,
    DeltaNetConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    HeadLayout,
    KimiDeltaConfig,
    LinearConfig,
    MixerConfig,
    ModelConfig,
    RoutingConfig,
    SoftmaxConfig,
)
from tests.models.small_models import CONFIGS, ROUTED_CONFIGS, SMALL, VOCAB, build, draw_tokens

UNROUTED = {name: config for name, config in CONFIGS.items() if config.routing.kind == "none"}
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())

# The head layouts of arXiv 2607.07953 at 350M, 1.3B and 3B.
SOFTMAX_350M = {"softmax_heads": 16, "softmax_kv_heads": 4, "softmax_head_dim": 64}
DELTANET_350M = HeadLayout(**SOFTMAX_350M, key_heads=4, value_heads=4, key_dim=64, value_dim=128)
GATED_350M = HeadLayout(**SOFTMAX_350M, key_heads=4, value_heads=8, key_dim=64, value_dim=64)
DELTANET_1P3B = HeadLayout(
    softmax_heads=32,
    softmax_kv_heads=8,
    softmax_head_dim=64,
    key_heads=8,
    value_heads=8,
    key_dim=64,
    value_dim=128,
)
GATED_1P3B = HeadLayout(
    softmax_heads=16,
    softmax_kv_heads=8,
    softmax_head_dim=128,
    key_heads=8,
    value_heads=16,
    key_dim=64,
    value_dim=64,
)
DELTANET_3B = dataclasses.replace(
    DELTANET_1P3B, softmax_heads=24, softmax_kv_heads=8, softmax_head_dim=128
)
# 6 layers of width 256, of the sequence-length experiment.
TINY = dataclasses.replace(GATED_350M, softmax_heads=4, softmax_kv_heads=1)


def paper_model(
    mixer: MixerConfig,
    num_layers: int,
    ffn_dim: int,
    heads: HeadLayout = GATED_350M,
    *,
    d_model: int = 1024,
    every: int | None = None,
    gated: bool = False,
) -> ModelConfig:
    return ModelConfig(
        mixer=mixer,
        stack="pure" if every is None else "hybrid",
        softmax_every=every,
        softmax=SoftmaxConfig(output_gate=gated),
        num_layers=num_layers,
        d_model=d_model,
        ffn_dim=ffn_dim,
        heads=heads,
    )


SOFTMAX, DELTANET, GATED, KIMI = (
    MixerConfig(),
    DeltaNetConfig(),
    GatedDeltaNetConfig(),
    KimiDeltaConfig(),
)
FULL, LOWRANK = GatedDeltaNet2Config(), GatedDeltaNet2Config(variant="lowrank")

# Totals that arXiv 2607.07953's public code gives for a vocabulary of 32,000.
PUBLISHED_TOTALS = {
    "softmax": (paper_model(SOFTMAX, 24, 2560), 317_244_416),
    "deltanet-hybrid": (paper_model(DELTANET, 24, 2816, DELTANET_350M, every=3), 319_474_688),
    "deltanet-pure": (paper_model(DELTANET, 24, 2816, DELTANET_350M), 311_152_640),
    "gdn-hybrid": (paper_model(GATED, 22, 2816, every=3, gated=True), 313_354_416),
    "gdn-pure": (paper_model(GATED, 22, 2816), 302_488_288),
    "kda-hybrid-24": (paper_model(KIMI, 24, 2816, every=3), 322_701_440),
    "kda-pure-24": (paper_model(KIMI, 24, 2816), 315_992_768),
    "kda-hybrid-20": (paper_model(KIMI, 20, 2816, every=3), 279_281_648),
    "kda-pure-20": (paper_model(KIMI, 20, 2816), 274_250_144),
    "gdn2-hybrid": (paper_model(FULL, 20, 2816, every=3, gated=True), 304_715_192),
    "gdn2-pure": (paper_model(FULL, 20, 2816), 301_595_984),
    "gdn2-hybrid-3:1": (paper_model(FULL, 20, 2816, every=4, gated=True), 304_195_324),
    "gdn2-lowrank-hybrid": (paper_model(LOWRANK, 20, 2816, every=3, gated=True), 296_235_448),
    "gdn2-lowrank-pure": (paper_model(LOWRANK, 20, 2816), 289_482_064),
    "gdn-host": (paper_model(GATED, 20, 2816, every=3, gated=True), 290_261_088),
    "deltanet-host": (paper_model(DELTANET, 20, 2816, DELTANET_350M, every=3), 276_458_240),
    "deltanet-1.3b-hybrid": (
        paper_model(DELTANET, 24, 6144, DELTANET_1P3B, d_model=2048, every=3),
        1_222_086_656,
    ),
    "deltanet-1.3b-pure": (
        paper_model(DELTANET, 24, 6144, DELTANET_1P3B, d_model=2048),
        1_188_729_856,
    ),
    "gdn-1.3b-hybrid": (
        paper_model(GATED, 24, 5632, GATED_1P3B, d_model=2048, every=3, gated=True),
        1_231_261_184,
    ),
    "gdn-1.3b-pure": (
        paper_model(GATED, 24, 5632, GATED_1P3B, d_model=2048),
        1_164_742_912,
    ),
    "deltanet-3b-hybrid": (
        paper_model(DELTANET, 32, 8192, DELTANET_3B, d_model=3072, every=3),
        3_072_726_784,
    ),
    "softmax-7m": (paper_model(SOFTMAX, 6, 256, TINY, d_model=256), 18_550_016),
    "gdn-7m-hybrid": (
        paper_model(GATED, 6, 256, TINY, d_model=256, every=3, gated=True),
        20_155_968,
    ),
    "gdn-7m-pure": (paper_model(GATED, 6, 256, TINY, d_model=256), 20_762_336),
}


@pytest.mark.parametrize(
    ("config", "total"), PUBLISHED_TOTALS.values(), ids=PUBLISHED_TOTALS.keys()
)
def test_totals_equal_the_published_models(config: ModelConfig, total: int) -> None:
    assert count_parameters(config, 32_000).total == total


@pytest.mark.parametrize(
    ("mixer", "heads", "expected"),
    [
        (LinearConfig(unused_beta=True), DELTANET_350M, 1_581_184),
        (DELTANET, DELTANET_350M, 1_581_184),
        (GATED, GATED_350M, 2_117_712),
        (KIMI, GATED_350M, 1_782_856),
        (FULL, GATED_350M, 3_150_148),
        (LOWRANK, GATED_350M, 2_544_452),
        (SOFTMAX, GATED_350M, 2_621_440),
    ],
    ids=["linear", "deltanet", "gdn", "kda", "gdn2-full", "gdn2-lowrank", "softmax"],
)
def test_one_mixer_at_350m_has_its_published_parameters(
    mixer: MixerConfig, heads: HeadLayout, expected: int
) -> None:
    config = paper_model(mixer, 1, 2816, heads)
    others = 1024 + 3 * 1024 * 2816 + 2 * 1024
    assert count_parameters(config, 32_000).non_embedding - others == expected


@every_config
def test_counted_parameters_are_those_of_the_built_model(config: ModelConfig) -> None:
    model, counted = build(config), count_parameters(config, VOCAB)
    assert counted.total == sum(parameter.numel() for parameter in model.parameters())
    ends = model.embedding.weight.numel() + model.head.weight.numel()
    assert counted.non_embedding == counted.total - ends


@every_config
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_counted_state_is_what_is_allocated(config: ModelConfig, dtype: torch.dtype) -> None:
    model, length = build(config), 5
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        _, state = model.extend(draw_tokens(2, length), model.initial_state(2, dtype))
    fixed = growing = 0
    for layer in state:
        for name, tensor in layer.items():
            if name in ("keys", "values"):
                growing += tensor[:, :, :length].numel() * tensor.element_size()
            elif tensor.is_floating_point():
                fixed += tensor.nbytes
    assert fixed == 2 * state_bytes(config, cache_itemsize=dtype.itemsize)
    assert growing == 2 * length * kv_bytes_per_token(config, itemsize=dtype.itemsize)
    mixers = [block.mixer for block in model.blocks]
    assert sum(mixer.state_bytes(dtype) for mixer in mixers) == fixed // 2
    assert sum(mixer.kv_bytes_per_token(dtype) for mixer in mixers) == growing // (2 * length)


LLAMA_3_8B = {
    "num_layers": 32,
    "d_model": 4096,
    "ffn_dim": 14_336,
    "heads": HeadLayout(
        softmax_heads=32,
        softmax_kv_heads=32,
        softmax_head_dim=128,
        key_heads=32,
        value_heads=32,
        key_dim=128,
        value_dim=128,
    ),
}
"""The dimensions of Llama-3-8B, with as many key-value heads as query heads."""


def test_the_key_value_cache_of_an_8b_model_in_float16() -> None:
    config = ModelConfig(**LLAMA_3_8B)
    assert 4_000 * kv_bytes_per_token(config, itemsize=2) == 2_097_152_000
    assert state_bytes(config) == 0


def test_grouped_heads_shrink_the_cache_of_an_8b_model_to_a_quarter() -> None:
    heads = dataclasses.replace(LLAMA_3_8B["heads"], softmax_kv_heads=8)
    config = ModelConfig(**{**LLAMA_3_8B, "heads": heads})
    assert 4_000 * kv_bytes_per_token(config, itemsize=2) == 524_288_000


def test_the_linear_state_of_an_8b_model_in_float16() -> None:
    config = ModelConfig(**LLAMA_3_8B, mixer=DELTANET)
    assert 2 * recurrent_memory_numbers(config) == 33_554_432
    assert kv_bytes_per_token(config) == 0


def test_scores_of_a_long_text_are_a_million_times_the_state() -> None:
    heads = HeadLayout(key_heads=1, value_heads=1, key_dim=128, value_dim=128)
    one_head = ModelConfig(num_layers=1, d_model=128, mixer=DELTANET, heads=heads)
    assert 131_072**2 / recurrent_memory_numbers(one_head) == 2**20


def test_a_three_to_one_hybrid_of_an_8b_model_saves_three_quarters_of_the_cache() -> None:
    config = ModelConfig(**LLAMA_3_8B, mixer=DELTANET, stack="hybrid", softmax_every=4)
    assert 4_000 * kv_bytes_per_token(config, itemsize=2) == 524_288_000
    assert 2 * recurrent_memory_numbers(config) == 25_165_824


@pytest.mark.parametrize("mixer", [DELTANET, GATED, KIMI, FULL], ids=lambda m: m.name)
def test_every_rule_at_350m_holds_as_many_numbers(mixer: MixerConfig) -> None:
    heads = DELTANET_350M if mixer is DELTANET else GATED_350M
    assert recurrent_memory_numbers(paper_model(mixer, 1, 2816, heads)) == 32_768


@pytest.mark.parametrize("config", UNROUTED.values(), ids=UNROUTED.keys())
@pytest.mark.parametrize("length", [1, 64])
def test_counted_flops_are_those_of_the_modules(config: ModelConfig, length: int) -> None:
    model = build(config)
    layers = sum(block.mixer.flops_per_token(length) for block in model.blocks)
    mlps = 6 * config.d_model * config.ffn_dim * config.num_layers
    head = 2 * VOCAB * config.d_model
    assert forward_flops_per_token(config, VOCAB, length) == layers + mlps + head
    assert flops_per_token(config, VOCAB, length) == 3 * (layers + mlps + head)


@every_config
def test_counted_matrix_flops_are_those_that_torch_counts(config: ModelConfig) -> None:
    """Projections and head are the only plain matrix products; the rules use batched ones."""
    model, tokens = build(config), draw_tokens()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(tokens)
    measured = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    expected = 2 * VOCAB * config.d_model
    for block in model.blocks:
        for name, parameter in block.named_parameters():
            if parameter.ndim == 2 and not name.endswith(("conv.weight", "gamma")):
                expected += 2 * parameter.numel()
    assert measured == tokens.numel() * expected


def test_counted_softmax_flops_are_those_that_torch_counts_for_one_token() -> None:
    """At one token causal attention has no half to leave out, so both counts are complete.

    torch counts attention where it is made of plain products.
    """
    config = CONFIGS["softmax-gate_norm"]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        build(config)(draw_tokens(1, 1))
    assert counter.get_total_flops() == forward_flops_per_token(config, VOCAB, 1)


@pytest.mark.parametrize("config", ROUTED_CONFIGS.values(), ids=ROUTED_CONFIGS.keys())
def test_counted_routing_flops_are_its_matrices_and_its_second_reads(config: ModelConfig) -> None:
    plain = dataclasses.replace(config, routing=RoutingConfig())
    found = forward_flops_per_token(config, VOCAB, 9) - forward_flops_per_token(plain, VOCAB, 9)
    info = build(config).parameter_info()
    expected = sum(
        2 * parameter.numel()
        for name, parameter in build(config).named_parameters()
        if info[name].role == "routing_matrix" and not name.endswith("gamma")
    )
    if config.routing.residual != "written":
        # Two memory layers read 4 value heads of 8 × 12 again.
        expected += 2 * 4 * 4 * 8 * 12
    if config.routing.has_attention_residuals:
        # Six queries over 2 to 7 sources of width 24, a score and a share each.
        expected += (2 + 3 + 4 + 5 + 6 + 7) * 4 * 24
    assert found == expected


def test_rule_flops_by_hand() -> None:
    """K = 8, V = 12, 4 value heads: 2 for the write, 2 for the read, 2 to correct, 1 to decay."""
    expected = {"linear_unnormalized": 4, "deltanet": 6, "gated_deltanet": 7, "kimi_delta": 7}
    for name, per_number in expected.items():
        mixer = build(CONFIGS[f"{name}-pure"]).blocks[0].mixer
        assert mixer.rule_flops() == per_number * 8 * 12
    # The running sum of keys is one more value column.
    assert build(CONFIGS["linear-pure"]).blocks[0].mixer.rule_flops() == 4 * 8 * 13


def test_softmax_reference_is_the_plain_stack_of_the_same_size() -> None:
    config = dataclasses.replace(
        CONFIGS["kimi_delta-hybrid"], softmax=SoftmaxConfig(output_gate=True, qk_norm=True)
    )
    assert softmax_reference(config) == SMALL


@pytest.mark.parametrize("size", ["nano", "10m", "60m"])
@pytest.mark.parametrize("name", sorted(MIXER_CONFIGS))
@pytest.mark.parametrize("stack", ["pure", "hybrid"])
def test_a_solved_width_matches_the_softmax_stack(size: str, name: str, stack: str) -> None:
    if name == "softmax" and stack == "hybrid":
        pytest.skip("a hybrid of softmax with itself does not exist")
    config = dataclasses.replace(SIZES[size], mixer=MIXER_CONFIGS[name](), stack=stack)
    target = count_parameters(softmax_reference(config), 0).non_embedding
    width = solve_ffn_dim(config, target)
    matched = count_parameters(dataclasses.replace(config, ffn_dim=width), 0).non_embedding
    assert abs(matched / target - 1) <= 0.01
    for step in (16, 8, 4):
        if width % step == 0:
            break
        near = [step * (width // step), step * (width // step + 1)]
        counts = [
            count_parameters(dataclasses.replace(config, ffn_dim=max(w, 1)), 0).non_embedding
            for w in near
        ]
        assert all(abs(count / target - 1) > 0.01 for count in counts), "a larger step would do"


SIZES = {
    "nano": ModelConfig(),
    "10m": ModelConfig(
        num_layers=6,
        d_model=384,
        ffn_dim=1024,
        heads=HeadLayout(
            softmax_heads=6,
            softmax_kv_heads=2,
            softmax_head_dim=64,
            key_heads=6,
            value_heads=6,
            key_dim=64,
            value_dim=64,
        ),
    ),
    "60m": ModelConfig(
        num_layers=12,
        d_model=640,
        ffn_dim=1712,
        heads=HeadLayout(
            softmax_heads=10,
            softmax_kv_heads=5,
            softmax_head_dim=64,
            key_heads=10,
            value_heads=10,
            key_dim=64,
            value_dim=64,
        ),
    ),
}


def test_the_softmax_stack_matches_itself() -> None:
    for config in SIZES.values():
        target = count_parameters(config, 0).non_embedding
        assert solve_ffn_dim(config, target) == config.ffn_dim


def test_a_target_that_no_width_reaches_is_refused() -> None:
    config = dataclasses.replace(SMALL, mixer=FULL)
    with pytest.raises(ValueError, match=r"no model\.ffn_dim .* within 1% of 1000 non-embedding"):
        solve_ffn_dim(config, 1_000)
