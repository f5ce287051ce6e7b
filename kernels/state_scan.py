"""The chain of states over chunks, S_{n+1} = A_n S_n + B_n, forward and backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Axis letters: K key dim, V value dim, Z = chunks of all sequences · heads, in the order of a
# `ChunkLayout`: the first chunk of every sequence, then every second one, and so on.


def _advanced(transition: Tensor, state: Tensor, update: Tensor) -> Tensor:
    """One step of the chain; a transition of one column is a diagonal matrix."""
    if transition.shape[-1] == 1:
        return torch.addcmul(update, transition, state)
    return torch.baddbmm(update, transition, state)


def scan_forward(
    transitions: Tensor, updates: Tensor, initial: Tensor, active: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The states that enter the chunks `[Z, K, V]` and the final ones `[active[0], K, V]`.

    Args:
        transitions: A `[Z, K, K]`, or `[Z, K or 1, 1]` for diagonal ones.
        updates: B `[Z, K, V]`.
        initial: the first state of every chain `[active[0], K, V]`.
        active: number of chains at each step; never increases, sums to Z.
    """
    entering, final = torch.empty_like(updates), torch.empty_like(initial)
    state, start = initial, 0
    for count, next_count in zip(active, [*active[1:], 0], strict=True):
        rows = slice(start, start + count)
        entering[rows] = state
        state = _advanced(transitions[rows], state, updates[rows])
        if next_count < count:
            final[next_count:count] = state[next_count:]
            state = state[:next_count]
        start += count
    return entering, final


def scan_backward(
    transitions: Tensor, d_entering: Tensor, d_final: Tensor, active: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Gradients of the updates `[Z, K, V]` and of the initial states `[active[0], K, V]`.

    The gradient of an update is that of the state after its chunk, with which all others are made.
    """
    d_updates = torch.empty_like(d_entering)
    adjoint = transitions if transitions.shape[-1] == 1 else transitions.mT
    d_state, end = d_final[:0], len(d_entering)
    for count in reversed(active):
        rows = slice(end - count, end)
        if count > len(d_state):  # chains whose last chunk this is start with their final state
            d_state = torch.cat([d_state, d_final[len(d_state) : count]])
        d_updates[rows] = d_state
        d_state = _advanced(adjoint[rows], d_state, d_entering[rows])
        end -= count
    return d_updates, d_state


class _DiagonalScan(torch.autograd.Function):
    """The chain whose transitions are diagonal; see `scan_states`."""

    @staticmethod
    def forward(
        ctx: Any, retention: Tensor, updates: Tensor, initial: Tensor, active: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        entering, final = scan_forward(retention, updates, initial, active)
        ctx.save_for_backward(retention, entering)
        ctx.active = active
        return entering, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_entering: Tensor, d_final: Tensor) -> tuple[Tensor | None, ...]:
        retention, entering = ctx.saved_tensors
        d_updates, d_initial = scan_backward(retention, d_entering, d_final, ctx.active)
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
