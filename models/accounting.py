"""What a model costs, counted from its config alone: parameters, memory, FLOPs; imports no torch.

With D the model width, L layers, F the hidden width of the MLP, H key heads of dim K, HV value
heads of dim V, Q = H K, P = HV V, h query heads and kv key-value heads of dim d in softmax layers:

    embedding, head, final norm     2 vocab D + D
    MLP and the two norms of a layer   3 D F + 2 D
    softmax                         D (h d + 2 kv d) + h d D, and D h d with an output gate
    recurrent shell                 D (2 Q + P) + 4 (2 Q + P) + V + P D
    its gates, in matrices and vectors   see `_GATES`

Every formula equals what the modules of `models` allocate; a test holds them to it. The parameter
totals are those of arXiv 2607.07953's public code for the layers it has.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from models.configs import (
    GatedDeltaNet2Config,
    LinearConfig,
    MixerConfig,
    ModelConfig,
    SoftmaxConfig,
)

CONV_WIDTH = 4
FLOAT32_BYTES = 4
FFN_STEPS = (16, 8, 4)
"""Multiples that a solved MLP width may have, the best for the hardware first."""
MATCH_TOLERANCE = 0.01
"""Largest relative distance of a solved cell's non-embedding parameters from the target."""


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Numbers of parameters.

    Attributes:
        total: all.
        non_embedding: all but embedding and head.
    """

    total: int
    non_embedding: int


@dataclass(frozen=True, slots=True)
class _Weights:
    """Numbers that a token is multiplied with, and numbers that are only added or scaled by."""

    matrices: int
    vectors: int


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Parameters of a model: all, and those without embedding and head."""
    non_embedding = config.d_model
    for name in config.layer_mixers():
        weights = _mixer_weights(config, name)
        non_embedding += weights.matrices + weights.vectors
        non_embedding += 3 * config.d_model * config.ffn_dim + 2 * config.d_model
    return ParameterCount(
        total=non_embedding + 2 * vocab_size * config.d_model, non_embedding=non_embedding
    )


def softmax_reference(config: ModelConfig) -> ModelConfig:
    """The pure softmax stack of the same size, whose parameters matched cells aim at.

    Depth, widths and heads are those of `config`; softmax layers have neither output gate nor q-k
    norm. Call it before the MLP width is solved.
    """
    return replace(
        config, mixer=MixerConfig(), stack="pure", softmax_layers=None, softmax=SoftmaxConfig()
    )


def solve_ffn_dim(config: ModelConfig, target_non_embedding: int) -> int:
    """The MLP width that brings a model to a number of non-embedding parameters.

    The nearest multiple of 16 where it lands within 1 %, else of 8, else of 4: the count is affine
    in the width, so the nearest multiple of each step is the best one.

    Args:
        config: the model; its own `ffn_dim` is not read.
        target_non_embedding: parameters to reach.

    Raises:
        ValueError: no multiple of 4 lands within 1 %.
    """
    per_unit = 3 * config.d_model * config.num_layers
    rest = count_parameters(replace(config, ffn_dim=1), 0).non_embedding - per_unit
    exact = (target_non_embedding - rest) / per_unit
    for step in FFN_STEPS:
        width = max(step, step * round(exact / step))
        distance = abs(rest + per_unit * width - target_non_embedding)
        if distance <= MATCH_TOLERANCE * target_non_embedding:
            return width
    raise ValueError(
        f"no model.ffn_dim that is a multiple of {FFN_STEPS[-1]} brings mixer "
        f"{config.mixer.name!r} at model.d_model={config.d_model}, "
        f"model.num_layers={config.num_layers} within {MATCH_TOLERANCE:.0%} of "
        f"{target_non_embedding} non-embedding parameters; the nearest is {width}"
    )


def state_bytes(
    config: ModelConfig,
    *,
    memory_itemsize: int = FLOAT32_BYTES,
    cache_itemsize: int = FLOAT32_BYTES,
) -> int:
    """Bytes per sequence that don't grow with its length.

    Args:
        config: the model.
        memory_itemsize: bytes of each number of recurrent memory; the models keep float32.
        cache_itemsize: bytes of each cached convolution input: 2 in bfloat16.
    """
    memory = recurrent_memory_numbers(config)
    windows = convolution_window_numbers(config)
    return memory * memory_itemsize + windows * cache_itemsize


def recurrent_memory_numbers(config: ModelConfig) -> int:
    """Numbers in the recurrent memory of one sequence, over all layers."""
    heads = config.heads
    layers = _recurrent_layers(config)
    columns = heads.value_dim + (1 if config.mixer.name == "linear" else 0)
    return layers * heads.value_heads * heads.key_dim * columns


def convolution_window_numbers(config: ModelConfig) -> int:
    """Numbers in the convolution windows of one sequence, over all layers."""
    return _recurrent_layers(config) * (CONV_WIDTH - 1) * _conv_channels(config)


def kv_bytes_per_token(config: ModelConfig, *, itemsize: int = FLOAT32_BYTES) -> int:
    """Bytes that each further token of a sequence adds to the key-value caches.

    Args:
        config: the model.
        itemsize: bytes of each cached number: 2 in bfloat16 and float16.
    """
    heads = config.heads
    softmax_layers = len(config.softmax_indices())
    return softmax_layers * 2 * heads.softmax_kv_heads * heads.softmax_head_dim * itemsize


