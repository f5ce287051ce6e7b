"""Shapes and options of models as dataclasses, and the names of the mixers; imports no torch.

They stand apart from the modules they configure so that `plan` can compose, check and count
thousands of cells without the seconds that importing torch costs.
"""

from dataclasses import dataclass, field

STACKS = ("pure", "hybrid")


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
class MixerConfig:
    """Options of a memory rule; each mixer's own dataclass extends it.

    Attributes:
        name: the mixer's name in `models.mixers.MIXERS`.
    """

    name: str = "softmax"


@dataclass(kw_only=True, slots=True)
class SoftmaxConfig:
    """Options of a softmax layer.

    Attributes:
        rope_base: base of the rotary frequencies.
        output_gate: multiply the output by sigmoid(gate) before the output projection.
        qk_norm: RMS-normalise q and k per head before the rotation.
    """

    rope_base: float = 500_000.0
    output_gate: bool = False
    qk_norm: bool = False


@dataclass(kw_only=True, slots=True)
class ModelConfig:
    """Shape of a model; the vocabulary comes from the data.

    Attributes:
        mixer: the memory rule of the layers that are not softmax.
        stack: `pure`, every layer of one kind, or `hybrid`, softmax layers between linear ones.
        softmax_every: in a hybrid, layer i is softmax where (i + 1) is a multiple of this.
        softmax_layers: in a hybrid, the 0-based softmax layers, instead of `softmax_every`.
        softmax: options of every softmax layer, in pure and hybrid stacks alike.
        num_layers: L.
        d_model: D.
        ffn_dim: hidden width of the SwiGLU MLP.
        norm_eps: added to the mean square in every RMSNorm.
        heads: head counts and dimensions.
        impl: implementation of the recurrences: `auto`, `reference`, `chunked` or `triton`.
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
    impl: str = "auto"


MIXER_CONFIGS: dict[str, type[MixerConfig]] = {
    # The options of softmax layers stand in `model.softmax`, since hybrids have such layers too.
    "softmax": MixerConfig,
}
"""Every mixer's options by its name; `models.mixers.MIXERS` adds the module classes."""
