"""Computing activations again in the backward saves memory and changes nothing else."""

import dataclasses

import pytest
import torch
from torch import Tensor

from models.configs import GatedDeltaNetConfig, ModelConfig, RoutingConfig
from tests.models.small_models import SMALL, build, build_moved, draw_tokens

HYBRID = dataclasses.replace(SMALL, mixer=GatedDeltaNetConfig(), stack="hybrid", softmax_layers=[1])


def routed(host: ModelConfig, kind: str) -> ModelConfig:
    return dataclasses.replace(host, routing=RoutingConfig(kind=kind))


@pytest.mark.parametrize("kind", ["none", "cler", "attention_residuals_clvr"])
def test_recomputing_activations_changes_no_gradient(kind: str) -> None:
    config, tokens = routed(HYBRID, kind), draw_tokens()
    kept, recomputed = (
        build_moved(dataclasses.replace(config, recompute=flag)) for flag in (False, True)
    )
    losses = []
    for model in (kept, recomputed):
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == losses[1]
    for (name, a), b in zip(kept.named_parameters(), recomputed.parameters(), strict=True):
        if a.grad is not None:
            assert torch.equal(a.grad, b.grad), name


def test_recomputing_keeps_fewer_activations() -> None:
    """Bytes that autograd saves besides parameters, counted by its hooks."""
    tokens = draw_tokens(2, 64)
    saved = {}
    for flag in (False, True):
        model = build(dataclasses.replace(HYBRID, recompute=flag))
        parameters = {p.data_ptr() for p in model.parameters()}
        seen: dict[int, int] = {}

        def pack(
            tensor: Tensor, seen: dict[int, int] = seen, known: set[int] = parameters
        ) -> Tensor:
            if tensor.data_ptr() not in known:
                seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model.loss(tokens[:, :-1], tokens[:, 1:])
        saved[flag] = sum(seen.values())
    assert saved[True] < saved[False] / 3
