"""The Mixer contract: what every sequence mixer offers, whatever its memory rule.

Axis letters, for the whole project: `B` batch, `T` time, `H` heads, `K` key dim, `V` value dim,
`D` model dim, `N` chunks, `C` position in a chunk, `L` layers.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from models.documents import Documents

MixerState = dict[str, Tensor]
"""What a mixer remembers between two tokens: named tensors, batch first. Whole-number tensors are
bookkeeping (the filled length of a cache) on the CPU; all others count as memory."""

ROLES = (
    "embedding",
    "head",
    "norm",
    "convolution",
    "matrix",
    "attention_matrix",
    "gate_projection",
    "decay_vector",
    "bias",
    "routing_matrix",
    "routing_vector",
)
"""Every role that a parameter can have; optimizers map roles to groups. `attention_matrix` is the
fused projection of a softmax layer, which some recipes treat unlike every other matrix."""


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


class Layer(nn.Module, ABC):
    """A module that owns parameters: it says how each starts and what an optimizer must know.

    Parameters are NaN until `reset_parameters` has run, so that a forgotten one shows at once.
    """

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws every own parameter; the generator lives on the CPU, whatever the device."""

    @abstractmethod
    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """Role and blocks of every own parameter, by its attribute's name."""


def unset_parameter(*shape: int) -> nn.Parameter:
    """A parameter of NaN, to be written by `Layer.reset_parameters`."""
    return nn.Parameter(torch.full(shape, torch.nan))


def collect_parameter_info(module: nn.Module) -> dict[str, ParameterInfo]:
    """Role and blocks of every parameter below `module`, by the names of `named_parameters`.

    Raises:
        TypeError: a module owns parameters without being a `Layer`, or leaves one of them out.
    """
    info: dict[str, ParameterInfo] = {}
    for prefix, part in module.named_modules():
        own = {name for name, _ in part.named_parameters(recurse=False)}
        roles = part.parameter_roles() if isinstance(part, Layer) else {}
        if own != set(roles):
            raise TypeError(
                f"{type(part).__name__} at {prefix or 'the root'} owns parameters {sorted(own)} "
                f"but states roles for {sorted(roles)}"
            )
        info |= {f"{prefix}.{name}" if prefix else name: roles[name] for name in roles}
    return info


class Mixer(nn.Module, ABC):
    """A sequence mixer: `[B, T, D]` in, `[B, T, D]` out, causal; or one token at a time.

    Attributes:
        uncompiled: names of methods that `models.compilation` leaves out of compiled graphs.
    """

    uncompiled: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def forward(
        self, x: Float[Tensor, "B T D"], documents: Documents | None = None
    ) -> Float[Tensor, "B T D"]:
        """Outputs for a whole sequence from an empty memory; position t reads only up to t.

        Args:
            x: the block's normalised input.
            documents: the parts of a batch that is laid end to end as one row (B = 1), each read
                from an empty memory; None for rows that are one sequence each.
        """

    @abstractmethod
    def initial_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> MixerState:
        """The empty memory that `step` and `extend` start from.

        Args:
            batch_size: B.
            device: where the memory lives.
            dtype: of cached activations (keys, values, convolution inputs); recurrent memory is
                float32 always.
        """

    @abstractmethod
    def extend(
        self, x: Float[Tensor, "B T D"], state: MixerState
    ) -> tuple[Float[Tensor, "B T D"], MixerState]:
        """Outputs for T more tokens at once, and the memory after them.

        For generation, without gradients. Consumes `state`: its tensors may be updated in place,
        so whoever wants to return to it keeps a copy (`models.generate.snapshot`).
        """

    @abstractmethod
    def step(
        self, x: Float[Tensor, "B D"], state: MixerState
    ) -> tuple[Float[Tensor, "B D"], MixerState]:
        """As `extend` for one token; the outputs are `forward`'s."""

    @abstractmethod
    def kv_bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of memory that each further token of a sequence adds."""

    @abstractmethod
    def flops_per_token(self, seq_len: int) -> int:
        """Forward FLOPs per token at this length, two for each multiply-add; backward is twice.

        Counts projections, convolutions and the memory rule in its token-by-token form (the mean
        over positions for softmax); not norms, activations and gates.
        """

    @property
    @abstractmethod
    def kernel_impl(self) -> str:
        """Name of the implementation that serves on the device of the parameters."""

    def state_bytes(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes of memory per sequence that do not grow with its length."""
        state = self.initial_state(1, torch.device("meta"), dtype)
        return sum(tensor.nbytes for tensor in state.values() if tensor.is_floating_point())

    def parameter_info(self) -> dict[str, ParameterInfo]:
        """Role and blocks of each own parameter, by the name that `named_parameters` gives it."""
        return collect_parameter_info(self)
