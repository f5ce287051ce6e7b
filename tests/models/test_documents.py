"""Documents packed into windows are what each is alone, under every mixer and routing."""

import dataclasses
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from models.configs import DeltaNetConfig, RoutingConfig, SoftmaxConfig
from models.diagnostics import routing_norms
from models.documents import Documents
from models.lm import LanguageModel
from tests.models.small_models import (
    CONFIGS,
    ROUTED_CONFIGS,
    SMALL,
    VOCAB,
    build,
    build_moved,
    draw_tokens,
    relative_rms,
)

SEQ_LEN = 20
# One token, fewer than the convolution's taps, more than the sliding window of 6, a whole window.
CU_SEQLENS = torch.tensor([0, 5, 6, 9, 20, 40, 54, 60])
PARTS = [slice(start, end) for start, end in pairwise(CU_SEQLENS.tolist())]
TOLERANCE = 1e-5

# One of each way in which tokens reach each other, for the tests that need gradients.
MIXED = {
    name: CONFIGS[name]
    for name in CONFIGS
    if name not in ROUTED_CONFIGS or name in ("routed-cler-paper", "routed-attention_residuals")
}


def windows() -> tuple[Tensor, Tensor]:
    tokens = draw_tokens(3, SEQ_LEN + 1)
    return tokens[:, :-1], tokens[:, 1:]


def documents() -> Documents:
    return Documents.of(CU_SEQLENS, SEQ_LEN)


