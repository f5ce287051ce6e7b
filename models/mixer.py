"""The Mixer contract: what every sequence mixer offers, whatever its memory rule.

Axis letters, for the whole project: `B` batch, `T` time, `H` heads, `K` key dim, `V` value dim,
`D` model dim, `N` chunks, `C` position in a chunk, `L` layers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

MixerState = dict[str, Tensor]
"""What a mixer remembers between two tokens: named tensors, batch first."""

ROLES = (
    "embedding",
    "head",
    "norm",
    "convolution",
    "matrix",
    "gate_projection",
    "decay_vector",
    "bias",
    "routing_matrix",
    "routing_vector",
)
"""Every role that a parameter can have; optimizers map roles to groups."""


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """What an optimizer must know about one parameter.

    Attributes:
        role: one of `ROLES`.
        blocks: logical blocks of a fused projection along its rows, as (name, number of rows);
            empty where the matrix is one block.
    """

    role: str
    blocks: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"{self.role=} is not one of {', '.join(ROLES)}")


class Mixer(nn.Module, ABC):
    """A sequence mixer: `[B, T, D]` in, `[B, T, D]` out, causal; or one token at a time."""

    @abstractmethod
    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Outputs for a whole sequence from an empty memory; position t reads only up to t."""

    @abstractmethod
    def initial_state(self, batch_size: int, device: torch.device) -> MixerState:
        """The empty memory that `step` starts from."""

    @abstractmethod
    def step(
        self, x: Float[Tensor, "B D"], state: MixerState
    ) -> tuple[Float[Tensor, "B D"], MixerState]:
        """The output for one more token, and the memory after it; equal to `forward`'s."""

    @abstractmethod
    def state_bytes(self) -> int:
        """Bytes of memory per sequence that do not grow with its length."""

    @abstractmethod
    def kv_bytes_per_token(self) -> int:
        """Bytes of memory that each further token of a sequence adds."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> int:
        """Forward FLOPs per token at this length, two for each multiply-add; backward is twice."""

    @abstractmethod
    def parameter_info(self) -> dict[str, ParameterInfo]:
        """Role and blocks of each own parameter, by the name that `named_parameters` gives it."""
