"""Reading, writing on and going back give what reading it all again would give."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models import generate
from models.accounting import kv_bytes_per_token, state_bytes
from models.configs import ModelConfig
from models.generate import (
    Draft,
    bookmark,
    decode,
    greedy,
    load_snapshot,
    prefill,
    sampled,
    save_snapshot,
    snapshot,
    snapshot_bytes,
)
from models.lm import ModelState
from tests.models.small_models import CONFIGS, VOCAB, build_moved, draw_tokens, relative_rms

TOLERANCE = 1e-5

# Of each kind of routing one: its options change what a layer adds, not what is kept of a text.
KEPT = {name: config for name, config in CONFIGS.items() if not re.match("routed-.*-", name)}
every_config = pytest.mark.parametrize("config", KEPT.values(), ids=KEPT.keys())


def equal(a: ModelState, b: ModelState) -> bool:
    return all(
        torch.equal(generate.filled(x, name), generate.filled(y, name))
        for x, y in zip(a, b, strict=True)
        for name in x
    )


def near(a: ModelState, b: ModelState) -> bool:
    return all(
        relative_rms(generate.filled(x, name), generate.filled(y, name)) < TOLERANCE
        for x, y in zip(a, b, strict=True)
        for name in x
        if name != "length"
    )


@every_config
def test_what_is_written_greedily_is_what_reading_again_would_write(config: ModelConfig) -> None:
    model, prompt = build_moved(config), draw_tokens()
    logits, state = prefill(model, prompt)
    written, _, _ = decode(model, logits, state, 6)
    with torch.no_grad():
        known = prompt
        for _ in range(6):
            known = torch.cat([known, model(known)[:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(written, known[:, prompt.shape[1] :])


@every_config
def test_two_endings_from_one_snapshot_equal_two_readings_from_scratch(
    config: ModelConfig,
) -> None:
    model, tokens = build_moved(config), draw_tokens(2, 21)
    prefix, endings = tokens[:, :11], (tokens[:, 11:], tokens[:, 11:].flip(1))
    _, state = prefill(model, prefix)
    kept = snapshot(state)
    before = snapshot(kept)
    for ending in endings:
        logits, _ = prefill(model, ending, snapshot(kept))
        with torch.no_grad():
            expected = model(torch.cat([prefix, ending], 1))[:, -1]
        assert relative_rms(logits, expected) < TOLERANCE
    assert equal(kept, before), "writing on from a copy changed the snapshot"


@every_config
def test_a_snapshot_outlives_the_state_it_was_taken_from(config: ModelConfig) -> None:
    model, tokens = build_moved(config), draw_tokens()
    _, state = prefill(model, tokens[:, :9])
    kept = snapshot(state)
    first, _ = model.step(tokens[:, 9], state)
    second, _ = model.step(tokens[:, 9], kept)
    assert torch.equal(first, second)


@every_config
def test_a_snapshot_holds_the_bytes_that_accounting_says(config: ModelConfig) -> None:
    _, state = prefill(build_moved(config), draw_tokens(3, 10))
    assert snapshot_bytes(state) == 3 * (state_bytes(config) + 10 * kv_bytes_per_token(config))


@every_config
@pytest.mark.parametrize("keeps_every_state", [True, False], ids=["states", "replay"])
def test_accepting_a_part_of_a_draft_equals_reading_only_that_part(
    config: ModelConfig,
    keeps_every_state: bool,  # noqa: FBT001
) -> None:
    model, tokens = build_moved(config), draw_tokens(2, 21)
    with torch.no_grad():
        whole = model(tokens[:, :16])[:, 11:]
    _, prefix = prefill(model, tokens[:, :11])
    for accepted in (0, 3, 5):
        draft = Draft(model, snapshot(prefix), keeps_every_state=keeps_every_state)
        assert relative_rms(draft.read(tokens[:, 11:16]), whole) < TOLERANCE
        after = draft.accept(accepted)
        _, expected = prefill(model, tokens[:, : 11 + accepted])
        assert near(after, expected)
        # A different token goes on from there: nothing of what was refused is left.
        onward = tokens[:, 20]
        got, _ = model.step(onward, after)
        wanted, _ = model.step(onward, expected)
        assert relative_rms(got, wanted) < TOLERANCE


def test_several_drafts_in_a_row_equal_one_reading() -> None:
    model, tokens = build_moved(CONFIGS["kimi_delta-hybrid"]), draw_tokens(1, 60)
    _, state = prefill(model, tokens[:, :4])
    position = 4
    for accepted in (2, 0, 4, 1, 3) * 2:
        draft = Draft(model, state, keeps_every_state=accepted % 2 == 0)
        wrong = (tokens[:, position + accepted : position + 4] + 1) % VOCAB
        draft.read(torch.cat([tokens[:, position : position + accepted], wrong], 1))
        state = draft.accept(accepted)
        position += accepted
    logits, _ = model.step(tokens[:, position], state)
    with torch.no_grad():
        assert relative_rms(logits, model(tokens[:, : position + 1])[:, -1]) < TOLERANCE


def test_a_draft_is_read_and_accepted_once() -> None:
    model, tokens = build_moved(CONFIGS["deltanet-pure"]), draw_tokens()
    _, state = prefill(model, tokens[:, :4])
    draft = Draft(model, state, keeps_every_state=False)
    with pytest.raises(ValueError, match="read a draft first"):
        draft.accept(0)
    draft.read(tokens[:, 4:6])
    with pytest.raises(ValueError, match="read already"):
        draft.read(tokens[:, 6:8])
    with pytest.raises(ValueError, match="num_tokens=3 must lie between 0 and the 2 drafted"):
        draft.accept(3)
    draft.accept(1)
    with pytest.raises(ValueError, match="accept it once"):
        draft.accept(1)


def test_a_bookmark_shares_growing_caches_and_copies_the_rest() -> None:
    model = build_moved(CONFIGS["gated_deltanet-hybrid"])
    _, state = prefill(model, draw_tokens())
    for layer, marked in zip(state, bookmark(state), strict=True):
        for name, tensor in layer.items():
            is_shared = tensor.data_ptr() == marked[name].data_ptr()
            assert is_shared == (name in ("keys", "values")), name


def test_a_long_prompt_read_in_pieces_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = build_moved(CONFIGS["gated_deltanet2-hybrid"]), draw_tokens()
    whole, _ = prefill(model, prompt)
    monkeypatch.setattr(generate, "PREFILL_TOKENS", 4)
    pieces, _ = prefill(model, prompt)
    assert relative_rms(pieces, whole) < TOLERANCE


def test_snapshots_are_read_in_another_process(tmp_path: Path) -> None:
    names = ["gated_deltanet-hybrid", "softmax-window", "linear-pure"]
    expected = []
    for name in names:
        model, tokens = build_moved(CONFIGS[name]), draw_tokens()
        _, state = prefill(model, tokens[:, :10])
        save_snapshot(tmp_path / name, model, state)
        expected.append(prefill(model, tokens[:, 10:], state)[0])
    code = f"""
