"""Intervals that stay valid however often one looks: what lets seeds be added until it is decided.

A t interval covers at one number of pairs that was fixed beforehand. Looked at after every new
seed, from 3 to 16 pairs, one that says 95 % misses the truth at some look in 21 % of simulated
sweeps. The intervals here miss it at any look, however many there are, with a chance of at most
`alpha`, so that more seeds may be added later without a penalty and without a plan of looks: 2.2 %
by 16 pairs and 3.2 % by 200 on normal noise, 1.8 % and 2.1 % on t noise with 5 degrees of freedom.
Strong skew breaks the promise (exponential noise: 11 % by 16 pairs), but the difference of two
losses that are distributed alike has none.

The differences are taken as independent and normal with unknown spread. For a true mean m, put the
prior N(0, c²) on the standardised effect (mean - m)/σ and the right Haar prior on σ. The ratio of
marginal likelihoods against "the mean is m" depends on the data through t alone, with ν = n - 1:

    B_n(m) = (1 + n c²)^(-1/2) · [(1 + t²/ν) / (1 + t²/(ν (1 + n c²)))]^(n/2)

Under mean m it is a martingale in what t shows, whatever σ is, so by Ville's inequality it ever
reaches 1/alpha with a chance of at most alpha. The interval holds every m with B_n(m) < 1/alpha.
(Lai, 1976; Hendriksen, de Heide and Grünwald, "Optional stopping with Bayes factors", 2021; Wang
and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
variance", 2023, where c is free; here it is fixed, since nobody tunes it honestly after the fact.)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

PRIOR_SD = 3.0
"""c: effects expected, in standard deviations of a paired difference. Paired by seed, differences
between architectures are a few of them. Of the choices from 1 to 20, 3 gives the narrowest
intervals at 4 pairs, and ones 10 % wider than the best choice at 16."""


@dataclass(frozen=True, slots=True)
class AnytimeInterval:
    """A mean with an interval that is valid at every look.

    Attributes:
        mean: of the differences.
        low: lower end; -∞ where there are too few to say anything.
        high: upper end.
        n: differences behind it.
        sd: their standard deviation; NaN below two.
    """

    mean: float
    low: float
    high: float
    n: int
    sd: float

    @property
    def excludes_zero(self) -> bool:
        """Whether a difference has been shown."""
        return self.low > 0 or self.high < 0

    def lies_within(self, effect: float) -> bool:
        """Whether every value of the interval is smaller than `effect` in size."""
        return -effect < self.low and self.high < effect


def half_width_sds(n: int, alpha: float) -> float:
    """Half width of the interval of `n` values, in their standard deviations; ∞ for too few.

    Raises:
        ValueError: `alpha` outside (0, 1), or no value.
    """
    if not 0 < alpha < 1 or n < 1:
        raise ValueError(f"{alpha=} must lie between 0 and 1, and {n=} be at least 1")
    spread = 1 + n * PRIOR_SD**2
    bound = (spread / alpha**2) ** (1 / n)
    if bound >= spread or n < 2:
        return math.inf
    # B_n < 1/alpha solved for t²/ν; t = mean · √n / sd.
    return math.sqrt((n - 1) / n * (bound - 1) / (1 - bound / spread))


def anytime_interval(values: Sequence[float], alpha: float) -> AnytimeInterval:
    """The interval of a mean after any number of looks.

    Args:
        values: finite, at least one.
        alpha: chance that the interval misses the true mean at any look.

    Raises:
        ValueError: no value, or one that is not finite.
    """
    n = len(values)
    if n < 1 or not all(math.isfinite(value) for value in values):
        raise ValueError(f"an interval needs finite values, at least one, got {list(values)}")
    mean = math.fsum(values) / n
    if n < 2:
        return AnytimeInterval(mean, -math.inf, math.inf, n, math.nan)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    factor = half_width_sds(n, alpha)
    half = math.inf if math.isinf(factor) else factor * sd
    return AnytimeInterval(mean, mean - half, mean + half, n, sd)
