"""Fixtures shared by the tests of training."""

import pytest
import torch
from torch import nn

from models.mixer import ParameterInfo

ROLE_SHAPES: dict[str, tuple[ParameterInfo, tuple[int, ...]]] = {
    "embedding": (ParameterInfo("embedding"), (16, 8)),
    "head": (ParameterInfo("head"), (16, 8)),
    "norm": (ParameterInfo("norm"), (8,)),
    "convolution": (ParameterInfo("convolution"), (8, 1, 4)),
    "matrix": (ParameterInfo("matrix"), (8, 8)),
    "fused": (ParameterInfo("matrix", (("q", 8), ("k", 4), ("v", 12))), (24, 8)),
    "gate": (ParameterInfo("gate_projection"), (2, 8)),
    "decay": (ParameterInfo("decay_vector"), (2,)),
    "offset": (ParameterInfo("bias"), (8,)),
    "wide_offset": (ParameterInfo("bias"), (2, 4)),
    "routing": (ParameterInfo("routing_matrix"), (8, 8)),
    "gamma": (ParameterInfo("routing_vector"), ()),
}


class EveryRole(nn.Module):
    """One parameter of each role; its loss pulls each towards a random target."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.targets = {}
        for name, (_, shape) in ROLE_SHAPES.items():
            start = torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(start.to(dtype)))
            self.targets[name] = torch.randn(shape, generator=generator).to(dtype)

    def loss(self) -> torch.Tensor:
        """Half the squared distance to the targets."""
        distances = [(p - self.targets[n]).square().sum() for n, p in self.named_parameters()]
        return torch.stack(distances).sum() / 2

    def parameter_info(self) -> dict[str, ParameterInfo]:
        """Role and blocks of each parameter."""
        return {name: info for name, (info, _) in ROLE_SHAPES.items()}


@pytest.fixture
def every_role() -> type[EveryRole]:
    """A module class with a parameter of every role, to build as often as a test needs."""
    return EveryRole
