"""Shapes and options of models as dataclasses, and the names of the mixers; imports no torch.

They stand apart from the modules they configure so that `plan` can compose, check and count
thousands of cells without the seconds that importing torch costs.
"""

from dataclasses import dataclass, field

from models.mixer_configs import (
    MIXER_CONFIGS,
    DecayConfig,
    DeltaNetConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GatedLinearConfig,
    KimiDeltaConfig,
    LinearConfig,
    LinearUnnormalizedConfig,
    MixerConfig,
)
from models.routing_config import RoutingConfig, check_routing_host

__all__ = [
    "MIXER_CONFIGS",
    "DecayConfig",
    "DeltaNetConfig",
    "GatedDeltaNet2Config",
    "GatedDeltaNetConfig",
    "GatedLinearConfig",
    "HeadLayout",
    "KimiDeltaConfig",
    "LinearConfig",
    "LinearUnnormalizedConfig",
    "MixerConfig",
    "ModelConfig",
    "RoutingConfig",
    "SoftmaxConfig",
]

STACKS = ("pure", "hybrid")
IMPLEMENTATIONS = ("auto", "reference", "chunked", "triton")

# What the recurrences of `kernels` serve; checked here so that a plan refuses before a trial does.
MAX_KEY_DIM = 256
MAX_VALUE_DIM = 512


@dataclass(kw_only=True, slots=True)
class HeadLayout:
    """Head counts and dimensions of one model size; softmax layers and linear layers differ.

    Attributes:
        softmax_heads: query heads of a softmax layer.
        softmax_kv_heads: key and value heads of a softmax layer; divides `softmax_heads`.
        softmax_head_dim: dimension of each softmax head; even, for rotary positions.
        key_heads: query and key heads of a linear layer.
        value_heads: value heads of a linear layer, a multiple of `key_heads`.
        key_dim: K, dimension of each key head of a linear layer.
        value_dim: V, dimension of each value head of a linear layer.
    """

    softmax_heads: int = 2
    softmax_kv_heads: int = 1
    softmax_head_dim: int = 32
    key_heads: int = 2
    value_heads: int = 2
    key_dim: int = 32
    value_dim: int = 32

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise ValueError(f"model.heads.{name}={getattr(self, name)} must be at least 1")
        if self.softmax_heads % self.softmax_kv_heads:
            raise ValueError(
                f"model.heads.softmax_kv_heads={self.softmax_kv_heads} must divide "
                f"model.heads.softmax_heads={self.softmax_heads}"
            )
        if self.softmax_head_dim % 2:
            raise ValueError(
                f"model.heads.softmax_head_dim={self.softmax_head_dim} must be even: rotary "
                "positions turn pairs of channels"
            )
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"model.heads.value_heads={self.value_heads} must be a multiple of "
                f"model.heads.key_heads={self.key_heads}"
            )


