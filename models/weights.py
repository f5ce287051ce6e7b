"""How many weights each part of a model has, from its config alone; imports no torch.

The formulas stand at the top of `models.accounting`, which adds them up.
"""

from collections.abc import Callable
from dataclasses import dataclass

from models.configs import (
    GatedDeltaNet2Config,
    GatedLinearConfig,
    LinearConfig,
    ModelConfig,
    SoftmaxConfig,
)

CONV_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Weights:
    """Numbers of one part.

    Attributes:
        matrices: numbers that a token is multiplied with, convolution filters among them.
        vectors: numbers that are only added or scaled by.
    """

    matrices: int
    vectors: int


def key_width(config: ModelConfig) -> int:
    """Q = H K."""
    return config.heads.key_heads * config.heads.key_dim


def value_width(config: ModelConfig) -> int:
    """P = HV V."""
    return config.heads.value_heads * config.heads.value_dim


def conv_channels(config: ModelConfig) -> int:
    """Channels of q, k and v together, 2 Q + P."""
    return 2 * key_width(config) + value_width(config)


def mixer_weights(config: ModelConfig, name: str) -> Weights:
    """Weights of one layer's mixer, `softmax` or the model's own."""
    if name == "softmax":
        return _softmax_weights(config)
    d, channels = config.d_model, conv_channels(config)
    gates = _GATES[name](config)
    if name == "gated_linear":
        # No convolution and no norm of the output.
        return Weights(d * (channels + value_width(config)) + gates.matrices, gates.vectors)
    return Weights(
        # The convolution multiplies every channel with its filter, as a matrix does.
        matrices=d * channels + CONV_WIDTH * channels + value_width(config) * d + gates.matrices,
        vectors=config.heads.value_dim + gates.vectors,
    )


def _softmax_weights(config: ModelConfig) -> Weights:
    heads, options = config.heads, config.softmax or SoftmaxConfig()
    d, query = config.d_model, heads.softmax_heads * heads.softmax_head_dim
    key_value = 2 * heads.softmax_kv_heads * heads.softmax_head_dim
    gate = d * query if options.output_gate else 0
    norms = 2 * heads.softmax_head_dim if options.qk_norm else 0
    return Weights(matrices=d * (query + key_value) + query * d + gate, vectors=norms)


def _linear_gates(config: ModelConfig) -> Weights:
    assert isinstance(config.mixer, LinearConfig)
    rows = config.heads.value_heads if config.mixer.unused_beta else 0
    return Weights(matrices=config.d_model * rows, vectors=0)


def _gated_linear_gates(config: ModelConfig) -> Weights:
    assert isinstance(config.mixer, GatedLinearConfig)
    value_heads = config.heads.value_heads
    decays = {"none": 0, "head": value_heads, "channel": value_heads * config.heads.key_dim}
    rows = decays[config.mixer.decay]
    return Weights(
        matrices=config.d_model * (value_width(config) + rows),
        vectors=rows + value_heads if rows else 0,
    )


def _deltanet_gates(config: ModelConfig) -> Weights:
    return Weights(matrices=config.d_model * config.heads.value_heads, vectors=0)


def _gated_deltanet_gates(config: ModelConfig) -> Weights:
    value_heads = config.heads.value_heads
    return Weights(
        matrices=config.d_model * (value_width(config) + 2 * value_heads),
        vectors=2 * value_heads,
    )


def _kimi_delta_gates(config: ModelConfig) -> Weights:
    heads, width = config.heads, value_width(config)
    rank, decays = heads.value_dim, heads.value_heads * heads.key_dim
    return Weights(
        matrices=config.d_model * (heads.value_heads + 2 * rank) + rank * (decays + width),
        vectors=width + heads.value_heads + decays,
    )


def _gated_deltanet2_gates(config: ModelConfig) -> Weights:
    assert isinstance(config.mixer, GatedDeltaNet2Config)
    d, keys, values = config.d_model, key_width(config), value_width(config)
    decay = config.heads.key_heads + keys
    if config.mixer.variant == "full":
        return Weights(matrices=2 * d * (keys + values), vectors=decay)
    rank = config.heads.value_dim
    return Weights(
        matrices=d * (keys + values) + rank * (2 * d + keys + values), vectors=values + decay
    )


_GATES: dict[str, Callable[[ModelConfig], Weights]] = {
    "linear": _linear_gates,
    "linear_unnormalized": _linear_gates,
    "gated_linear": _gated_linear_gates,
    "deltanet": _deltanet_gates,
    "gated_deltanet": _gated_deltanet_gates,
    "kimi_delta": _kimi_delta_gates,
    "gated_deltanet2": _gated_deltanet2_gates,
}
"""Gate weights of each rule, besides the shell."""


def routing_weights(config: ModelConfig) -> Weights:
    """What routing adds to each memory layer; the queries of attention residuals stand apart."""
    routing, heads = config.routing, config.heads
    values = value_width(config)
    if routing.kind == "cler":
        sizes = {"scalar": 1, "head": heads.value_heads, "channel": values}
        return Weights(matrices=0, vectors=sizes[routing.gamma])
    signal = routing.hidden_signal
    if signal is None:
        return Weights(matrices=0, vectors=0)
    width = {"concatenated": 2 * values, "self_transform": config.d_model}.get(signal, values)
    rank = routing.rank
    matrix = width * config.d_model if rank is None else rank * (width + config.d_model)
    gate = 2 * heads.value_heads if signal == "surprise_gated" else 0
    return Weights(matrices=matrix, vectors=gate)


def query_weights(config: ModelConfig) -> int:
    """Numbers in the queries of attention residuals, over the whole model."""
    return 2 * config.num_layers * config.d_model if config.routing.has_attention_residuals else 0
