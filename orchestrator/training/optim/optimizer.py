"""One optimizer over several groups: rates, steps and state by parameter name.

A group is moved by an `UpdateRule`, which sees fp32 weights only. A parameter of another type has
an fp32 master copy, which the rule moves and from which the parameter is rounded after each step.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from orchestrator.training.optim.roles import GroupSpec, ParameterRow


class UpdateRule(ABC):
    """How the parameters of one group move, given gradients and a rate."""

    @abstractmethod
    def update(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Moves the weights that have a gradient; the others keep weight and state.

        Args:
            gradients: fp32 gradients by parameter name; left as they are.
            lr: rate of this update.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The live state by `KIND/PARAMETER`; writing into these tensors changes the rule."""


@dataclass(slots=True)
class Group:
    """A group and the rate that its next update applies.

    Attributes:
        spec: what the group's parameters share.
        rule: what moves them.
        lr: rate of the next update.
    """

    spec: GroupSpec
    rule: UpdateRule
    lr: float = 0.0

    @property
    def name(self) -> str:
        """As in logs and records."""
        return self.spec.name


class Optimizer:
    """All groups of one model, stepped together.

    Attributes:
        table: one row per parameter.
        groups: in the order of the builder; the first one's rate is the trial's `lr`.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        weights: Mapping[str, Tensor],
        table: Sequence[ParameterRow],
        groups: Sequence[Group],
    ) -> None:
        """Takes what `build_optimizer` has matched.

        Args:
            parameters: trainable parameters by name.
            weights: what the rules move, from `fp32_weights(parameters)`.
            table: from `assign`.
            groups: with rules over `weights`.
        """
        self.table = tuple(table)
        self.groups = tuple(groups)
        self._parameters = dict(parameters)
        self._masters = {n: w for n, w in weights.items() if w is not parameters[n]}

    def set_lr_ratio(self, ratio: float, *, warmup_ratio: float) -> None:
        """Sets each group's rate for the next update to a share of its peak.

        Args:
            ratio: of groups that follow the whole schedule.
            warmup_ratio: of groups that stay constant after the warm-up.
        """
        for group in self.groups:
            share = ratio if group.spec.is_decayed else warmup_ratio
            group.lr = group.spec.peak_lr * share

    @torch.no_grad()
    def step(self) -> None:
        """Moves every parameter that has a gradient; gradients stay as they are."""
        gradients = {
            name: parameter.grad.float()
            for name, parameter in self._parameters.items()
            if parameter.grad is not None
        }
        for group in self.groups:
            group.rule.update(gradients, group.lr)
        for name, master in self._masters.items():
            self._parameters[name].copy_(master)

    def zero_grad(self) -> None:
        """Drops all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all state on the CPU by `KIND/PARAMETER`, master weights included."""
        return {name: tensor.to("cpu", copy=True) for name, tensor in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continues from what `state_dict` returned for the same model and configuration.

        Raises:
            ValueError: a name that is missing or not ours, or a tensor of another shape or type.
        """
        own = self._state()
        if missing := sorted(own.keys() - state.keys()):
            raise ValueError(f"optimizer state lacks {', '.join(missing)}")
        if extra := sorted(state.keys() - own.keys()):
            raise ValueError(f"optimizer state has unknown {', '.join(extra)}")
        for name, tensor in own.items():
            given = state[name]
            if given.shape != tensor.shape or given.dtype != tensor.dtype:
                raise ValueError(
                    f"optimizer state {name} is {given.dtype} {tuple(given.shape)}, expected "
                    f"{tensor.dtype} {tuple(tensor.shape)}"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def _state(self) -> dict[str, Tensor]:
        state = {f"master/{name}": master for name, master in self._masters.items()}
        for group in self.groups:
            state |= group.rule.state()
        return state


def fp32_weights(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Each parameter itself where it is fp32, else an fp32 copy to be its master."""
    return {
        name: parameter if parameter.dtype == torch.float32 else parameter.detach().float()
        for name, parameter in parameters.items()
    }
