"""The chain of states over chunks, S_{n+1} = A_n S_n + B_n, forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Axis letters: K key dim, V value dim, Z = chunks of all sequences · heads, in the order of a
# `ChunkLayout`: the first chunk of every sequence, then every second one, and so on.


def _advance(state: Tensor, transition: Tensor, update: Tensor) -> Tensor:
    """The next state, written over the update; a transition of one column is a diagonal matrix."""
    if transition.shape[-1] == 1:
        return update.addcmul_(transition, state)
    return update.baddbmm_(transition, state)


def scan_forward(
    transitions: Tensor, updates: Tensor, initial: Tensor, active: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The states that enter the chunks `[Z, K, V]` and the final ones `[active[0], K, V]`.

    Args:
        transitions: A `[Z, K, K]`, or `[Z, K or 1, 1]` for diagonal ones.
        updates: B `[Z, K, V]`; written over with the states after the chunks.
        initial: the first state of every chain `[active[0], K, V]`.
        active: number of chains at each step; never increases, sums to Z.
    """
    state, after = initial, updates.split(active)
    for transition, update in zip(transitions.split(active), after, strict=True):
        if len(update) < len(state):
            state = state[: len(update)]
        state = _advance(state, transition, update)
    if active[-1] == active[0]:
        last = len(updates) - active[0]
        return torch.cat([initial, updates[:last]]), updates[last:].clone()
    ends = list(zip(after, [*active[1:], 0], strict=True))
    entering = torch.cat([initial, *(states[:count] for states, count in ends)])
    # Chains whose last chunk came last stand first.
    return entering, torch.cat([states[count:] for states, count in reversed(ends)])


def scan_backward(
    transitions: Tensor, d_entering: Tensor, d_final: Tensor, active: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Gradients of the updates `[Z, K, V]` and of the initial states `[active[0], K, V]`.

    The gradient of an update is that of the state after its chunk, with which all others are made.

    Args:
        transitions: as in `scan_forward`.
        d_entering: gradients of the entering states but for the chain's `[Z, K, V]`; written over.
        d_final: gradients of the final states `[active[0], K, V]`.
        active: as in `scan_forward`.
    """
    adjoint = transitions if transitions.shape[-1] == 1 else transitions.mT
    steps = zip(adjoint.split(active), d_entering.split(active), strict=True)
    d_state, d_updates = d_final[:0], []
    for transition, d_entered in reversed(list(steps)):
        count = len(d_entered)
        if count > len(d_state):  # chains whose last chunk this is start with their final state
            d_state = torch.cat([d_state, d_final[len(d_state) : count]])
        d_updates.append(d_state)
        d_state = _advance(d_state, transition, d_entered)
    return torch.cat(d_updates[::-1]), d_state


class _DiagonalScan(torch.autograd.Function):
    """The chain whose transitions are diagonal; see `scan_states`."""

    @staticmethod
    def forward(
        ctx: Any, retention: Tensor, updates: Tensor, initial: Tensor, active: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        entering, final = scan_forward(retention, updates.clone(), initial, active)
        ctx.save_for_backward(retention, entering)
        ctx.active = active
        return entering, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_entering: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        retention, entering = ctx.saved_tensors
        d_updates, d_initial = scan_backward(retention, d_entering.clone(), d_final, ctx.active)
        d_retention = None
        if ctx.needs_input_grad[0]:
            d_retention = (d_updates * entering).sum_to_size(retention.shape)
        return d_retention, d_updates, d_initial, None


def scan_states(
    retention: Tensor, updates: Tensor, initial: Tensor, active: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """`scan_forward` with gradients, for diagonal transitions `[Z, K or 1, 1]`."""
    entering, final = _DiagonalScan.apply(retention, updates, initial, active)
    return entering, final
