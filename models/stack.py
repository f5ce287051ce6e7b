"""Layers, their order, and what runs between them besides the residual stream.

A hybrid with `softmax_every` N has softmax at the 0-based layers i with (i + 1) mod N = 0, so N = 3
repeats [linear, linear, softmax]; which layers are which is `ModelConfig.layer_mixers`.

Every function here serves a sequence `[B, T, D]` from an empty memory (state None), more tokens
`[B, T, D]` from a state, and one token `[B, D]` from a state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.attention_residuals import SourceQuery, Sources
from models.configs import ModelConfig
from models.documents import Documents, refuse_state
from models.layers import RMSNorm, SwiGLU
from models.mixer import Mixer, MixerState
from models.mixers import MIXERS
from models.recurrent import RecurrentMixer, Signals
from models.routing import ErrorInjection, HiddenRouting


class Mixed(NamedTuple):
    """What a layer's mixer returns.

    Attributes:
        out: its contribution to the residual stream.
        state: its memory after the last token; None where it started from none.
        signals: of its memory, where the layer routes.
    """

    out: Tensor
    state: MixerState | None
    signals: Signals | None


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + MLP(norm(x)), then what it routes.

    Args:
        config: the model's shape.
        mixer: the layer's sequence mixer.
    """

    def __init__(self, config: ModelConfig, mixer: Mixer) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mixer = mixer
        self.mlp_norm = RMSNorm(config.d_model, config.norm_eps)
        self.mlp = SwiGLU(config.d_model, config.ffn_dim, config.num_layers)
        self.injection: ErrorInjection | None = None
        self.routing: HiddenRouting | None = None
        self.residual: str | None = None
        if isinstance(mixer, RecurrentMixer):
            routing = config.routing
            self.residual = routing.residual if routing.routes_error else None
            if routing.kind == "cler":
                self.injection = ErrorInjection(config.heads, routing.gamma, routing.gamma_init)
            if routing.hidden_signal is not None:
                self.routing = HiddenRouting(config)

    def forward(
        self,
        x: Float[Tensor, "... D"],
        error: Float[Tensor, "... HV V"] | None = None,
        state: MixerState | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Tensor, "... D"], Float[Tensor, "... HV V"] | None, MixerState | None]:
        """The residual stream after this layer, the error that the next memory layer gets, memory.

        Args:
            x: the residual stream.
            error: of the nearest memory layer below; None where nothing is routed or none is below.
            state: the mixer's memory before; consumed. None for a sequence from an empty one.
            documents: the parts of a row that is a whole batch; see `Mixer.forward`.
        """
        mixed = self.mix(x, error, state, documents)
        x = x + mixed.out
        x = x + self.mlp(self.mlp_norm(x))
        if self.routing is not None and mixed.signals is not None:
            x = x + self.routing(x, mixed.signals)
        if self.injection is not None and mixed.signals is not None:
            error = mixed.signals.error
        return x, error, mixed.state

    def mix(
        self,
        x: Float[Tensor, "... D"],
        error: Float[Tensor, "... HV V"] | None,
        state: MixerState | None,
        documents: Documents | None = None,
    ) -> Mixed:
        """What the mixer adds to the residual stream; arguments as in `forward`.

        Raises:
            ValueError: documents together with a memory.
        """
        refuse_state(documents, state)
        normed = self.mixer_norm(x)
        if isinstance(self.mixer, RecurrentMixer) and (self.injection or self.routing):
            shift = None
            if self.injection is not None and error is not None:
                shift = self.injection(error)
            out, after, signals = self.mixer.routed(
                normed, state, shift=shift, residual=self.residual, documents=documents
            )
            return Mixed(out, None if state is None else after, signals)
        if state is None:
            return Mixed(self.mixer(normed, documents), None, None)
        read = self.mixer.step if x.ndim == 2 else self.mixer.extend
        return Mixed(*read(normed, state), None)

    def feed_forward(
        self, hidden: Float[Tensor, "... D"], signals: Signals | None
    ) -> Float[Tensor, "... D"]:
        """What the MLP contributes under attention residuals, with what the layer routes."""
        contribution: Tensor = self.mlp(self.mlp_norm(hidden))
        if self.routing is not None and signals is not None:
            contribution = contribution + self.routing(hidden, signals)
        return contribution


def build_blocks(config: ModelConfig) -> list[Block]:
    """The layers from the first to the last, parameters unset."""
    blocks = []
    for name in config.layer_mixers():
        options = config.softmax if name == "softmax" else config.mixer
        _, mixer_class = MIXERS[name]
        blocks.append(Block(config, mixer_class(config, options)))
    return blocks


def build_queries(config: ModelConfig) -> list[SourceQuery]:
    """The queries of attention residuals: of every sub-layer but the first, and the final one."""
    if not config.routing.has_attention_residuals:
        return []
    return [SourceQuery(config.d_model) for _ in range(2 * config.num_layers)]


def run_blocks(
    blocks: list[Block],
    x: Float[Tensor, "... D"],
    states: list[MixerState] | None,
    *,
    recompute: bool,
    documents: Documents | None = None,
) -> tuple[Float[Tensor, "... D"], list[MixerState]]:
    """The residual stream after all layers, and their memories where `states` were given.

    Args:
        blocks: the layers.
        x: the embedding.
        states: one memory per layer; consumed. None for a sequence from empty ones.
        recompute: keep only each layer's input for the backward.
        documents: the parts of a row that is a whole batch; without `states` only.
    """
    error: Tensor | None = None
    after: list[MixerState] = []
    for index, block in enumerate(blocks):
        if states is not None:
            # `forward` itself, since layers are compiled for whole sequences only.
            x, error, state = block.forward(x, error, states[index])
            assert state is not None
            after.append(state)
        else:
            x, error, _ = _called(block, x, error, None, documents, recompute=recompute)
    return x, after


def run_attention_residuals(
    blocks: list[Block],
    queries: list[SourceQuery],
    x: Float[Tensor, "... D"],
    states: list[MixerState] | None,
    *,
    recompute: bool,
    documents: Documents | None = None,
) -> tuple[Float[Tensor, "... D"], list[MixerState]]:
    """As `run_blocks`, with averages of all contributions in the place of their running sum.

    Args:
        blocks: the layers.
        queries: as `build_queries` makes them.
        x: the embedding.
        states: one memory per layer; consumed. None for a sequence from empty ones.
        recompute: keep only the inputs of mixers and MLPs for the backward.
        documents: the parts of a row that is a whole batch; without `states` only.
    """
    sources = Sources(x)
    after = []
    readers = iter(queries)
    for index, block in enumerate(blocks):
        # A single source needs no query: its share is one.
        hidden = x if index == 0 else next(readers)(sources)
        state = None if states is None else states[index]
        mixed = _called(
            block.mix, hidden, None, state, documents, recompute=recompute and state is None
        )
        sources.append(mixed.out)
        hidden = next(readers)(sources)
        sources.append(_called(block.feed_forward, hidden, mixed.signals, recompute=recompute))
        if mixed.state is not None:
            after.append(mixed.state)
    final: Tensor = next(readers)(sources)
    return final, after


def _called(function: Callable[..., Any], *arguments: Any, recompute: bool) -> Any:
    """The function's result; with `recompute` its inner activations are made again in backward."""
    if recompute and torch.is_grad_enabled():
        # Nothing is drawn inside, so no generator's state has to be kept.
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)
    return function(*arguments)
