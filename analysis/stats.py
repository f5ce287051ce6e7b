"""Intervals, paired comparisons and corrections for three to five seeds per configuration.

Bars are t intervals: at three seeds a percentile bootstrap of the mean covers 69 % where it says
95 % (simulation on normal noise), a t interval 95 %. Resampling serves what has no formula, such as
membership of a front; it enumerates every draw of the seeds exactly, so it needs no random numbers.
Losses are averaged, never perplexities (exp is convex); ratios are taken on logarithms.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# Distributions come from scipy.special: importing scipy.stats takes a second.
from scipy import special

Array = npt.NDArray[np.float64]

CONFIDENCE = 0.95
SIGNIFICANCE = 0.05
CONSTANT_SD = 1e-12
"""Below this standard deviation a set of differences is one constant up to rounding: t is noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean with its two-sided interval.

    Attributes:
        mean: the mean, or the difference of two means.
        low: lower end.
        high: upper end.
        n: values (or pairs) behind it.
    """

    mean: float
    low: float
    high: float
    n: int

    @property
    def half_width(self) -> float:
        """Distance from the mean to either end."""
        return (self.high - self.low) / 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """A comparison of two arms, first minus second.

    Attributes:
        mean: mean difference.
        low: lower end of the interval.
        high: upper end of the interval.
        t: test statistic; infinite for a constant difference other than zero.
        p: two-sided p value of "no difference".
        df: degrees of freedom of `t`.
        pairs: seeds that both arms have; 0 in an unpaired comparison.
        method: `paired t`, `blocked ANOVA`, `Welch` or `constant difference`.
        effect_size: mean over the standard deviation of the differences; NaN where unpaired.
    """

    mean: float
    low: float
    high: float
    t: float
    p: float
    df: float
    pairs: int
    method: str
    effect_size: float = math.nan

    def widened(self, comparisons: int) -> tuple[float, float]:
        """The interval that covers together with `comparisons` - 1 others (Bonferroni)."""
        half = _t_quantile(self.df, 1 - SIGNIFICANCE / comparisons) * self.standard_error
        return self.mean - half, self.mean + half

    @property
    def standard_error(self) -> float:
        """Standard error of the mean difference."""
        return (self.high - self.mean) / _t_quantile(self.df)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockedAnova:
    """Randomised blocks, value = mean + configuration + seed + error.

    Attributes:
        num_configs: a.
        num_seeds: n.
        ss_config: sum of squares between configurations.
        ss_seed: sum of squares between seeds.
        ss_error: what is left.
        df_error: (a-1)(n-1).
        mse: error variance, `ss_error` over `df_error`.
        f: F of "all configurations equal".
        p: its p value.
        unblocked_variance: variance within configurations when seeds are ignored, a(n-1) df.
    """

    num_configs: int
    num_seeds: int
    ss_config: float
    ss_seed: float
    ss_error: float
    df_error: int
    mse: float
    f: float
    p: float
    unblocked_variance: float

    def half_width(self, confidence: float = CONFIDENCE) -> float:
        """Half the interval of a difference of two configurations, seeds as blocks."""
        return _t_quantile(self.df_error, confidence) * math.sqrt(2 * self.mse / self.num_seeds)

    def unblocked_half_width(self, confidence: float = CONFIDENCE) -> float:
        """The same if seeds were ignored: what pairing by seed saves."""
        df = self.num_configs * (self.num_seeds - 1)
        scale = math.sqrt(2 * self.unblocked_variance / self.num_seeds)
        return _t_quantile(df, confidence) * scale


def _t_quantile(df: float, confidence: float = CONFIDENCE) -> float:
    return float(special.stdtrit(df, (1 + confidence) / 2))


def t_tail(t: float, df: float) -> float:
    """P(T > t) of Student's distribution."""
    return float(special.stdtr(df, -t))


def f_tail(f: float, df_between: float, df_within: float) -> float:
    """P(F > f) of Fisher's distribution."""
    return 0.0 if math.isinf(f) else float(special.fdtrc(df_between, df_within, f))


def interval_factor(n: int, confidence: float = CONFIDENCE) -> float:
    """Half width of the t interval of a mean in standard deviations; `n` at least 2."""
    if n < 2:
        raise ValueError(f"{n=} values have no interval; at least 2 are needed")
    return _t_quantile(n - 1, confidence) / math.sqrt(n)


def mean_interval(values: Array, confidence: float = CONFIDENCE) -> Interval | None:
    """Mean and t interval of finite `values`; none for fewer than two."""
    n = len(values)
    if n < 2:
        return None
    mean = float(np.mean(values))
    half = interval_factor(n, confidence) * float(np.std(values, ddof=1))
    return Interval(mean=mean, low=mean - half, high=mean + half, n=n)


def paired_difference(first: Array, second: Array, confidence: float = CONFIDENCE) -> Difference:
    """First minus second over the same seeds in the same order, at least two of them."""
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    n = len(differences)
    if n < 2:
        raise ValueError(f"a paired comparison needs at least 2 common seeds, got {n}")
    mean, sd = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if sd < CONSTANT_SD:
        same = abs(mean) < CONSTANT_SD
        return Difference(
            mean=mean,
            low=mean,
            high=mean,
            t=0.0 if same else math.copysign(math.inf, mean),
            p=1.0 if same else 0.0,
            df=n - 1,
            pairs=n,
            method="constant difference",
        )
    half = interval_factor(n, confidence) * sd
    t = mean / (sd / math.sqrt(n))
    return Difference(
        mean=mean,
        low=mean - half,
        high=mean + half,
        t=t,
        p=2 * t_tail(abs(t), n - 1),
        df=n - 1,
        pairs=n,
        method="paired t",
        effect_size=mean / sd,
    )


