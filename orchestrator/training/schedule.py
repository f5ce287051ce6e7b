"""Learning-rate schedules as pure functions of the step: warm-up, then constant, WSD or cosine."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """Shape of the learning rate over a run; fractions are of all steps.

    Attributes:
        kind: `wsd` (warm-up, stable, minus-sqrt decay), `cosine` or `constant`.
        warmup_fraction: linear warm-up from 0; the first update has rate 0.
        decay_fraction: of `wsd`, the final decay.
        min_ratio: final rate as a share of the peak.
    """

    kind: str = "wsd"
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.2
    min_ratio: float = 0.1