import torch
from models.generate import load_snapshot, prefill
from tests.models.small_models import CONFIGS, build_moved, draw_tokens
found = []
for name in {names}:
    model = build_moved(CONFIGS[name])
    state = load_snapshot({str(tmp_path)!r} + "/" + name, model)
    found.append(prefill(model, draw_tokens()[:, 10:], state)[0])
torch.save(found, {str(tmp_path / "found.pt")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    for name, a, b in zip(
        names, torch.load(tmp_path / "found.pt", weights_only=True), expected, strict=True
    ):
        assert torch.equal(a, b), name


def test_a_snapshot_of_another_model_is_refused(tmp_path: Path) -> None:
    config = CONFIGS["gated_deltanet-hybrid"]
    model = build_moved(config)
    _, state = prefill(model, draw_tokens())
    path = tmp_path / "state.safetensors"
    save_snapshot(path, model, state)
    other = build_moved(dataclasses.replace(config, ffn_dim=48, norm_eps=1e-6))
    with pytest.raises(ValueError, match="differs in ffn_dim, norm_eps"):
        load_snapshot(path, other)
    load_snapshot(path, build_moved(dataclasses.replace(config, impl="reference")))


def test_sampling_follows_its_generator_and_its_temperature() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.2]])).repeat(20_000, 1)

    def shares(temperature: float) -> torch.Tensor:
        choose = sampled(torch.Generator().manual_seed(0), temperature)
        return torch.bincount(choose(logits), minlength=3) / 20_000

    torch.testing.assert_close(shares(1.0), torch.tensor([0.5, 0.3, 0.2]), atol=0.015, rtol=0)
    squared = torch.tensor([0.25, 0.09, 0.04]) / 0.38
    torch.testing.assert_close(shares(0.5), squared, atol=0.015, rtol=0)
    first, second = (sampled(torch.Generator().manual_seed(1))(logits) for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(greedy(logits), torch.zeros(20_000, dtype=torch.int64))


def test_what_cannot_be_read_or_written_is_refused() -> None:
    model = build_moved(CONFIGS["softmax-pure"])
    with pytest.raises(ValueError, match="a prompt needs at least one"):
        prefill(model, draw_tokens(2, 0))
    logits, state = prefill(model, draw_tokens())
    with pytest.raises(ValueError, match="num_tokens=0 must be at least 1"):
        decode(model, logits, state, 0)
    with pytest.raises(ValueError, match=r"temperature=0\.0 must be positive"):
        sampled(torch.Generator(), 0.0)
