"""What a model does inside, measured on some tokens: how much routing moves the hidden stream."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from models.compilation import eager
from models.documents import Documents
from models.lm import LanguageModel
from models.routing import HiddenRouting
from models.stack import Block


@dataclass(frozen=True, slots=True)
class RoutingNorms:
    """Root mean squares over tokens and channels around one layer's routing.

    Attributes:
        layer: 0-based.
        contribution: of P s.
        hidden_before: of the hidden stream that the layer's own parts have made; under attention
            residuals, of what the layer's MLP reads.
        hidden_after: of it and P s together.
        projection: Frobenius norm of P, of its up projection where it has a low rank.
    """

    layer: int
    contribution: float
    hidden_before: float
    hidden_after: float
    projection: float


@torch.no_grad()
def routing_norms(
    model: LanguageModel, tokens: Int[Tensor, "B T"], documents: Documents | None = None
) -> list[RoutingNorms]:
    """The norms of every layer that routes into the hidden stream, from one forward pass.

    arXiv 2607.07953 asks that runs with CLER-H or CLVR report them.

    Args:
        model: any model; one without such routing gives an empty list.
        tokens: what it reads.
        documents: the parts that these are read as; see `LanguageModel.hidden`.
    """
    found: list[RoutingNorms] = []
    handles = []
    for layer, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        if block.routing is not None:
            handles.append(block.routing.register_forward_hook(_recorder(found, layer)))
    try:
        with eager(model):
            model.hidden(tokens, documents)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _recorder(found: list[RoutingNorms], layer: int) -> Any:
    def record(module: nn.Module, inputs: tuple[Any, ...], contribution: Tensor) -> None:
        assert isinstance(module, HiddenRouting)
        hidden: Tensor = inputs[0]
        found.append(
            RoutingNorms(
                layer=layer,
                contribution=_rms(contribution),
                hidden_before=_rms(hidden),
                hidden_after=_rms(hidden + contribution),
                projection=float(module.up.weight.float().norm()),
            )
        )

    return record


def _rms(x: Tensor) -> float:
    return float(x.float().square().mean().sqrt())
