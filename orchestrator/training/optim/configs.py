"""Options of the optimizers as dataclasses, and their names; imports no torch, as `models.configs`."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    """What every optimizer has; each extends it.

    Attributes:
        name: the optimizer's name in `OPTIMIZERS`.
        lr: peak learning rate (of the matrix group where there are several groups).
    """

    name: str = "adamw"
    lr: float = 3e-4


OPTIMIZER_CONFIGS: dict[str, type[OptimizerConfig]] = {}
"""Every optimizer's options by its name; `orchestrator.training.optim.build` has the builders."""
