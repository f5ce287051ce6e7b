"""Layers and their order: pure stacks of one mixer, hybrids with softmax layers between.

A hybrid with `softmax_every` N has softmax at the 0-based layers i with (i + 1) mod N = 0, so N = 3
repeats [linear, linear, softmax]; which layers are which is `ModelConfig.layer_mixers`.
"""

from jaxtyping import Float
from torch import Tensor, nn

from models.configs import ModelConfig
from models.layers import RMSNorm, SwiGLU
from models.mixer import Mixer, MixerState
from models.mixers import MIXERS


class Block(nn.Module):
    """One layer: x + mixer(norm(x)), then x + MLP(norm(x)).

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

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """The residual stream after this layer."""
        x = x + self.mixer(self.mixer_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return x

    def extend(
        self, x: Float[Tensor, "B T D"], state: MixerState
    ) -> tuple[Float[Tensor, "B T D"], MixerState]:
        """As `forward` for T more tokens, with the mixer's memory; consumes `state`."""
        mixed, state = self.mixer.extend(self.mixer_norm(x), state)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state

    def step(
        self, x: Float[Tensor, "B D"], state: MixerState
    ) -> tuple[Float[Tensor, "B D"], MixerState]:
        """As `forward` for one more token, with the mixer's memory; consumes `state`."""
        mixed, state = self.mixer.step(self.mixer_norm(x), state)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), state


def build_blocks(config: ModelConfig) -> list[Block]:
    """The layers from the first to the last, parameters unset."""
    blocks = []
    for name in config.layer_mixers():
        options = config.softmax if name == "softmax" else config.mixer
        _, mixer_class = MIXERS[name]
        blocks.append(Block(config, mixer_class(config, options)))
    return blocks
