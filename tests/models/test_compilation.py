"""Compiled layers compute what eager ones do, and one graph serves all layers of a kind."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from models.compilation import compile_layers
from models.configs import GatedDeltaNetConfig, ModelConfig, RoutingConfig
from models.lm import LanguageModel
from tests.models.small_models import CONFIGS, build_moved, draw_tokens, relative_rms

# Tracing itself reads gradients that are none, and makes autograd functions in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")

ROUTED_HYBRID = dataclasses.replace(
    CONFIGS["gated_deltanet-hybrid"], routing=RoutingConfig(kind="clvr")
)


@pytest.fixture(autouse=True)
def _no_graph_is_left():
    yield
    torch._dynamo.reset()
    counters().clear()


def counters() -> Any:
    """What Dynamo has counted; it is imported by its first use, which takes seconds."""
    return torch._dynamo.utils.counters


def loss_and_gradient(model: LanguageModel) -> tuple[float, Tensor]:
    tokens = draw_tokens()
    loss = model.loss(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(gradients)


def assert_compiled_equals_eager(config: ModelConfig, backend: str) -> None:
    eager, compiled = build_moved(config), build_moved(config)
    compile_layers(compiled, backend)
    assert list(compiled.state_dict()) == list(eager.state_dict())
    loss, gradient = loss_and_gradient(eager)
    compiled_loss, compiled_gradient = loss_and_gradient(compiled)
    assert counters()["stats"]["unique_graphs"] > 0
    assert compiled_loss == pytest.approx(loss, rel=1e-5)
    assert relative_rms(compiled_gradient, gradient) < 1e-5


def test_compiled_layers_of_a_routed_hybrid_equal_eager_ones() -> None:
    assert_compiled_equals_eager(ROUTED_HYBRID, "eager")
    state = (model := build_moved(ROUTED_HYBRID)).initial_state(2)
    compile_layers(model, "eager")
    before = counters()["stats"]["unique_graphs"]
    tokens = draw_tokens()
    logits, _ = model.extend(tokens, state)
    torch.testing.assert_close(logits, build_moved(ROUTED_HYBRID)(tokens)[:, -1])
    assert counters()["stats"]["unique_graphs"] == before


@pytest.mark.slow
def test_more_layers_need_no_more_graphs() -> None:
    def graphs(num_layers: int) -> int:
        counters().clear()
        torch._dynamo.reset()
        config = dataclasses.replace(CONFIGS["linear-pure"], num_layers=num_layers)
        compile_layers(model := build_moved(config), "eager")
        loss_and_gradient(model)
        return int(counters()["stats"]["unique_graphs"])

    assert graphs(10) == graphs(3) > 0


def test_attention_residuals_are_not_compiled() -> None:
    routing = RoutingConfig(kind="attention_residuals")
    with pytest.raises(ValueError, match=r"model.compile=true .*'attention_residuals' is not serv"):
        ModelConfig(mixer=GatedDeltaNetConfig(), routing=routing, compile=True)


COMPILED = [n for n, config in CONFIGS.items() if not config.routing.has_attention_residuals]


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_fused_layers_of_every_model_equal_eager_ones(name: str) -> None:
    assert_compiled_equals_eager(CONFIGS[name], "inductor")