def one_by_one(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    rows = [
        model.token_losses(inputs.flatten()[None, part], targets.flatten()[None, part])[0]
        for part in PARTS
    ]
    return torch.cat(rows).view(inputs.shape)


@pytest.mark.parametrize("name", MIXED)
def test_packed_documents_equal_themselves_alone_with_all_gradients(name):
    model, (inputs, targets) = build_moved(MIXED[name]), windows()
    parameters = dict(model.named_parameters())
    packed = model.token_losses(inputs, targets, documents())
    alone = one_by_one(model, inputs, targets)
    assert relative_rms(packed.detach(), alone.detach()) < TOLERANCE
    assert torch.equal(model.loss(inputs, targets, documents()), packed.mean())
    cotangent = torch.linspace(0.5, 2.0, packed.numel()).view(packed.shape)
    actual = torch.autograd.grad((packed * cotangent).sum(), parameters.values(), allow_unused=True)
    expected = torch.autograd.grad(
        (alone * cotangent).sum(), parameters.values(), allow_unused=True
    )
    for key, got, want in zip(parameters, actual, expected, strict=True):
        assert (got is None) == (want is None), key
        if want is not None and want.abs().max() > 0:
            assert relative_rms(got, want) < 20 * TOLERANCE, key


@pytest.mark.parametrize("name", CONFIGS)
def test_another_document_changes_no_bit_of_this_one(name):
    model, (inputs, _) = build_moved(CONFIGS[name]), windows()
    changed = inputs.flatten().clone()
    changed[PARTS[3]] = (changed[PARTS[3]] + 1 + torch.arange(11) % 7) % VOCAB
    with torch.no_grad():
        before = model.hidden(inputs, documents()).flatten(0, 1)
        after = model.hidden(changed.view(inputs.shape), documents()).flatten(0, 1)
        across = model.hidden(changed.view(inputs.shape)).flatten(0, 1)
    own = torch.zeros(len(changed), dtype=torch.bool)
    own[PARTS[3]] = True
    assert torch.equal(before[~own], after[~own])
    assert not torch.equal(before[own], after[own])
    # Within windows that were cut, reading on across ends is something else.
    assert not torch.equal(after[5:20], across[5:20])


@pytest.mark.parametrize("name", ["softmax-window", "kimi_delta-hybrid", "routed-cler-paper"])
def test_windows_that_are_documents_are_plain_windows(name):
    model, (inputs, targets) = build_moved(CONFIGS[name]), windows()
    whole = Documents.of(torch.arange(0, 61, SEQ_LEN), SEQ_LEN)
    with torch.no_grad():
        actual = model.token_losses(inputs, targets, whole)
        expected = model.token_losses(inputs, targets)
    assert relative_rms(actual, expected) < TOLERANCE


@pytest.mark.parametrize("name", ["gated_deltanet2-hybrid", "routed-attention_residuals_cler_h"])
def test_recomputed_layers_cut_at_the_same_tokens(name):
    inputs, targets = windows()
    losses, gradients = [], []
    for recompute in (False, True):
        model = build_moved(dataclasses.replace(CONFIGS[name], recompute=recompute))
        loss = model.loss(inputs, targets, documents())
        loss.backward()
        losses.append(loss.detach())
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_the_mean_is_over_the_targets_that_count():
    model, (inputs, targets) = build(SMALL), windows()
    counted = torch.tensor([0, 3, 4, 21, 59])
    losses = model.token_losses(inputs, targets).flatten()
    actual = model.loss(inputs, targets, None, counted)
    assert actual.item() == pytest.approx(losses[counted].mean().item(), rel=1e-6)
    assert model.loss(inputs, targets, documents(), counted).isfinite()
    nothing = model.loss(inputs, targets, None, counted[:0])
    nothing.backward()
    assert nothing == 0
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert gradients
    assert all(not gradient.any() for gradient in gradients)


def test_routing_is_measured_on_documents_too():
    routed = dataclasses.replace(SMALL, mixer=DeltaNetConfig(), routing=RoutingConfig(kind="clvr"))
    model, (inputs, _) = build_moved(routed), windows()
    plain, cut = routing_norms(model, inputs), routing_norms(model, inputs, documents())
    assert [norms.layer for norms in cut] == [0, 1, 2]
    assert plain[0].contribution != cut[0].contribution


@pytest.mark.parametrize("name", ["softmax-pure", "softmax-window"])
def test_attention_is_asked_for_the_blocks_of_the_mask_alone(name, monkeypatch):
    model, (inputs, _) = build(CONFIGS[name]), windows()
    asked = []
    attend = type(model.blocks[0].mixer)._attend

    def recorded(self, q, k, v):
        asked.append(tuple(q.shape[::2]))
        return attend(self, q, k, v)

    monkeypatch.setattr(type(model.blocks[0].mixer), "_attend", recorded)
    with torch.no_grad():
        model.hidden(inputs, documents())
    # (parts, length) of each call, for each of three layers.
    assert asked == [(1, 1), (1, 3), (1, 5), (1, 6), (1, 11), (1, 14), (1, 20)] * 3


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 5, 5, 20], "increase"),
        ([1, 20], "start at 0"),
        ([0], "start at 0"),
        ([0, 12], "every multiple of seq_len=20"),
        ([0, 12, 30, 40], "every multiple of seq_len=20"),
    ],
)
def test_bounds_that_cut_no_whole_windows_are_refused(bounds, message):
    with pytest.raises(ValueError, match=message):
        Documents.of(torch.tensor(bounds), 20)


def test_documents_of_another_batch_are_refused():
    model, (inputs, targets) = build(SMALL), windows()
    with pytest.raises(
        ValueError, match=r"3 windows of 20 tokens, but tokens have shape \[2, 20\]"
    ):
        model.loss(inputs[:2], targets[:2], documents())


@pytest.mark.parametrize("name", ["softmax-pure", "deltanet-pure", "gated_linear-pure"])
def test_going_on_from_a_memory_takes_no_documents(name):
    block = build(CONFIGS[name]).blocks[0]
    x = torch.zeros(1, 60, SMALL.d_model)
    state = block.mixer.initial_state(1, x.device)
    with pytest.raises(ValueError, match="documents are given together with a memory"):
        block(x, None, state, documents())


def test_a_sliding_window_counts_within_its_document():
    config = dataclasses.replace(SMALL, num_layers=1, softmax=SoftmaxConfig(window=2))
    model, (inputs, _) = build(config), windows()
    changed = inputs.clone()
    changed[2, 1] = (changed[2, 1] + 1) % VOCAB
    with torch.no_grad():
        moved = model.hidden(inputs, documents()) != model.hidden(changed, documents())
    assert moved.any(-1).nonzero().tolist() == [[2, 1], [2, 2]]
