"""The language model: embedding, then norm, mixer, norm and MLP for each layer, then norm and head."""

from dataclasses import dataclass, field

from models.mixer import HeadLayout, MixerConfig
from models.mixers.softmax import SoftmaxConfig

STACKS = ("pure", "hybrid")


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
