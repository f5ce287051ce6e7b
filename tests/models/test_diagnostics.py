"""Routing norms are those of the tensors they name."""

import pytest
import torch

from models.diagnostics import routing_norms
from tests.models.small_models import ROUTED_CONFIGS, build, build_moved, draw_tokens


def test_routing_norms_are_those_of_the_stream_and_of_what_is_added() -> None:
    model, tokens = build_moved(ROUTED_CONFIGS["routed-clvr"]), draw_tokens()
    norms = routing_norms(model, tokens)
    assert [n.layer for n in norms] == [0, 2], "softmax layers route nothing"
    with torch.no_grad():
        block = model.blocks[0]
        x = model.embedding(tokens)
        mixed = block.mix(x, None, None)
        x = x + mixed.out
        x = x + block.mlp(block.mlp_norm(x))
        added = mixed.signals.value.flatten(-2) @ block.routing.up.weight.T
    for found, tensor in (
        (norms[0].contribution, added),
        (norms[0].hidden_before, x),
        (norms[0].hidden_after, x + added),
    ):
        assert found == pytest.approx(float(tensor.square().mean().sqrt()), rel=1e-5)
    assert norms[0].projection == pytest.approx(float(block.routing.up.weight.detach().norm()))


def test_a_start_routes_nothing_and_leaves_no_hook() -> None:
    model, tokens = build(ROUTED_CONFIGS["routed-cler_h"]), draw_tokens()
    assert [n.contribution for n in routing_norms(model, tokens)] == [0.0, 0.0]
    assert not any(block.routing._forward_hooks for block in model.blocks if block.routing)


def test_a_model_without_hidden_routing_has_no_norms() -> None:
    assert routing_norms(build(ROUTED_CONFIGS["routed-cler"]), draw_tokens()) == []
