"""Summaries of small samples: rates, resampled means, trimmed means, and how many seeds to run.

Definitions of the interquartile mean, the probability of improvement and the optimality gap follow
Agarwal et al., "Deep reinforcement learning at the edge of the statistical precipice"
(arXiv 2108.13264).
"""

import math

import numpy as np
from scipy import optimize, special

from analysis.resampling import resample_weights
from analysis.stats import CONFIDENCE, SIGNIFICANCE, Array

POWER = 0.8
"""Chance to see a true difference, by convention."""


def rate_interval(k: int, n: int, method: str = "wilson") -> tuple[float, float]:
    """95 % interval of a rate k of n; `method` is `wilson` or `exact` (Clopper and Pearson)."""
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"{k=} of {n=} is no rate; 0 <= k <= n and n >= 1 are needed")
    if method not in ("wilson", "exact"):
        raise ValueError(f"{method=} must be wilson or exact")
    tail = (1 - CONFIDENCE) / 2
    if method == "exact":
        low = 0.0 if k == 0 else float(special.betaincinv(k, n - k + 1, tail))
        high = 1.0 if k == n else float(special.betaincinv(k + 1, n - k, 1 - tail))
        return low, high
    z2 = float(special.ndtri(1 - tail)) ** 2
    center = (k + z2 / 2) / (n + z2)
    half = math.sqrt(z2 * (k * (n - k) / n + z2 / 4)) / (n + z2)
    # At the ends the formula gives 0 and 1 up to rounding.
    return 0.0 if k == 0 else center - half, 1.0 if k == n else center + half


def bootstrap_standard_error(values: Array, *, is_corrected: bool = True) -> float:
    """Exact bootstrap standard error of the mean; corrected by √(n/(n-1)) it is s/√n."""
    n = len(values)
    if n < 2:
        raise ValueError(f"a standard error needs at least 2 values, got {n}")
    weights, probabilities = resample_weights(n)
    means = weights @ values / n
    center = float(probabilities @ means)
    se = math.sqrt(float(probabilities @ (means - center) ** 2))
    return se * math.sqrt(n / (n - 1)) if is_corrected else se


