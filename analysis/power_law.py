"""Loss against training tokens as a power law with a floor: what a lower loss is worth in tokens.

Tokens that a baseline's law needs for another arm's loss state a gain as data saved; refit it for
each seed to get its interval.
"""

from dataclasses import dataclass

import numpy as np
from scipy import optimize

from analysis.stats import Array


@dataclass(frozen=True, kw_only=True, slots=True)
class PowerLaw:
    """Loss against training tokens, L = αD⁻ᴮ + β.

    Attributes:
        alpha: α.
        decay: B.
        floor: β, the loss that no amount of data goes below.
    """

    alpha: float
    decay: float
    floor: float

    def tokens_for(self, loss: float) -> float | None:
        """Tokens after which this law reaches `loss`; none at or below its floor."""
        if loss <= self.floor:
            return None
        return float(((loss - self.floor) / self.alpha) ** (-1 / self.decay))


def fit_power_law(tokens: Array, losses: Array) -> PowerLaw:
    """Least-squares fit of L = αD⁻ᴮ + β; at least four points at four budgets.

    Raises:
        ValueError: too few points, or no fit converges.
    """
    if len(np.unique(tokens)) < 4:
        raise ValueError(f"a power law needs 4 budgets, got {len(np.unique(tokens))}")
    scale = float(np.exp(np.log(tokens).mean()))
    span = float(np.ptp(losses)) or 1.0

    def law(x: Array, alpha: float, decay: float, floor: float) -> Array:
        return np.asarray(alpha * x**-decay + floor)

    try:
        # In units of the middle budget, where α, B and β are all near one.
        (alpha, decay, floor), _ = optimize.curve_fit(
            law,
            tokens / scale,
            losses,
            p0=(span, 0.5, float(losses.min()) - span / 2),
            bounds=([0, 1e-3, -np.inf], [np.inf, 10, float(losses.min())]),
            maxfev=20_000,
        )
    except RuntimeError as error:
        raise ValueError(f"no power law fits these losses: {error}") from error
    return PowerLaw(alpha=float(alpha * scale**decay), decay=float(decay), floor=float(floor))
