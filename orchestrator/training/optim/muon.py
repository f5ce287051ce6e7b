"""Muon and NorMuon on stacks of equal-shaped matrices.

For a weight matrix p [rows, cols] with gradient g, rate η, decay λ and momentum μ:

```
m ← m + (1 − μ)(g − m)                      momentum, as an average
d = g + μ(m − g)                            Nesterov's look-ahead, or d = m without
o = f · NS(d)                               nearly orthogonal, times the shape factor f
v ← β₂v + (1 − β₂) mean(o²)                 second moment, per row or per index of the longer side
u = o / √max(v, floor)                      and back to ‖o‖ where the norm is restored
p ← p(1 − ηλ) − ηu                          decay, elementwise masked if cautious
```

`MATRIX_STEPS` says which of these a variant does. There is no bias correction: where the norm is
not restored the t-th update is too large by 1/√(1 − β₂ᵗ), 4.47 at t = 1, which warm-up hides.

Sources: Jordan et al., "Muon" (2024); Li et al., "NorMuon", arXiv 2510.05491; NVIDIA
Emerging-Optimizers v0.2.0 for `paper`. We differ in that blocks of one shape are stacked and go
through one iteration together, since at small sizes launches are what the step costs, and in that
gradients are left as they are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from orchestrator.training.optim.configs import MatrixStep
from orchestrator.training.optim.newton_schulz import (
    NORM_MARGINS,
    coefficients_per_step,
    orthogonalize,
)
from orchestrator.training.optim.optimizer import UpdateRule


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of one parameter that are orthogonalised together.

    Attributes:
        parameter: its name.
        label: as in the state's names: the parameter's name, with the block's where it is split.
        start: first row.
        num_rows: number of rows.
    """

    parameter: str
    label: str
    start: int
    num_rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view of this block in the parameter or its gradient."""
        return tensor.narrow(0, self.start, self.num_rows)


@dataclass(slots=True)
class Stack:
    """All blocks of one shape [rows, cols], with their state stacked along the first axis.

    Attributes:
        blocks: in the order of the stack.
        momentum: m, [n, rows, cols], fp32.
        second_moment: v, [n, rows, 1] or [n, 1, cols], fp32; none for a step without.
    """

    blocks: list[Block]
    momentum: Tensor
    second_moment: Tensor | None


class Muon(UpdateRule):
    """The rule over one group of fp32 matrices."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        splits: Mapping[str, tuple[tuple[str, int], ...]],
        step: MatrixStep,
        *,
        momentum: float,
        second_moment_beta: float,
        weight_decay: float,
        arithmetic: str,
    ) -> None:
        """Starts with zero momentum.

        Args:
            weights: fp32 matrices by name, moved in place.
            splits: (name, rows) of each block of a matrix that is split.
            step: the choices of the variant.
            momentum: μ.
            second_moment_beta: β₂.
            weight_decay: λ.
            arithmetic: `fp32` or `bf16`, of the iteration.

        Raises:
            ValueError: a weight that is no matrix.
        """
        self._weights = dict(weights)
        self._step = step
        self._momentum = momentum
        self._second_moment_beta = second_moment_beta
        self._weight_decay = weight_decay
        self._arithmetic = arithmetic
        self._stacks = _stacks(weights, splits, step)

    def update(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Moves the matrices that have a gradient; the others keep weight and state."""
        for stack in self._stacks:
            present = [i for i, b in enumerate(stack.blocks) if b.parameter in gradients]
            if not present:
                continue
            blocks = [stack.blocks[i] for i in present]
            grads = torch.stack([b.of(gradients[b.parameter]) for b in blocks])
            updates = self._directions(stack, present, grads)
            self._apply([b.of(self._weights[b.parameter]) for b in blocks], updates, lr)

    def state(self) -> dict[str, Tensor]:
        """Momentum, and second moment where there is one, of each block."""
        state = {}
        for stack in self._stacks:
            for i, block in enumerate(stack.blocks):
                state[f"momentum/{block.label}"] = stack.momentum[i]
                if stack.second_moment is not None:
                    state[f"second_moment/{block.label}"] = stack.second_moment[i]
        return state

    def _directions(
        self, stack: Stack, present: list[int], grads: Float[Tensor, "n rows cols"]
    ) -> Float[Tensor, "n rows cols"]:
        """The updates u of the blocks at `present`; advances their state."""
        momentum = _take(stack.momentum, present)
        momentum.lerp_(grads, 1 - self._momentum)
        _put(stack.momentum, present, momentum)
        ahead = grads.lerp(momentum, self._momentum) if self._step.nesterov else momentum
        updates = orthogonalize(
            ahead,
            coefficients_per_step(self._step.coefficients, self._step.ns_steps),
            norm_margin=NORM_MARGINS.get(self._step.coefficients, 1.0),
            arithmetic=self._arithmetic,
        )
        updates = updates * shape_factor(self._step.shape_factor, *grads.shape[-2:])
        if stack.second_moment is None:
            return updates
        second_moment = _take(stack.second_moment, present)
        mean_square = updates.square().mean(dim=_reduced_axis(self._step, stack), keepdim=True)
        second_moment.lerp_(mean_square, 1 - self._second_moment_beta)
        _put(stack.second_moment, present, second_moment)
        return self._normalize(updates, second_moment)

    def _normalize(self, updates: Tensor, second_moment: Tensor) -> Tensor:
        """Each row or column of the updates over the root of its second moment."""
        normalized = updates * second_moment.clamp_min(self._step.second_moment_floor).rsqrt()
        if not self._step.restore_norm:
            return normalized
        before: Tensor = torch.linalg.vector_norm(updates, dim=(-2, -1), keepdim=True)
        after: Tensor = torch.linalg.vector_norm(normalized, dim=(-2, -1), keepdim=True)
        return normalized * (before / after.clamp_min(1e-10))

    def _apply(self, weights: list[Tensor], updates: Tensor, lr: float) -> None:
        """Decays and moves the blocks, which are views of the weights."""
        steps = list(updates.unbind())
        if self._step.cautious_decay:
            for weight, step in zip(weights, steps, strict=True):
                kept = weight * (weight * step >= 0)
                weight.sub_(kept, alpha=lr * self._weight_decay)
        else:
            torch._foreach_mul_(weights, 1 - lr * self._weight_decay)
        torch._foreach_sub_(weights, steps, alpha=lr)


def shape_factor(kind: str, rows: int, cols: int) -> float:
    """The factor f of a shape; an orthogonal matrix times f has RMS f / √max(rows, cols)."""
    factors = {
        "spectral": math.sqrt(max(rows, cols)),
        "original": math.sqrt(max(1.0, rows / cols)),
        "match_rms": 0.2 * math.sqrt(max(rows, cols)),
        "none": 1.0,
    }
    return factors[kind]


def _stacks(
    weights: Mapping[str, Tensor],
    splits: Mapping[str, tuple[tuple[str, int], ...]],
    step: MatrixStep,
) -> list[Stack]:
    by_shape: dict[tuple[int, int], list[Block]] = {}
    for name, weight in weights.items():
        if weight.ndim != 2:
            raise ValueError(
                f"parameter {name} of shape {tuple(weight.shape)} cannot be in Muon's matrix "
                "group: that takes 2-D parameters"
            )
        for block in _blocks(name, weight.shape[0], splits.get(name, ())):
            by_shape.setdefault((block.num_rows, weight.shape[1]), []).append(block)
    device = next(iter(weights.values())).device
    stacks = []
    for (rows, cols), blocks in by_shape.items():
        stack = Stack(blocks, torch.zeros(len(blocks), rows, cols, device=device), None)
        if step.second_moment != "off":
            is_per_row = _reduced_axis(step, stack) == -1
            shape = (len(blocks), rows, 1) if is_per_row else (len(blocks), 1, cols)
            stack.second_moment = torch.zeros(shape, device=device)
        stacks.append(stack)
    return stacks


def _blocks(name: str, rows: int, split: tuple[tuple[str, int], ...]) -> list[Block]:
    if not split:
        return [Block(name, name, 0, rows)]
    blocks, start = [], 0
    for label, num_rows in split:
        blocks.append(Block(name, f"{name}[{label}]", start, num_rows))
        start += num_rows
    return blocks


def _reduced_axis(step: MatrixStep, stack: Stack) -> int:
    """The axis that the second moment averages over: `longer_side` keeps that side's indices."""
    rows, cols = stack.momentum.shape[-2:]
    return -1 if step.second_moment == "row" or rows >= cols else -2


def _take(state: Tensor, present: list[int]) -> Tensor:
    """The state of some blocks: the tensor itself for all of them, else a copy."""
    return state if len(present) == len(state) else state[present]


def _put(state: Tensor, present: list[int], value: Tensor) -> None:
    if value is not state:
        state[present] = value
