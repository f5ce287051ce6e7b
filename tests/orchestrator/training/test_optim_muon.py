"""Muon's matrix step: against torch's, against plain transcriptions, against stated properties."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from orchestrator.training.optim.configs import MATRIX_STEPS, MatrixStep, MuonConfig
from orchestrator.training.optim.muon import Muon, shape_factor
from orchestrator.training.optim.newton_schulz import coefficients_per_step, orthogonalize

WIDE, TALL, SQUARE = (32, 64), (64, 32), (48, 48)
SHAPES = pytest.mark.parametrize("shape", [WIDE, TALL, SQUARE], ids=["wide", "tall", "square"])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(weights: dict[str, Tensor], step: MatrixStep, splits=None, **changes) -> Muon:
    options = {
        "momentum": 0.95,
        "second_moment_beta": 0.95,
        "weight_decay": 0.0,
        "arithmetic": "fp32",
    }
    return Muon(weights, splits or {}, step, **(options | changes))


def singular_values(matrix: Tensor) -> Tensor:
    return torch.linalg.svdvals(matrix.double())


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


@SHAPES
@pytest.mark.parametrize(
    ("factor", "torch_name"), [("original", "original"), ("match_rms", "match_rms_adamw")]
)
@pytest.mark.parametrize("nesterov", [True, False])
def test_keller_equals_torch_muon(shape, factor, torch_name, nesterov):
    """Both iterate in bf16, whose rounding depends on the order: 4e-3 at rate 0.02."""
    step = dataclasses.replace(MATRIX_STEPS["keller"], shape_factor=factor, nesterov=nesterov)
    weight = drawn(*shape)
    parameter = torch.nn.Parameter(weight.clone())
    oracle = torch.optim.Muon(
        [parameter], lr=0.02, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn=torch_name
    )
    ours = make({"w": weight}, step, weight_decay=0.1, arithmetic="bf16")
    for t in range(20):
        gradient = drawn(*shape, seed=t + 1)
        parameter.grad = gradient.clone()
        oracle.step()
        ours.update({"w": gradient}, lr=0.02)
    assert (weight - parameter.detach()).abs().max() < 4e-3
    assert (weight - drawn(*shape)).abs().max() > 0.05


@SHAPES
def test_normuon_equals_a_plain_transcription(shape):
    """The published loop for one matrix, written out in fp32 without batching."""
    weight = drawn(*shape)
    plain, momentum, row_moment = weight.clone(), torch.zeros(shape), torch.zeros(shape[0], 1)
    ours = make({"w": weight}, MATRIX_STEPS["normuon"], weight_decay=0.1)
    for t in range(20):
        gradient = drawn(*shape, seed=t + 1)
        ours.update({"w": gradient}, lr=0.02)

        momentum = 0.95 * momentum + 0.05 * gradient
        x = 0.05 * gradient + 0.95 * momentum
        x = x / (x.norm() + 1e-7)
        x = x.T if shape[0] > shape[1] else x
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        x = x.T if shape[0] > shape[1] else x
        norm = x.norm()
        row_moment = 0.95 * row_moment + 0.05 * x.square().mean(1, keepdim=True)
        x = x / (row_moment.sqrt() + 1e-10)
        x = x * norm / (x.norm() + 1e-10)
        plain = plain * (1 - 0.02 * 0.1) - 0.02 * max(1, shape[0] / shape[1]) ** 0.5 * x
    assert torch.allclose(weight, plain, rtol=0, atol=1e-5)


@SHAPES
def test_paper_with_a_constant_gradient_moves_by_the_known_rms(shape):
    """The direction never changes, so the t-th update is o / √(mean(o²)(1 − 0.95ᵗ))."""
    weight, gradient = torch.zeros(shape), drawn(*shape)
    ours = make({"w": weight}, MATRIX_STEPS["paper"])
    axis = 1 if shape[0] >= shape[1] else 0
    known = {1: 4.4721, 2: 3.2026, 10: 1.5786}
    for t in range(1, 11):
        weight.zero_()
        ours.update({"w": gradient}, lr=1.0)
        along_axis = weight.square().mean(axis).sqrt()
        if t in known:
            assert torch.allclose(along_axis, torch.full_like(along_axis, known[t]), atol=1e-4)


@pytest.mark.parametrize("variant", MATRIX_STEPS)
@pytest.mark.parametrize("scale", [1e-3, 1e3])
@SHAPES
def test_the_scale_of_the_gradient_changes_nothing(variant, scale, shape):
    weights = {"w": torch.zeros(shape)}, {"w": torch.zeros(shape)}
    rules = [make(own, MATRIX_STEPS[variant]) for own in weights]
    for t in range(3):
        gradient = drawn(*shape, seed=t)
        rules[0].update({"w": gradient}, lr=1.0)
        rules[1].update({"w": gradient * scale}, lr=1.0)
    assert torch.allclose(weights[0]["w"], weights[1]["w"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", MATRIX_STEPS)
def test_a_zero_gradient_moves_nothing_and_stays_finite(variant):
    weight = drawn(*WIDE)
    rule = make({"w": weight}, MATRIX_STEPS[variant])
    rule.update({"w": torch.zeros(WIDE)}, lr=1.0)
    assert torch.equal(weight, drawn(*WIDE))


@pytest.mark.parametrize("variant", MATRIX_STEPS)
def test_weight_decay_alone_shrinks_by_its_exact_factor(variant):
    weight = drawn(*WIDE)
    rule = make({"w": weight}, MATRIX_STEPS[variant], weight_decay=0.1)
    rule.update({"w": torch.zeros(WIDE)}, lr=0.25)
    assert torch.equal(weight, drawn(*WIDE) * (1 - 0.25 * 0.1))


@SHAPES
@pytest.mark.parametrize("kind", ["spectral", "original", "match_rms", "none"])
def test_an_orthogonal_update_has_the_rms_of_its_shape(shape, kind):
    step = dataclasses.replace(
        MATRIX_STEPS["keller"], coefficients="classical", ns_steps=30, shape_factor=kind
    )
    weight = torch.zeros(shape)
    make({"w": weight}, step).update({"w": drawn(*shape)}, lr=1.0)
    rows, cols = shape
    expected = math.sqrt(min(shape) / (rows * cols)) * shape_factor(kind, rows, cols)
    assert rms(weight) == pytest.approx(expected, rel=1e-3)


def test_shape_factors_have_their_published_values():
    assert shape_factor("spectral", 64, 16) == 8.0
    assert shape_factor("original", 64, 16) == 2.0
    assert shape_factor("original", 16, 64) == 1.0
    assert shape_factor("match_rms", 16, 64) == pytest.approx(1.6)
    assert shape_factor("none", 64, 16) == 1.0


@pytest.mark.parametrize("variant", ["paper", "keller"])
def test_a_transposed_matrix_gets_the_transposed_direction(variant):
    step = dataclasses.replace(MATRIX_STEPS[variant], shape_factor="none")
    weights = {"w": torch.zeros(WIDE)}, {"w": torch.zeros(TALL)}
    rules = [make(own, step) for own in weights]
    for t in range(3):
        gradient = drawn(*WIDE, seed=t)
        rules[0].update({"w": gradient}, lr=1.0)
        rules[1].update({"w": gradient.T.contiguous()}, lr=1.0)
    assert torch.allclose(weights[0]["w"], weights[1]["w"].T, atol=1e-5)


@pytest.mark.parametrize(
    ("coefficients", "num_steps", "margin", "error"),
    [
        ("keller", 5, 1.0, 0.579),
        ("quintic", 5, 1.0, 0.563),
        ("polar_express", 5, 1.02, 0.500),
        ("polar_express", 7, 1.02, 0.294),
        ("classical", 5, 1.0, 0.804),
        ("classical", 15, 1.0, 0.173),
    ],
)
def test_the_iteration_reaches_the_known_distance_from_the_polar_factor(
    coefficients, num_steps, margin, error
):
    """A 256 × 256 matrix with singular values from 1 down to 1e-4, evenly in their logarithm."""
    left, _ = torch.linalg.qr(drawn(256, 256, seed=1))
    right, _ = torch.linalg.qr(drawn(256, 256, seed=2))
    matrix = left @ torch.diag(torch.logspace(0, -4, 256)) @ right.T
    triples = coefficients_per_step(coefficients, num_steps)
    result = orthogonalize(matrix[None], triples, norm_margin=margin)[0]
    distance = (result - left @ right.T).norm() / (left @ right.T).norm()
    assert distance.item() == pytest.approx(error, abs=2e-3)


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", MATRIX_STEPS)
def test_most_singular_values_end_near_one(variant, arithmetic):
    step = MATRIX_STEPS[variant]
    triples = coefficients_per_step(step.coefficients, step.ns_steps)
    values = singular_values(orthogonalize(drawn(1, 64, 96), triples, arithmetic=arithmetic)[0])
    assert 0.6 < values.median() < 1.25
    assert values.max() < 1.25


@pytest.mark.parametrize("variant", MATRIX_STEPS)
def test_stacked_matrices_move_as_each_alone(variant):
    shapes = {"a": WIDE, "b": WIDE, "c": TALL, "d": WIDE}
    together = {n: drawn(*s, seed=i) for i, (n, s) in enumerate(shapes.items())}
    alone = {n: w.clone() for n, w in together.items()}
    rule = make(together, MATRIX_STEPS[variant], weight_decay=0.1)
    single = {n: make({n: w}, MATRIX_STEPS[variant], weight_decay=0.1) for n, w in alone.items()}
    for t in range(3):
        gradients = {n: drawn(*s, seed=10 * t + i) for i, (n, s) in enumerate(shapes.items())}
        rule.update(gradients, lr=0.1)
        for name, own in single.items():
            own.update({name: gradients[name]}, lr=0.1)
    for name in shapes:
        assert torch.allclose(together[name], alone[name], rtol=0, atol=1e-6), name


@pytest.mark.parametrize("variant", MATRIX_STEPS)
def test_split_blocks_move_as_separate_parameters(variant):
    fused = drawn(80, 32)
    parts = {n: p.clone() for n, p in zip("qkv", fused.split([32, 16, 32]), strict=True)}
    split = make({"w": fused}, MATRIX_STEPS[variant], {"w": (("q", 32), ("k", 16), ("v", 32))})
    separate = make(parts, MATRIX_STEPS[variant])
    for t in range(3):
        gradient = drawn(80, 32, seed=t)
        split.update({"w": gradient}, lr=0.1)
        separate.update(dict(zip("qkv", gradient.split([32, 16, 32]), strict=True)), lr=0.1)
    assert torch.allclose(fused, torch.cat([parts[n] for n in "qkv"]), rtol=0, atol=1e-6)


def test_a_fused_matrix_moves_otherwise_than_its_blocks():
    whole, split = drawn(64, 32), drawn(64, 32)
    gradient = drawn(64, 32, seed=1)
    make({"w": whole}, MATRIX_STEPS["keller"]).update({"w": gradient}, lr=0.1)
    rule = make({"w": split}, MATRIX_STEPS["keller"], {"w": (("gate", 32), ("up", 32))})
    rule.update({"w": gradient}, lr=0.1)
    assert (whole - split).abs().max() > 0.01


def test_matrices_without_a_gradient_keep_weight_and_state():
    weights = {n: drawn(*WIDE, seed=i) for i, n in enumerate("abc")}
    rule = make(weights, MATRIX_STEPS["paper"], weight_decay=0.1)
    rule.update({n: drawn(*WIDE, seed=9) for n in "abc"}, lr=0.1)
    before = {n: w.clone() for n, w in weights.items()}
    state = {n: t.clone() for n, t in rule.state().items()}
    rule.update({n: drawn(*WIDE, seed=10) for n in "ac"}, lr=0.1)
    assert torch.equal(weights["b"], before["b"])
    for name, tensor in rule.state().items():
        assert torch.equal(tensor, state[name]) == name.endswith("/b"), name
    assert not torch.equal(weights["a"], before["a"])
    assert not torch.equal(weights["c"], before["c"])


def test_cautious_decay_spares_weights_that_the_update_enlarges():
    step = dataclasses.replace(MATRIX_STEPS["keller"], cautious_decay=True)
    start = drawn(*WIDE)
    plain, decayed, cautious = start.clone(), start.clone(), start.clone()
    gradient = {"w": drawn(*WIDE, seed=1)}
    make({"w": plain}, MATRIX_STEPS["keller"]).update(gradient, lr=0.5)
    make({"w": decayed}, MATRIX_STEPS["keller"], weight_decay=0.2).update(gradient, lr=0.5)
    make({"w": cautious}, step, weight_decay=0.2).update(gradient, lr=0.5)
    shrinks = (start - plain) * start >= 0
    assert torch.allclose(cautious, torch.where(shrinks, decayed, plain), rtol=0, atol=1e-6)
    assert shrinks.any()
    assert not shrinks.all()


def test_a_second_moment_has_one_entry_per_index_of_the_longer_side():
    weights = {"wide": drawn(*WIDE), "tall": drawn(*TALL), "square": drawn(*SQUARE)}
    shapes = {n: tuple(t.shape) for n, t in make(weights, MATRIX_STEPS["paper"]).state().items()}
    assert shapes["second_moment/wide"] == (1, 64)
    assert shapes["second_moment/tall"] == (64, 1)
    assert shapes["second_moment/square"] == (48, 1)


def test_a_vector_in_the_matrix_group_is_refused():
    with pytest.raises(ValueError, match=r"bias of shape \(8,\) cannot be in Muon's matrix group"):
        make({"bias": torch.zeros(8)}, MATRIX_STEPS["paper"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variant": "adam"}, "optimizer.variant='adam' must be one of paper, keller, normuon"),
        ({"lr": -1.0}, "optimizer.lr=-1.0 must be finite and at least 0"),
        ({"adam_lr": float("nan")}, "optimizer.adam_lr=nan must be finite"),
        ({"momentum": 1.0}, r"optimizer.momentum=1.0 must lie in \[0, 1\)"),
        ({"adam_betas": [0.9]}, "must be two numbers"),
        ({"ns_steps": 4}, "optimizer.ns_steps=4 must be at least 5"),
        ({"coefficients": "cans"}, "optimizer.coefficients='cans' must be one of"),
        ({"split": "heads"}, "optimizer.split='heads' must be one of blocks, attention, fused"),
        ({"restore_norm": True, "second_moment": "off"}, "restore_norm=True needs"),
        ({"role_groups": {"head": "none"}}, "optimizer.role_groups.head='none' must be one of"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        MuonConfig(**changes)


def test_a_key_of_its_own_replaces_the_choice_of_the_variant():
    step = MuonConfig(variant="keller", coefficients="polar_express", nesterov=False).matrix_step()
    assert step == dataclasses.replace(
        MATRIX_STEPS["keller"], coefficients="polar_express", nesterov=False
    )
