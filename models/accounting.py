"""What a model costs, counted from its config alone: parameters, memory, FLOPs; imports no torch.

With D the model width, L layers, F the hidden width of the MLP, H key heads of dim K, HV value
heads of dim V, Q = H K, P = HV V, h query heads and kv key-value heads of dim d in softmax layers:

    embedding, head, final norm    2 vocab D + D
    MLP and two norms of a layer   3 D F + 2 D
    softmax                        D (h d + 2 kv d) + h d D, and D h d with an output gate
    recurrent shell                D (2 Q + P) + 4 (2 Q + P) + V + P D, and the rule's gates
    routing                        2 L D for attention residuals; P D, or r (P + D) at rank r, per
                                   memory layer for a routed value or error

Every formula equals what the modules of `models` allocate; a test holds them to it. The parameter
totals are those of arXiv 2607.07953's public code for the layers it has.
"""

from dataclasses import dataclass, replace

from models.configs import GatedLinearConfig, MixerConfig, ModelConfig, RoutingConfig, SoftmaxConfig
from models.weights import (
    CONV_WIDTH,
    conv_channels,
    mixer_weights,
    query_weights,
    routing_weights,
)

FLOAT32_BYTES = 4
FFN_STEPS = (16, 8, 4)
"""Multiples that a solved MLP width may have, the best for the hardware first."""
NORMALIZED_MIXERS = ("linear", "gated_linear")
"""Mixers whose memory has a running sum of keys beside each head's values."""
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


def count_parameters(config: ModelConfig, vocab_size: int) -> ParameterCount:
    """Parameters of a model: all, and those without embedding and head."""
    names = config.layer_mixers()
    per_layer = 3 * config.d_model * config.ffn_dim + 2 * config.d_model
    non_embedding = config.d_model + query_weights(config) + len(names) * per_layer
    for name in dict.fromkeys(names):
        parts = [mixer_weights(config, name)]
        if name != "softmax":
            parts.append(routing_weights(config))
        one_layer = sum(part.matrices + part.vectors for part in parts)
        non_embedding += names.count(name) * one_layer
    return ParameterCount(
        total=non_embedding + 2 * vocab_size * config.d_model, non_embedding=non_embedding
    )


def softmax_reference(config: ModelConfig) -> ModelConfig:
    """The pure softmax stack of the same size, whose parameters matched cells aim at.

    Depth, widths and heads are those of `config`; softmax layers have neither output gate nor q-k
    norm, and nothing is routed. Call it before the MLP width is solved.
    """
    return replace(
        config,
        mixer=MixerConfig(),
        stack="pure",
        softmax_layers=None,
        softmax=SoftmaxConfig(),
        routing=RoutingConfig(),
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
        cache_itemsize: bytes of each cached convolution input, and of each key and value of a
            sliding window: 2 in bfloat16.
    """
    memory = recurrent_memory_numbers(config)
    cached = convolution_window_numbers(config) + attention_window_numbers(config)
    return memory * memory_itemsize + cached * cache_itemsize


def recurrent_memory_numbers(config: ModelConfig) -> int:
    """Numbers in the recurrent memory of one sequence, over all layers."""
    heads = config.heads
    layers = _recurrent_layers(config)
    columns = heads.value_dim + (1 if config.mixer.name in NORMALIZED_MIXERS else 0)
    return layers * heads.value_heads * heads.key_dim * columns


def convolution_window_numbers(config: ModelConfig) -> int:
    """Numbers in the convolution windows of one sequence, over all layers."""
    if config.mixer.name == "gated_linear":
        return 0
    return _recurrent_layers(config) * (CONV_WIDTH - 1) * conv_channels(config)


def attention_window_numbers(config: ModelConfig) -> int:
    """Numbers in the keys and values of sliding windows of one sequence, over all layers."""
    heads, options = config.heads, config.softmax
    if options is None or options.window is None:
        return 0
    per_token = 2 * heads.softmax_kv_heads * heads.softmax_head_dim
    return len(config.softmax_indices()) * options.window * per_token


def kv_bytes_per_token(config: ModelConfig, *, itemsize: int = FLOAT32_BYTES) -> int:
    """Bytes that each further token of a sequence adds to the key-value caches; 0 under a window.

    Args:
        config: the model.
        itemsize: bytes of each cached number: 2 in bfloat16 and float16.
    """
    heads = config.heads
    if config.softmax is not None and config.softmax.window is not None:
        return 0
    softmax_layers = len(config.softmax_indices())
    return softmax_layers * 2 * heads.softmax_kv_heads * heads.softmax_head_dim * itemsize


def forward_flops_per_token(config: ModelConfig, vocab_size: int, seq_len: int) -> int:
    """FLOPs of the forward pass per token, two for each multiply-add, mean over positions.

    Matrices, convolutions, memory rules in their token-by-token form (a chunked form spends more,
    depending on its chunk) and causal attention over (seq_len + 1) / 2 tokens; not norms,
    activations, gates and the embedding, which is a look-up.
    """
    names = config.layer_mixers()
    flops = 2 * vocab_size * config.d_model + len(names) * 6 * config.d_model * config.ffn_dim
    flops += _attention_residual_flops(config)
    for name in dict.fromkeys(names):
        one_layer = 2 * mixer_weights(config, name).matrices + _memory_flops(config, name, seq_len)
        if name != "softmax":
            one_layer += 2 * routing_weights(config).matrices + _reading_again_flops(config)
        flops += names.count(name) * one_layer
    return flops


def flops_per_token(config: ModelConfig, vocab_size: int, seq_len: int) -> int:
    """FLOPs of training per token: the forward pass, and twice as many in the backward pass."""
    return 3 * forward_flops_per_token(config, vocab_size, seq_len)


def _recurrent_layers(config: ModelConfig) -> int:
    return config.num_layers - len(config.softmax_indices())


_RULE_FLOPS_PER_STATE_NUMBER = {
    "linear": 4,
    "linear_unnormalized": 4,
    "gated_linear": 4,
    "deltanet": 6,
    "gated_deltanet": 7,
    "kimi_delta": 7,
    "gated_deltanet2": 7,
}
"""Write and read 2 each; what the key returns 2 more; a decay 1 more."""


def _memory_flops(config: ModelConfig, name: str, seq_len: int) -> int:
    heads = config.heads
    if name == "softmax":
        window = config.softmax.window if config.softmax else None
        full = min(seq_len, window or seq_len)
        # Scores and values, 2 d each; tokens before the window is full read 1, 2, …, later ones it.
        reads = full * (full + 1) // 2 + (seq_len - full) * full
        return 4 * heads.softmax_heads * heads.softmax_head_dim * reads // seq_len
    numbers = recurrent_memory_numbers(config) // _recurrent_layers(config)
    per_number = _RULE_FLOPS_PER_STATE_NUMBER[name]
    if isinstance(config.mixer, GatedLinearConfig) and config.mixer.decay != "none":
        per_number += 1
    return per_number * numbers


def _reading_again_flops(config: ModelConfig) -> int:
    """Additive memory over what was written, where the routed error isn't what was written."""
    routing, heads = config.routing, config.heads
    if not routing.routes_error or routing.residual == "written":
        return 0
    return 4 * heads.value_heads * heads.key_dim * heads.value_dim


def _attention_residual_flops(config: ModelConfig) -> int:
    """A score and a share, 4 D, of each of 2, 3, … 2 L + 1 sources for the 2 L queries."""
    if not config.routing.has_attention_residuals:
        return 0
    most = 2 * config.num_layers + 1
    return 4 * config.d_model * (most * (most + 1) // 2 - 1)
