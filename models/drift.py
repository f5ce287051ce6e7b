"""How far a memory that is stored in few digits drifts from the exact one.

A memory kept in bfloat16 or float16 is widened for each update, updated in float32 and rounded
back, as a decoder with a low-precision state does. Without decay an additive memory then stalls
where its numbers outgrow the mantissa: adding 1 to 256 in bfloat16 (8 bits), to 2,048 in float16
(11 bits), to 2^24 in float32 changes nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Token(NamedTuple):
    """Inputs of one update, float64.

    Attributes:
        q: query `[K]`.
        k: key `[K]`.
        v: value `[V]`.
        decay: α, one number or one per key channel `[K]`, in [0, 1].
        beta: write strength of the delta rule; None for an additive memory.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor | None = None

    def narrowed(self) -> "Token":
        """The same inputs in float32."""
        beta = None if self.beta is None else self.beta.float()
        return Token(self.q.float(), self.k.float(), self.v.float(), self.decay.float(), beta)


@dataclass(frozen=True, slots=True)
class Drift:
    """Relative errors after some updates.

    Attributes:
        updates: tokens so far.
        state_error: rms(S − S₆₄) / rms(S₆₄).
        read_error: the same of the read q after the update.
    """

    updates: int
    state_error: float
    read_error: float


def measure_drift(
    tokens: Iterator[Token], dtype: torch.dtype, updates: Sequence[int]
) -> list[Drift]:
    """Errors of a memory stored in `dtype` against one in float64, after each number of updates.

    Args:
        tokens: at least as many as the largest of `updates`.
        dtype: what the memory is rounded to after each update.
        updates: when to compare, ascending, from 1.

    Raises:
        ValueError: `updates` doesn't ascend from 1, or the tokens end before it.
    """
    if not updates or updates[0] < 1 or sorted(set(updates)) != list(updates):
        raise ValueError(f"updates={list(updates)} must ascend from 1 or more")
    found: list[Drift] = []
    exact: Tensor | None = None
    stored: Tensor | None = None
    for count, token in enumerate(tokens, start=1):
        if exact is None or stored is None:
            exact = torch.zeros(len(token.k), len(token.v), dtype=torch.float64)
            stored = exact.to(dtype)
        exact = updated(exact, token)
        narrow = token.narrowed()
        stored = updated(stored.float(), narrow).to(dtype)
        if count == updates[len(found)]:
            read, exact_read = stored.float().T @ narrow.q, exact.T @ token.q
            found.append(Drift(count, _error(stored, exact), _error(read, exact_read)))
            if len(found) == len(updates):
                return found
    raise ValueError(f"tokens ended before the {updates[-1]} updates asked for")


def updated(state: Tensor, token: Token) -> Tensor:
    """Diag(α) S + k uᵀ, with u = v for additive memory and β (v − (Diag(α) S)ᵀ k) otherwise."""
    kept = token.decay.reshape(-1, 1) * state
    written = token.v if token.beta is None else token.beta * (token.v - kept.T @ token.k)
    return kept + token.k[:, None] * written


def _error(found: Tensor, exact: Tensor) -> float:
    difference = (found.double() - exact).square().mean().sqrt()
    return float(difference / exact.square().mean().sqrt())


def random_tokens(
    generator: torch.Generator,
    *,
    key_dim: int,
    value_dim: int,
    decay: float,
    beta: float | None,
) -> Iterator[Token]:
    """Endless tokens with unit keys and queries in random directions and normal values.

    Args:
        generator: on the CPU.
        key_dim: K.
        value_dim: V.
        decay: α of every token.
        beta: write strength of every token; None for an additive memory.
    """

    def draw(size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    alpha = torch.tensor(decay, dtype=torch.float64)
    strength = None if beta is None else torch.tensor(beta, dtype=torch.float64)
    while True:
        q, k = draw(key_dim), draw(key_dim)
        yield Token(q / q.norm(), k / k.norm(), draw(value_dim), alpha, strength)
