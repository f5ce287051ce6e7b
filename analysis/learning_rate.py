"""Choosing a learning rate, and saying how much of the result is the choosing.

The smallest of K seed means is biased low: by (σ/√n)·E[max of K standard normals] where the valley
is flat. Leaving one seed out states the size of that effect: each seed is scored at the rate that
the other seeds choose. No unbiased estimator of the true minimum exists (van Hasselt,
arXiv 1302.7175).

Sensitivity follows Wortsman et al., "Small-scale proxies for large-scale transformer training
instabilities" (arXiv 2309.14322): the mean over a range of rates, uniform in the logarithm, of the
loss capped at its value at initialisation, minus the smallest loss. We print the range with it.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy import integrate, special

from analysis.pareto import tie_ranks
from analysis.stats import Array


def argmin_first(values: Array) -> int:
    """Position of the smallest finite value; of equal ones the first."""
    finite = np.flatnonzero(np.isfinite(values))
    if len(finite) == 0:
        raise ValueError("no finite value to take the smallest of")
    ranks = tie_ranks(values[finite])
    return int(finite[int(np.flatnonzero(ranks == 0)[0])])


def adjusted_means(losses: Array) -> Array:
    """Mean of each row of `losses` [cells, seeds], cleared of which seeds it has.

    NaN marks a seed that a cell lacks. Fits loss = cell + seed by least squares and returns the
    cells' values at the average seed: the plain means when nothing is missing. NaN for a row that
    has no value.
    """
    known = np.isfinite(losses)
    if known.all():
        return np.asarray(losses.mean(axis=1))
    cells, seeds = np.nonzero(known)
    if len(cells) == 0:
        return np.full(len(losses), math.nan)
    num_cells, num_seeds = losses.shape
    design = np.zeros((len(cells), num_cells + num_seeds))
    design[np.arange(len(cells)), cells] = 1.0
    design[np.arange(len(cells)), num_cells + seeds] = 1.0
    # The minimum-norm solution leaves a constant free between cells and seeds; putting the mean
    # seed effect back into the cells removes it. Seeds that nobody has do not count.
    solution = np.linalg.lstsq(design, losses[cells, seeds], rcond=None)[0]
    effects = solution[num_cells:][known.any(axis=0)]
    adjusted = solution[:num_cells] + effects.mean()
    return np.where(known.any(axis=1), adjusted, math.nan)


def leave_one_seed_out(losses: Array) -> float | None:
    """Mean over seeds of the loss at the rate that the other seeds choose; none for one seed.

    Args:
        losses: [rates, seeds], finite.
    """
    num_seeds = losses.shape[1]
    if num_seeds < 2:
        return None
    held_out = []
    for seed in range(num_seeds):
        others = np.delete(losses, seed, axis=1).mean(axis=1)
        held_out.append(losses[argmin_first(others), seed])
    return float(np.mean(held_out))


def choice_probability(means: Array, probabilities: Array) -> Array:
    """Share of seed draws in which each rate is the best; ties are split.

    Args:
        means: [draws, rates], each draw's mean loss.
        probabilities: [draws], adding up to 1.
    """
    total = np.zeros(means.shape[1])
    for row, weight in zip(means, probabilities, strict=True):
        best = tie_ranks(row) == 0
        total += weight * best / best.sum()
    return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Vertex:
    """The minimum of a parabola through the best rate and its neighbours, in log10 of the rate.

    Attributes:
        lr: where it lies.
        loss: the parabola's value there.
    """

    lr: float
    loss: float


def interpolated_optimum(rates: Array, losses: Array) -> Vertex | None:
    """The vertex between the best rate's neighbours; none if the best is at an edge.

    Args:
        rates: [rates], positive and ascending.
        losses: [rates]; a non-finite neighbour gives none, nor does one at the same rate.
    """
    best = argmin_first(losses)
    if not 0 < best < len(rates) - 1:
        return None
    x, y = np.log10(rates[best - 1 : best + 2]), losses[best - 1 : best + 2]
    if not np.isfinite(y).all() or not (np.diff(x) > 0).all():
        return None
    curvature, slope, constant = np.polyfit(x - x[1], y, 2)
    if curvature <= 0:
        return None
    shift = -slope / (2 * curvature)
    value = constant + slope * shift + curvature * shift**2
    return Vertex(lr=float(10 ** (x[1] + shift)), loss=float(value))


def _capped(losses: Array, ceiling: float) -> Array:
    if not math.isfinite(ceiling):
        raise ValueError(f"the loss at initialisation must be finite, got {ceiling}")
    if not np.isfinite(losses).any():
        raise ValueError("sensitivity needs at least one finite loss")
    return np.minimum(np.where(np.isfinite(losses), losses, ceiling), ceiling)


def sensitivity_grid(losses: Array, ceiling: float) -> float:
    """Mean capped loss over the rates minus the smallest; for rates at equal ratios.

    Args:
        losses: [rates]; non-finite where training diverged, which counts as `ceiling`.
        ceiling: loss at initialisation.
    """
    capped = _capped(losses, ceiling)
    return float(capped.mean() - capped.min())


def sensitivity_trapezoid(rates: Array, losses: Array, ceiling: float) -> float:
    """The same by the trapezoid rule in the logarithm of the rate; for any spacing."""
    if len(rates) < 2:
        raise ValueError("sensitivity over a range needs at least two rates")
    capped, x = _capped(losses, ceiling), np.log(rates)
    return float(integrate.trapezoid(capped, x) / (x[-1] - x[0]) - capped.min())


def has_equal_ratios(rates: Array, tolerance: float = 0.15) -> bool:
    """Whether neighbouring rates stand at one ratio; 1-3-10 grids differ by 10 % and count."""
    if len(rates) < 3:
        return True
    steps = np.diff(np.log(rates))
    return bool(steps.max() - steps.min() <= tolerance * steps.mean())


def tolerance_interval(
    rates: Array, losses: Array, margin: float, ceiling: float = math.inf
) -> tuple[float, float]:
    """Rates round the best with loss at most `margin` above it, interpolated in the logarithm.

    Args:
        rates: [rates], positive and ascending.
        losses: [rates]; non-finite where training diverged, which counts as `ceiling`.
        margin: nats, positive.
        ceiling: loss at initialisation; where it is infinite the interval ends at the last rate
            before one that diverged.

    Returns:
        Lower and upper rate; the width in decades is log10 of their ratio.
    """
    if not margin > 0:
        raise ValueError(f"{margin=} must be positive")
    best = argmin_first(losses)
    losses = np.where(np.isfinite(losses), losses, ceiling)
    limit = losses[best] + margin
    ends = []
    for step in (-1, 1):
        at = best
        while 0 <= at + step < len(rates) and losses[at + step] <= limit:
            at += step
        end = math.log10(rates[at])
        beyond = at + step
        if 0 <= beyond < len(rates) and math.isfinite(losses[beyond]):
            share = (limit - losses[at]) / (losses[beyond] - losses[at])
            end += share * (math.log10(rates[beyond]) - end)
        ends.append(10**end)
    return ends[0], ends[1]


def expected_best(values: Array, k: int) -> float:
    """Expected smallest of `k` of the N `values` drawn with replacement: equal tuning effort.

    E = Σᵢ v₍ᵢ₎ [((N-i+1)/N)ᵏ - ((N-i)/N)ᵏ], v ascending (Dodge et al., arXiv 1909.03004).
    """
    n = len(values)
    if n == 0 or k < 1:
        raise ValueError(f"expected best needs values and k >= 1, got {n} values and {k=}")
    remaining = (n - np.arange(n + 1)) / n
    return float(np.sort(values) @ (remaining[:-1] ** k - remaining[1:] ** k))


def selection_bias(num_rates: int, num_seeds: int, sd: float) -> float:
    """How far below the truth the smallest of K seed means lies in a flat valley, in nats."""
    return -expected_maximum(num_rates) * sd / math.sqrt(num_seeds)


def expected_maximum(k: int) -> float:
    """Expected largest of `k` independent standard normal values."""
    if k < 1:
        raise ValueError(f"{k=} must be at least 1")

    def density(x: float) -> float:
        below = float(special.ndtr(x)) ** (k - 1)
        return x * k * below * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)

    return float(integrate.quad(density, -10.0, 10.0)[0])