def welch_difference(first: Array, second: Array, confidence: float = CONFIDENCE) -> Difference:
    """First minus second where no seed is common; both need two values."""
    if min(len(first), len(second)) < 2:
        raise ValueError(f"Welch's test needs 2 values a side, got {len(first)} and {len(second)}")
    mean = float(np.mean(first) - np.mean(second))
    parts = [float(np.var(x, ddof=1)) / len(x) for x in (first, second)]
    variance = sum(parts)
    if math.sqrt(variance) < CONSTANT_SD:
        raise ValueError("Welch's test needs some spread within the arms, and there is none")
    sizes = (len(first), len(second))
    df = variance**2 / sum(part**2 / (n - 1) for part, n in zip(parts, sizes, strict=True))
    t = mean / math.sqrt(variance)
    half = _t_quantile(df, confidence) * math.sqrt(variance)
    return Difference(
        mean=mean,
        low=mean - half,
        high=mean + half,
        t=t,
        p=2 * t_tail(abs(t), df),
        df=df,
        pairs=0,
        method="Welch",
    )


def blocked_anova(values: Array) -> BlockedAnova:
    """Randomised-blocks ANOVA of `values` [configurations, seeds], complete and at least 2 × 2."""
    a, n = values.shape
    if a < 2 or n < 2:
        raise ValueError(f"a blocked ANOVA needs 2 configurations and 2 seeds, got {a} and {n}")
    if not np.isfinite(values).all():
        raise ValueError("a blocked ANOVA needs every configuration to be finite at every seed")
    grand = values.mean()
    config_effect = values.mean(axis=1) - grand
    seed_effect = values.mean(axis=0) - grand
    error = values - grand - config_effect[:, None] - seed_effect[None, :]
    ss_config, ss_seed = float(n * np.sum(config_effect**2)), float(a * np.sum(seed_effect**2))
    ss_error, df_error = float(np.sum(error**2)), (a - 1) * (n - 1)
    mse = ss_error / df_error
    constant = math.sqrt(mse) < CONSTANT_SD
    ms_config = ss_config / (a - 1)
    f = ms_config / mse if not constant else (math.inf if ms_config > CONSTANT_SD**2 else 0.0)
    return BlockedAnova(
        num_configs=a,
        num_seeds=n,
        ss_config=ss_config,
        ss_seed=ss_seed,
        ss_error=ss_error,
        df_error=df_error,
        mse=mse,
        f=f,
        p=f_tail(f, a - 1, df_error),
        unblocked_variance=(ss_seed + ss_error) / (a * (n - 1)),
    )


def blocked_difference(
    anova: BlockedAnova, mean: float, confidence: float = CONFIDENCE
) -> Difference:
    """A difference `mean` of two configurations under the pooled error of `anova`."""
    se = math.sqrt(2 * anova.mse / anova.num_seeds)
    if se < CONSTANT_SD:
        raise ValueError("the blocked ANOVA has no error left to compare with")
    half = anova.half_width(confidence)
    t = mean / se
    return Difference(
        mean=mean,
        low=mean - half,
        high=mean + half,
        t=t,
        p=2 * t_tail(abs(t), anova.df_error),
        df=anova.df_error,
        pairs=anova.num_seeds,
        method="blocked ANOVA",
        effect_size=mean / math.sqrt(2 * anova.mse),
    )


def equivalence_p(difference: Difference, margin: float) -> float:
    """The p value of two one-sided tests against differences beyond ±`margin` (Schuirmann)."""
    if not margin > 0:
        raise ValueError(f"{margin=} must be positive")
    se = difference.standard_error
    if se < CONSTANT_SD:
        return 0.0 if abs(difference.mean) < margin else 1.0
    above = t_tail((difference.mean + margin) / se, difference.df)
    below = t_tail((margin - difference.mean) / se, difference.df)
    return max(above, below)


def mean_below_p(values: Array, target: float) -> float:
    """One-sided p of "the mean is not below `target`": a t test on one sample."""
    if len(values) < 2:
        raise ValueError(f"a t test needs at least 2 values, got {len(values)}")
    se = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    if se < CONSTANT_SD:
        return 0.0 if float(np.mean(values)) < target else 1.0
    return t_tail((target - float(np.mean(values))) / se, len(values) - 1)


def holm(p_values: Array) -> Array:
    """Holm's step-down adjustment of a family of p values, in the order given."""
    m = len(p_values)
    order = np.argsort(p_values, kind="stable")
    scaled = np.maximum.accumulate(p_values[order] * (m - np.arange(m)))
    adjusted = np.empty(m)
    adjusted[order] = np.minimum(scaled, 1.0)
    return adjusted


def benjamini_hochberg(p_values: Array) -> Array:
    """Benjamini and Hochberg's false discovery rate adjustment, in the order given."""
    m = len(p_values)
    order = np.argsort(p_values, kind="stable")
    scaled = p_values[order] * m / np.arange(1, m + 1)
    adjusted = np.empty(m)
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return adjusted


def log_ratio(first: Array, second: Array, confidence: float = CONFIDENCE) -> Interval | None:
    """Geometric mean of first over second, paired by seed, with its interval; none below 2."""
    if len(first) < 2:
        return None
    logs = mean_interval(np.log(first) - np.log(second), confidence)
    if logs is None:
        return None
    low, mean, high = (math.exp(x) for x in (logs.low, logs.mean, logs.high))
    return Interval(mean=mean, low=low, high=high, n=logs.n)