def percentile_interval(values: Array, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Exact percentile bootstrap interval of the mean; too narrow below about ten values."""
    n = len(values)
    weights, probabilities = resample_weights(n)
    means = weights @ values / n
    order = np.argsort(means, kind="stable")
    cumulative = np.cumsum(probabilities[order])
    tail = (1 - confidence) / 2
    # The smallest mean whose lower tail reaches the level, and the mirror image from above.
    low = order[int(np.searchsorted(cumulative, tail - 1e-12))]
    high = order[min(int(np.searchsorted(cumulative, 1 - tail - 1e-12)), len(order) - 1)]
    return float(means[low]), float(means[high])


def interquartile_mean(values: Array) -> float:
    """Mean of what is left when ⌊n/4⌋ values are cut at each end."""
    if values.size == 0:
        raise ValueError("an interquartile mean needs at least one value")
    ordered = np.sort(values, axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def probability_of_improvement(first: Array, second: Array) -> float:
    """P(first > second), ties counted half; arrays [runs, tasks], averaged over tasks."""
    if first.ndim != 2 or second.ndim != 2 or first.shape[1] != second.shape[1]:
        raise ValueError(f"shapes {first.shape} and {second.shape} must be [runs, same tasks]")
    gaps = first[:, None, :] - second[None, :, :]
    return float(np.mean((gaps > 0) + 0.5 * (gaps == 0)))


def optimality_gap(scores: Array) -> float:
    """1 minus the mean of scores capped at 1."""
    return 1.0 - float(np.mean(np.minimum(scores, 1.0)))


def hotelling_radius(n: int, confidence: float = CONFIDENCE) -> float:
    """Radius in standard deviations of the joint region of a two-dimensional mean; n at least 3."""
    if n < 3:
        raise ValueError(f"{n=} values have no joint region; at least 3 are needed")
    f = float(special.fdtri(2, n - 2, confidence))
    return math.sqrt(2 * (n - 1) / (n - 2) * f / n)


def joint_region(first: Array, second: Array, corners: int = 72) -> Array:
    """Outline [corners + 1, 2] of the joint 95 % region of two means measured on the same seeds.

    Hotelling's ellipse: with n values and sample covariance S, the points at
    `hotelling_radius(n)` standard deviations from the means in the metric of S. A quantity that
    never varies gives an ellipse without width.

    Args:
        first: [seeds], finite; at least 3.
        second: [seeds], of the same seeds in the same order.
        corners: points along the outline.
    """
    values = np.column_stack([first, second])
    spread, axes = np.linalg.eigh(np.cov(values.T))
    # Rounding may push the variance of what never varies below zero.
    radii = hotelling_radius(len(values)) * np.sqrt(np.maximum(spread, 0.0))
    angle = np.linspace(0, 2 * math.pi, corners + 1)
    circle = np.column_stack([np.cos(angle), np.sin(angle)])
    return np.asarray(values.mean(axis=0) + (circle * radii) @ axes.T)


def clipped_total(values: Array, ceiling: float) -> Array:
    """Losses in which divergence costs: non-finite and larger values count as `ceiling`.

    `ceiling` is the loss at initialisation, near the logarithm of the vocabulary's size.
    """
    return np.minimum(np.where(np.isfinite(values), values, ceiling), ceiling)


def seeds_needed_normal(sd: float, difference: float, *, is_paired: bool) -> float:
    """Seeds per arm to see `difference` at 5 % with power 80 %, by the normal approximation.

    Args:
        sd: standard deviation of one arm's values, or of the differences when paired.
        difference: true difference, positive.
        is_paired: whether both arms share their seeds.
    """
    if not difference > 0:
        raise ValueError(f"{difference=} must be positive")
    z = float(special.ndtri(1 - SIGNIFICANCE / 2) + special.ndtri(POWER))
    return z**2 * (1 if is_paired else 2) * sd**2 / difference**2


def power_of_t(sd: float, difference: float, n: int, *, is_paired: bool) -> float:
    """Chance that a two-sided t test at 5 % on n seeds per arm sees `difference`; n at least 2."""
    df = n - 1 if is_paired else 2 * (n - 1)
    shift = difference / (sd * math.sqrt((1 if is_paired else 2) / n))
    critical = float(special.stdtrit(df, 1 - SIGNIFICANCE / 2))
    return _power(critical, df, shift)


def _power(critical: float, df: float, shift: float) -> float:
    """Chance that a noncentral t exceeds `critical`.

    The far tail is left out: it is below 1e-4 wherever the power is of interest.
    """
    below = float(special.nctdtr(df, shift, critical))
    # scipy gives NaN where almost nothing is left below.
    return 1.0 if math.isnan(below) and shift > critical else 1 - below


def seeds_needed(
    sd: float, difference: float, *, is_paired: bool, most: int = 10_000
) -> int | None:
    """Smallest number of seeds per arm with power 80 %, by the t test; none above `most`."""
    start = max(2, math.floor(seeds_needed_normal(sd, difference, is_paired=is_paired)))
    if start > most:
        return None
    for n in range(start, most + 1):
        if power_of_t(sd, difference, n, is_paired=is_paired) >= POWER:
            return n
    return None


def smallest_detectable_difference(sd: float, n: int, df: float | None = None) -> float:
    """True paired difference that n seeds see at 5 % with power 80 %.

    Args:
        sd: standard deviation of the differences.
        n: common seeds, at least 2.
        df: degrees of freedom of `sd`; n-1 if it comes from these pairs alone.
    """
    if n < 2:
        raise ValueError(f"a difference needs at least 2 common seeds, got {n}")
    if sd == 0:
        return 0.0
    freedom = df if df is not None else n - 1
    critical = float(special.stdtrit(freedom, 1 - SIGNIFICANCE / 2))

    shift = float(
        optimize.brentq(lambda x: _power(critical, freedom, x) - POWER, 0.1, 3 * critical + 5)
    )
    return shift * sd / math.sqrt(n)
