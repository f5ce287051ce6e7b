"""How far a memory that is stored in few digits drifts from the exact one.

A memory kept in bfloat16 or float16 is widened for each update, updated in float32 and rounded
back, as a decoder with a low-precision state does. Without decay an additive memory then stalls
where its numbers outgrow the mantissa: adding 1 to 256 in bfloat16 (8 bits), to 2,048 in float16
(11 bits), to 2^24 in float32 changes nothing.

    python -m models.drift            errors over 50,000 updates, by rule, decay and type
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
UPDATES = (1, 10, 100, 1_000, 10_000, 50_000)
RULES: dict[str, float | None] = {"additive": None, "delta": 0.5}
"""Write strength by the name of the rule."""
DECAYS = (1.0, 0.999)
HEAD_DIM = 64


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


def drift_table(updates: Sequence[int] = UPDATES, seed: int = 0) -> Iterator[str]:
    """Lines of a Markdown table: relative error of the state for each rule, decay and type.

    Args:
        updates: when to compare, ascending.
        seed: of the tokens, the same for every line.
    """
    counts = [f"{count:,}" for count in updates]
    yield f"| rule | decay | state | {' | '.join(counts)} |"
    yield f"|---|---|---|{'---:|' * len(counts)}"
    for rule, beta in RULES.items():
        for decay in DECAYS:
            for name, dtype in DTYPES.items():
                tokens = random_tokens(
                    torch.Generator().manual_seed(seed),
                    key_dim=HEAD_DIM,
                    value_dim=HEAD_DIM,
                    decay=decay,
                    beta=beta,
                )
                errors = [drift.state_error for drift in measure_drift(tokens, dtype, updates)]
                shown = " | ".join(f"{error:.1e}" for error in errors)
                yield f"| {rule} | {decay:g} | {name} | {shown} |"


if __name__ == "__main__":
    for line in drift_table():
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
