"""Draws of the seeds with replacement: all of them with their probabilities, or a sample."""

import math
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np

from analysis.stats import Array

MAX_EXACT_SEEDS = 8
"""C(2n-1, n) distinct draws: 6,435 at n = 8, 24,310 at n = 9; beyond it draws are sampled."""


@lru_cache(maxsize=16)
def resample_weights(n: int) -> tuple[Array, Array]:
    """Every distinct draw of n seeds with replacement.

    Returns:
        Counts [draws, n] of each seed in each draw, and the probability [draws] of each draw; the
        arrays are shared between calls and not writable.
    """
    if not 1 <= n <= MAX_EXACT_SEEDS:
        raise ValueError(f"draws are enumerated for 1 to {MAX_EXACT_SEEDS} seeds, got {n}")
    draws = np.array(list(combinations_with_replacement(range(n), n)))
    counts = (draws[:, :, None] == np.arange(n)).sum(axis=1).astype(float)
    factorials = np.array([math.factorial(k) for k in range(n + 1)], dtype=float)
    ways = math.factorial(n) / factorials[counts.astype(int)].prod(axis=1)
    probabilities = ways / float(n) ** n
    counts.setflags(write=False)
    probabilities.setflags(write=False)
    return counts, probabilities


def sampled_weights(n: int, draws: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """`draws` random draws of n seeds, as `resample_weights` but for n too large to enumerate."""
    counts = rng.multinomial(n, np.full(n, 1 / n), size=draws).astype(float)
    return counts, np.full(draws, 1 / draws)
