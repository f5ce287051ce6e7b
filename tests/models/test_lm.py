"""Every mixer in every stack keeps the one contract of a language model."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from models.configs import MIXER_CONFIGS, ModelConfig
from models.lm import LanguageModel, build_model
from models.mixer import ROLES
from tests.models.small_models import (
    CONFIGS,
    SMALL,
    VOCAB,
    build,
    build_moved,
    draw_tokens,
    relative_rms,
)

# Float32 sums in another order; the chunked forms are held to the float64 loop in tests/kernels.
FLOAT32_TOLERANCE = 1e-5
# Products of 8-bit mantissas: 2^-8 each, averaged over sums, through three layers.
BFLOAT16_TOLERANCE = 2e-2

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())


@every_config
def test_a_later_token_leaves_earlier_logits_bit_equal(config: ModelConfig) -> None:
    model, tokens = build_moved(config), draw_tokens()
    changed = tokens.clone()
    changed[:, 13] = (changed[:, 13] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :13], after[:, :13])
    assert not torch.equal(before[:, 13], after[:, 13])
    assert not torch.equal(before[:, 14:], after[:, 14:])


@every_config
def test_a_row_alone_equals_the_row_in_a_batch(config: ModelConfig) -> None:
    model, tokens = build_moved(config), draw_tokens()
    with torch.no_grad():
        assert relative_rms(model(tokens[1:]), model(tokens)[1:]) < FLOAT32_TOLERANCE


@every_config
def test_token_by_token_equals_the_whole_sequence(config: ModelConfig) -> None:
    model, tokens = build_moved(config), draw_tokens()
    with torch.no_grad():
        expected = model(tokens)
        state, logits = model.initial_state(2), []
        for token in tokens.unbind(1):
            step_logits, state = model.step(token, state)
            logits.append(step_logits)
    assert relative_rms(torch.stack(logits, 1), expected) < FLOAT32_TOLERANCE


@every_config
def test_a_sequence_read_in_pieces_equals_the_whole(config: ModelConfig) -> None:
    """Pieces of 8, 1 and 7 tokens at once, then one by one from the state in mid-sequence."""
    model, tokens = build_moved(config), draw_tokens()
    with torch.no_grad():
        expected = model(tokens)
        state = model.initial_state(2)
        for start, end in ((0, 8), (8, 9), (9, 16)):
            logits, state = model.extend(tokens[:, start:end], state)
            assert relative_rms(logits, expected[:, end - 1]) < FLOAT32_TOLERANCE
        for position in range(16, 21):
            logits, state = model.step(tokens[:, position], state)
            assert relative_rms(logits, expected[:, position]) < FLOAT32_TOLERANCE


@every_config
def test_gradients_reach_every_parameter(config: ModelConfig) -> None:
    model, tokens = build_moved(config), draw_tokens()
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        if name == "blocks.0.injection.gamma":
            # The lowest memory layer has no error below it to inject.
            assert parameter.grad is None
            continue
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.abs().max() > 0, name


@every_config
def test_parameter_info_covers_every_parameter(config: ModelConfig) -> None:
    model = build_moved(config)
    info = model.parameter_info()
    assert list(info) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert info[name].role in ROLES
        if info[name].blocks:
            assert sum(rows for _, rows in info[name].blocks) == parameter.shape[0], name


@every_config
def test_the_loss_is_the_mean_cross_entropy_of_the_logits(config: ModelConfig) -> None:
    model, tokens = build_moved(config), draw_tokens()
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        expected = F.cross_entropy(model(inputs).transpose(1, 2), targets, reduction="none")
        losses = model.token_losses(inputs, targets)
        loss = model.loss(inputs, targets)
    assert losses.dtype == torch.float32
    assert losses.shape == targets.shape
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(loss, expected.mean())


@every_config
def test_bfloat16_autocast_stays_near_float32(config: ModelConfig) -> None:
    model, tokens = build_moved(config), draw_tokens()
    expected = model(tokens).detach()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    assert relative_rms(logits.detach().float(), expected) < BFLOAT16_TOLERANCE
    for name, parameter in model.named_parameters():
        if name == "blocks.0.injection.gamma":
            continue
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == torch.float32, name
        assert torch.isfinite(parameter.grad).all(), name


@every_config
def test_bfloat16_decoding_has_bfloat16_caches_and_float32_memory(config: ModelConfig) -> None:
    model, tokens = build_moved(config), draw_tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(tokens)[:, -1].float()
        _, state = model.extend(tokens[:, :-1], model.initial_state(2, torch.bfloat16))
        logits, state = model.step(tokens[:, -1], state)
    assert relative_rms(logits.float(), expected) < BFLOAT16_TOLERANCE
    for layer in state:
        for name, tensor in layer.items():
            wanted = {"length": torch.int64, "memory": torch.float32, "normalizer": torch.float32}
            assert tensor.dtype == wanted.get(name, torch.bfloat16), name


@every_config
def test_two_builds_of_one_seed_are_bit_equal(config: ModelConfig) -> None:
    first, second, other = build(config), build(config), build(config, seed=1)
    for (name, a), b, c in zip(
        first.named_parameters(), second.parameters(), other.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert torch.isfinite(a).all(), name
        if a.ndim == 2 and not first.parameter_info()[name].role.startswith("routing"):
            assert not torch.equal(a, c), name


@every_config
def test_a_model_trains_after_it_was_evaluated_in_inference_mode(config: ModelConfig) -> None:
    model, tokens = build(config), draw_tokens()
    with torch.inference_mode():
        before = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    assert loss.item() == before.item()


def test_mixers_of_one_seed_share_every_other_value() -> None:
    models = [build(dataclasses.replace(SMALL, mixer=m())) for m in MIXER_CONFIGS.values()]
    shared = [name for name, _ in models[0].named_parameters() if ".mixer." not in name]
    assert "head.weight" in shared
    assert "blocks.2.mlp.gate_up.weight" in shared
    for model in models[1:]:
        for name in shared:
            assert torch.equal(model.get_parameter(name), models[0].get_parameter(name)), name


def test_initialisation_reads_and_advances_only_its_generator() -> None:
    before = torch.random.get_rng_state()
    generator = torch.Generator().manual_seed(5)
    first = build_model(SMALL, VOCAB, generator)
    second = build_model(SMALL, VOCAB, generator)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not torch.equal(first.head.weight, second.head.weight)


def test_layers_of_one_model_start_differently() -> None:
    model = build(SMALL)
    first, second = (
        model.get_parameter(f"blocks.{layer}.mixer.in_proj.weight") for layer in (0, 1)
    )
    assert not torch.equal(first, second)


def test_parameters_are_nan_until_they_are_initialised() -> None:
    model = LanguageModel(SMALL, VOCAB)
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_a_model_saves_and_loads() -> None:
    source, target = build(SMALL), build(SMALL, seed=3)
    target.load_state_dict(source.state_dict())
    tokens = draw_tokens()
    with torch.no_grad():
        assert torch.equal(source(tokens), target(tokens))


@pytest.mark.parametrize(
    ("name", "impl", "expected"),
    [
        ("softmax-pure", "auto", "sdpa"),
        ("deltanet-pure", "auto", "chunked"),
        ("kimi_delta-hybrid", "reference", "reference"),
    ],
)
def test_the_served_implementation_has_a_name(name: str, impl: str, expected: str) -> None:
    assert build(dataclasses.replace(CONFIGS[name], impl=impl)).kernel_impl == expected


@pytest.mark.parametrize("name", [name for name in CONFIGS if "softmax" not in name])
def test_implementations_agree(name: str) -> None:
    tokens = draw_tokens(length=70)
    chunked, reference = (
        build_moved(dataclasses.replace(CONFIGS[name], impl=impl))
        for impl in ("chunked", "reference")
    )
    with torch.no_grad():
        assert relative_rms(chunked(tokens), reference(tokens)) < FLOAT32_TOLERANCE


def test_an_implementation_that_cannot_serve_is_refused_at_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="triton"):
        build(dataclasses.replace(CONFIGS["deltanet-pure"], impl="triton"))


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size=0 must be at least 1"):
        LanguageModel(SMALL, 0)