def forward_flops_per_token(config: ModelConfig, vocab_size: int, seq_len: int) -> int:
    """FLOPs of the forward pass per token, two for each multiply-add, mean over positions.

    Matrices, convolutions, memory rules in their token-by-token form (a chunked form spends more,
    depending on its chunk) and causal attention over (seq_len + 1) / 2 tokens; not norms,
    activations, gates and the embedding, which is a look-up.
    """
    flops = 2 * vocab_size * config.d_model
    for name in config.layer_mixers():
        flops += 2 * _mixer_weights(config, name).matrices
        flops += 6 * config.d_model * config.ffn_dim
        flops += _memory_flops(config, name, seq_len)
    return flops


def flops_per_token(config: ModelConfig, vocab_size: int, seq_len: int) -> int:
    """FLOPs of training per token: the forward pass, and twice as many in the backward pass."""
    return 3 * forward_flops_per_token(config, vocab_size, seq_len)


def _recurrent_layers(config: ModelConfig) -> int:
    return config.num_layers - len(config.softmax_indices())


def _key_width(config: ModelConfig) -> int:
    return config.heads.key_heads * config.heads.key_dim


def _value_width(config: ModelConfig) -> int:
    return config.heads.value_heads * config.heads.value_dim


def _conv_channels(config: ModelConfig) -> int:
    return 2 * _key_width(config) + _value_width(config)


def _mixer_weights(config: ModelConfig, name: str) -> _Weights:
    if name == "softmax":
        return _softmax_weights(config)
    d, channels = config.d_model, _conv_channels(config)
    gates = _GATES[name](config)
    return _Weights(
        # The convolution multiplies every channel with its filter, as a matrix does.
        matrices=d * channels + CONV_WIDTH * channels + _value_width(config) * d + gates.matrices,
        vectors=config.heads.value_dim + gates.vectors,
    )


def _softmax_weights(config: ModelConfig) -> _Weights:
    heads, options = config.heads, config.softmax or SoftmaxConfig()
    d, query = config.d_model, heads.softmax_heads * heads.softmax_head_dim
    key_value = 2 * heads.softmax_kv_heads * heads.softmax_head_dim
    gate = d * query if options.output_gate else 0
    norms = 2 * heads.softmax_head_dim if options.qk_norm else 0
    return _Weights(matrices=d * (query + key_value) + query * d + gate, vectors=norms)


def _linear_gates(config: ModelConfig) -> _Weights:
    assert isinstance(config.mixer, LinearConfig)
    rows = config.heads.value_heads if config.mixer.unused_beta else 0
    return _Weights(matrices=config.d_model * rows, vectors=0)


def _deltanet_gates(config: ModelConfig) -> _Weights:
    return _Weights(matrices=config.d_model * config.heads.value_heads, vectors=0)


def _gated_deltanet_gates(config: ModelConfig) -> _Weights:
    value_heads = config.heads.value_heads
    return _Weights(
        matrices=config.d_model * (_value_width(config) + 2 * value_heads),
        vectors=2 * value_heads,
    )


def _kimi_delta_gates(config: ModelConfig) -> _Weights:
    heads, width = config.heads, _value_width(config)
    rank, decays = heads.value_dim, heads.value_heads * heads.key_dim
    return _Weights(
        matrices=config.d_model * (heads.value_heads + 2 * rank) + rank * (decays + width),
        vectors=width + heads.value_heads + decays,
    )


def _gated_deltanet2_gates(config: ModelConfig) -> _Weights:
    assert isinstance(config.mixer, GatedDeltaNet2Config)
    d, keys, values = config.d_model, _key_width(config), _value_width(config)
    decay = config.heads.key_heads + keys
    if config.mixer.variant == "full":
        return _Weights(matrices=2 * d * (keys + values), vectors=decay)
    rank = config.heads.value_dim
    return _Weights(
        matrices=d * (keys + values) + rank * (2 * d + keys + values), vectors=values + decay
    )


_GATES: dict[str, Callable[[ModelConfig], _Weights]] = {
    "linear": _linear_gates,
    "linear_unnormalized": _linear_gates,
    "deltanet": _deltanet_gates,
    "gated_deltanet": _gated_deltanet_gates,
    "kimi_delta": _kimi_delta_gates,
    "gated_deltanet2": _gated_deltanet2_gates,
}
"""Gate weights of each rule, besides the shell."""

_RULE_FLOPS_PER_STATE_NUMBER = {
    "linear": 4,
    "linear_unnormalized": 4,
    "deltanet": 6,
    "gated_deltanet": 7,
    "kimi_delta": 7,
    "gated_deltanet2": 7,
}
"""Write and read 2 each; what the key returns 2 more; a decay 1 more."""


def _memory_flops(config: ModelConfig, name: str, seq_len: int) -> int:
    heads = config.heads
    if name == "softmax":
        # Scores and values, 2 d each, over (seq_len + 1) / 2 tokens on average.
        return 2 * heads.softmax_heads * heads.softmax_head_dim * (seq_len + 1)
    numbers = recurrent_memory_numbers(config) // _recurrent_layers(config)
    return _RULE_FLOPS_PER_STATE_NUMBER[name] * numbers
