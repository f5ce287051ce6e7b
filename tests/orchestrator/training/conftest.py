"""A model with every role, a small prepared data set, and a trial of a fraction of a second."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.configs import MIXER_CONFIGS, HeadLayout, ModelConfig
from models.mixer import ParameterInfo
from orchestrator.config import (
    BatchConfig,
    BudgetConfig,
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    TrialConfig,
)
from orchestrator.data import DataConfig, prepare
from orchestrator.training.optim.configs import AdamWConfig

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


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared set of 40 documents in which each word tells much about the next."""
    root = tmp_path_factory.mktemp("training-data")
    generator = np.random.Generator(np.random.Philox(key=11))
    words = ["".join(generator.choice(list("abcdefghij"), size=4)) for _ in range(30)]
    for document in range(40):
        start = int(generator.integers(30))
        text = " ".join(words[(start + 7 * i) % 30] for i in range(60))
        (root / f"{document:02d}.txt").write_text(text, encoding="utf-8")
    config = DataConfig(
        name="chains", sources=[str(root / "*.txt")], split="last:0.2", vocab_size=300
    )
    return prepare(config, root).folder


@pytest.fixture
def tiny_trial() -> Callable[..., TrialConfig]:
    """Builds a trial of 12 steps of 4 windows of 16 tokens; keywords replace fields."""

    def build(
        *, mixer: str = "softmax", stack: str = "pure", steps: int = 12, **changes: Any
    ) -> TrialConfig:
        heads = HeadLayout(
            softmax_heads=2,
            softmax_kv_heads=1,
            softmax_head_dim=8,
            key_heads=1,
            value_heads=1,
            key_dim=8,
            value_dim=8,
        )
        model = ModelConfig(
            mixer=MIXER_CONFIGS[mixer](),
            stack=stack,
            softmax_every=2,
            num_layers=2,
            d_model=16,
            ffn_dim=32,
            heads=heads,
        )
        fields: dict[str, Any] = {
            "seq_len": 16,
            "model": model,
            "optimizer": AdamWConfig(lr=0.02),
            "budget": BudgetConfig(tokens=64 * steps),
            "batch": BatchConfig(tokens=64),
            "eval": EvalConfig(windows=8),
            "checkpoint": CheckpointConfig(every_steps=None),
            "log": LogConfig(every_steps=5),
        }
        return TrialConfig(**(fields | changes))

    return build
