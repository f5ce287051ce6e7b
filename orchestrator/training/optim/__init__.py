"""The registry of optimizers: name → (config class, builder)."""

from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """What every optimizer has; each extends it.

    Attributes:
        name: the optimizer's name in `OPTIMIZERS`.
        lr: peak learning rate (of the matrix group where there are several groups).
    """

    name: str = "adamw"
    lr: float = 3e-4


OPTIMIZERS: dict[str, tuple[type[OptimizerConfig], Any]] = {}
