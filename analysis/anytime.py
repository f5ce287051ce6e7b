"""Differences of arms whose seeds were added after looking: tests that hold at every look.

A t test means what it says at a number of pairs that was fixed beforehand. Where a sweep adds
seeds until a comparison is decided, 95 % t intervals miss the truth at some look in a fifth of the
sweeps (from 3 to 16 pairs). For differences that are independent and normal with unknown spread,
put the prior N(0, c²) on the standardised effect and the right Haar prior on the spread; the ratio
of marginal likelihoods against "the mean is m" after n pairs, ν = n - 1, t that of m, is

    B(m) = (1 + n c²)^(-1/2) · [(1 + t²/ν) / (1 + t²/(ν (1 + n c²)))]^(n/2).

If the mean is m it ever reaches 1/α with a chance of at most α (Ville's inequality), so 1/B(m) is a
p value and {m: B(m) < 1/α} an interval, both at every look (Lai, 1976; Wang and Ramdas,
"Anytime-valid t-tests and confidence sequences for Gaussian means with unknown variance", 2023).
"""

import math
from dataclasses import dataclass

import numpy as np

from analysis.stats import CONSTANT_SD, SIGNIFICANCE, Array, Difference

PRIOR_SD = 3.0
"""c, the spread of standardised effects that the prior expects; what adaptive seeds stop by."""

METHOD = "valid at every look"


@dataclass(frozen=True, kw_only=True, slots=True)
class AnytimeDifference(Difference):
    """A paired difference whose interval and p value hold at every look.

    Attributes:
        sd: standard deviation of the differences.
    """

    sd: float

    def widened(self, comparisons: int) -> tuple[float, float]:
        """The interval that covers together with `comparisons` - 1 others; may be infinite."""
        half = _half_width_sds(self.pairs, SIGNIFICANCE / comparisons) * self.sd
        return self.mean - half, self.mean + half

    def equivalence_p(self, margin: float) -> float:
        """The p value of "the difference lies outside ±`margin`", at every look."""
        if not abs(self.mean) < margin:
            return 1.0
        return max(_p_of_mean(self, edge) for edge in (-margin, margin))


def anytime_difference(first: Array, second: Array) -> AnytimeDifference | None:
    """First minus second over the same seeds in the same order.

    None where the pairs are too few for a finite interval, or differ by a constant.
    """
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    n = len(differences)
    half_sds = _half_width_sds(n, SIGNIFICANCE)
    sd = float(np.std(differences, ddof=1)) if n > 1 else 0.0
    if math.isinf(half_sds) or sd < CONSTANT_SD:
        return None
    mean = float(np.mean(differences))
    t = mean * math.sqrt(n) / sd
    return AnytimeDifference(
        mean=mean,
        low=mean - half_sds * sd,
        high=mean + half_sds * sd,
        t=t,
        p=_p(t, n),
        df=n - 1,
        pairs=n,
        method=METHOD,
        effect_size=mean / sd,
        sd=sd,
    )


def _p_of_mean(test: AnytimeDifference, mean: float) -> float:
    return _p((test.mean - mean) * math.sqrt(test.pairs) / test.sd, test.pairs)


def _p(t: float, n: int) -> float:
    """1/B of n pairs at `t`, at most 1."""
    spread = 1 + n * PRIOR_SD**2
    per_df = t * t / (n - 1)
    log_b = (n * (math.log1p(per_df) - math.log1p(per_df / spread)) - math.log(spread)) / 2
    return min(1.0, math.exp(-log_b))


def _half_width_sds(n: int, alpha: float) -> float:
    """Half width of the interval in standard deviations of the differences; ∞ for too few."""
    spread = 1 + n * PRIOR_SD**2
    bound = (spread / alpha**2) ** (1 / n) if n > 1 else math.inf
    if bound >= spread:
        return math.inf
    # B < 1/α solved for t²/ν, where t is the mean over its standard error.
    return math.sqrt((n - 1) / n * (bound - 1) / (1 - bound / spread))