@dataclass(kw_only=True, slots=True)
class SoftmaxConfig:
    """Options of a softmax layer.

    Attributes:
        rope_base: base of the rotary frequencies.
        output_gate: multiply the output by sigmoid(gate) before the output projection.
        qk_norm: RMS-normalise q and k per head before the rotation.
        window: tokens that each query reads, itself among them; null for all before it.
    """

    rope_base: float = 500_000.0
    output_gate: bool = False
    qk_norm: bool = False
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"model.softmax.window={self.window} must be at least 1")
        if not self.rope_base > 1:
            raise ValueError(f"model.softmax.rope_base={self.rope_base} must be greater than 1")


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Shape of a model; the vocabulary comes from the data.

    Attributes:
        mixer: the memory rule of the layers that are not softmax.
        stack: `pure`, every layer of one kind, or `hybrid`, softmax layers between linear ones.
        softmax_every: in a hybrid, layer i is softmax where (i + 1) is a multiple of this; not
            read in a pure stack.
        softmax_layers: in a hybrid, the 0-based softmax layers, instead of `softmax_every`.
        softmax: options of every softmax layer, in pure and hybrid stacks alike; may be null in
            a stack that has none.
        num_layers: L.
        d_model: D.
        ffn_dim: hidden width of the SwiGLU MLP.
        norm_eps: added to the mean square in every RMSNorm.
        heads: head counts and dimensions.
        routing: signals between layers besides the residual stream.
        impl: implementation of the recurrences: `auto`, `reference`, `chunked` or `triton`.
        recompute: keep only each layer's input for the backward and compute the layer again there,
            which trades about a third more FLOPs for memory; changes no result.
        compile: let `torch.compile` fuse each layer in training and evaluation, around the memory
            rules, which have kernels of their own; changes results by rounding only.
    """

    mixer: MixerConfig = field(default_factory=MixerConfig)
    stack: str = "pure"
    softmax_every: int | None = 3
    softmax_layers: list[int] | None = None
    softmax: SoftmaxConfig | None = field(default_factory=SoftmaxConfig)
    num_layers: int = 3
    d_model: int = 64
    ffn_dim: int = 176
    norm_eps: float = 1e-5
    heads: HeadLayout = field(default_factory=HeadLayout)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    impl: str = "auto"
    recompute: bool = False
    compile: bool = False

    def __post_init__(self) -> None:
        _check_mixer(self.mixer)
        for name in ("num_layers", "d_model", "ffn_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name}={getattr(self, name)} must be at least 1")
        if not self.norm_eps > 0:
            raise ValueError(f"model.norm_eps={self.norm_eps} must be positive")
        if self.impl not in IMPLEMENTATIONS:
            raise ValueError(
                f"model.impl={self.impl!r} must be one of {', '.join(IMPLEMENTATIONS)}"
            )
        _check_stack(self)
        if self.mixer.name != "softmax":
            _check_linear_heads(self.heads)
        if self.softmax is None and "softmax" in self.layer_mixers():
            raise ValueError(
                "model.softmax=null leaves the softmax layers of this stack without options; "
                "give a SoftmaxConfig"
            )
        check_routing_host(self.routing, self.mixer.name)
        if self.compile and self.routing.has_attention_residuals:
            raise ValueError(
                f"model.compile=true with model.routing.kind={self.routing.kind!r} is not served: "
                "only whole layers are compiled, and attention residuals cut them; set one of the "
                "two back"
            )

    def layer_mixers(self) -> tuple[str, ...]:
        """The mixer's name in each layer, from the first to the last."""
        softmax = self.softmax_indices()
        return tuple(
            "softmax" if index in softmax else self.mixer.name for index in range(self.num_layers)
        )

    def softmax_indices(self) -> tuple[int, ...]:
        """The 0-based softmax layers, ascending."""
        if self.stack == "pure":
            return tuple(range(self.num_layers)) if self.mixer.name == "softmax" else ()
        if self.softmax_layers is not None:
            return tuple(sorted(self.softmax_layers))
        every = self.softmax_every
        return tuple(i for i in range(self.num_layers) if every and (i + 1) % every == 0)


def _check_mixer(mixer: MixerConfig) -> None:
    expected = MIXER_CONFIGS.get(mixer.name)
    if expected is None:
        raise ValueError(
            f"model.mixer.name={mixer.name!r} must be one of {', '.join(sorted(MIXER_CONFIGS))}"
        )
    if type(mixer) is not expected:
        raise ValueError(
            f"model.mixer.name={mixer.name!r} needs options of type {expected.__name__}, "
            f"got {type(mixer).__name__}"
        )


def _check_stack(config: ModelConfig) -> None:
    if config.stack not in STACKS:
        raise ValueError(f"model.stack={config.stack!r} must be one of {', '.join(STACKS)}")
    if config.stack == "pure":
        return
    if config.mixer.name == "softmax":
        raise ValueError(
            "model.stack='hybrid' with model.mixer.name='softmax' mixes softmax with itself; "
            "use model.stack='pure'"
        )
    if config.softmax_layers is not None:
        _check_softmax_layers(config.softmax_layers, config.num_layers)
    elif config.softmax_every is None or not 2 <= config.softmax_every <= config.num_layers:
        raise ValueError(
            f"model.softmax_every={config.softmax_every} must lie between 2 and "
            f"model.num_layers={config.num_layers}, so that a hybrid has softmax layers and others"
        )


def _check_softmax_layers(layers: list[int], num_layers: int) -> None:
    if not layers:
        raise ValueError(
            "model.softmax_layers=[] leaves a hybrid without a softmax layer; name at least one "
            "or use model.stack='pure'"
        )
    outside = [index for index in layers if not 0 <= index < num_layers]
    if outside:
        raise ValueError(
            f"model.softmax_layers={layers} has {outside[0]}, outside 0 to {num_layers - 1} of "
            f"model.num_layers={num_layers}"
        )
    if len(set(layers)) < len(layers):
        raise ValueError(f"model.softmax_layers={layers} names a layer twice; name each once")
    if len(layers) == num_layers:
        raise ValueError(
            f"model.softmax_layers={layers} leaves no other layer in a hybrid; use "
            "model.mixer.name='softmax' with model.stack='pure'"
        )


def _check_linear_heads(heads: HeadLayout) -> None:
    for name, largest in (("key_dim", MAX_KEY_DIM), ("value_dim", MAX_VALUE_DIM)):
        if getattr(heads, name) > largest:
            raise ValueError(
                f"model.heads.{name}={getattr(heads, name)} must be at most {largest}, the largest "
                "that the recurrences serve"
            )
