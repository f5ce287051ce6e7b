"""Tests without a distribution: what they can and cannot show at three to five seeds.

No sign-flip or rank test on fewer than six pairs reaches p < 0.05, so they are checks beside the
pooled t tests and not the tests of a report.
"""

import math

import numpy as np
from scipy import special

from analysis.stats import Array


def sign_flip_p(differences: Array) -> float:
    """Exact two-sided p of the mean over all 2ⁿ sign patterns; never below 2/2ⁿ."""
    n = len(differences)
    if not 1 <= n <= 16:
        raise ValueError(f"sign flips are enumerated for 1 to 16 pairs, got {n}")
    signs = 1 - 2 * ((np.arange(2**n)[:, None] >> np.arange(n)) & 1)
    sums = np.abs(signs @ differences)
    observed = abs(float(np.sum(differences)))
    return float(np.mean(sums >= observed - 1e-12 * max(observed, 1.0)))


def smallest_paired_p(n: int) -> float:
    """Smallest two-sided p that sign flips or Wilcoxon's test can reach on n pairs."""
    return float(2.0 ** (1 - n))


def smallest_unpaired_p(n: int) -> float:
    """Smallest two-sided p that Mann and Whitney's test can reach on n against n values."""
    return 2.0 / math.comb(2 * n, n)


def friedman(values: Array) -> tuple[float, float, float]:
    """χ², p and Kendall's W of `values` [configurations, seeds]; weak at few seeds, a check."""
    a, n = values.shape
    if a < 3 or n < 2:
        raise ValueError(f"Friedman's test needs 3 configurations and 2 seeds, got {a} and {n}")
    ranks = np.empty_like(values)
    ties = 0.0
    for seed in range(n):
        _, place, counts = np.unique(values[:, seed], return_inverse=True, return_counts=True)
        # Equal values share the mean of the ranks that they take up.
        ranks[:, seed] = (np.cumsum(counts) - (counts - 1) / 2)[place]
        ties += float(np.sum(counts**3 - counts))
    spread = 1 - ties / (n * (a**3 - a))
    if spread == 0:
        raise ValueError("Friedman's test needs some difference between the configurations")
    sums = ranks.sum(axis=1)
    chi2 = (12 / (a * n * (a + 1)) * float(sums @ sums) - 3 * n * (a + 1)) / spread
    return chi2, float(special.chdtrc(a - 1, chi2)), chi2 / (n * (a - 1))
