"""Learning-rate schedules as pure functions of the step: warm-up, then constant, WSD or cosine.

With N updates, W of them warm-up and D of them decay, update i = 0 … N − 1 has the rate

```
i < W               peak · i / W                                            linear warm-up from 0
i ≤ N − 1 − D       peak                                                    stable
else                min + (peak − min) · (1 − √((i − (N − 1 − D)) / D))     minus-sqrt decay
```

so the first update of a run with warm-up has rate 0, and the last has exactly `min`. With W + D > N
the rate would drop at once from the peak into the middle of the decay. `wsd` refuses that; the kind
`collapsed` is that and nothing else, for repeating published runs whose decay was given three times
their own length: i ≤ W warms up, all later updates decay by the formula above. Shape and name
of the decay are those of warmup-stable-decay in Hägele et al., arXiv 2405.18392 ("1-sqrt"), as
Megatron-LM implements it; there the count is of samples consumed, so its last update stops one
step's worth short of `min`. Counting updates instead makes both ends exact.
"""

import math
from dataclasses import dataclass

KINDS = ("wsd", "cosine", "constant", "collapsed")
QUARTILES = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Shares of a run at which `quartiles` reads the schedule."""


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """Shape of the learning rate over a run; fractions are of all steps.

    Attributes:
        kind: `wsd` (warm-up, stable, minus-sqrt decay), `cosine` (from the end of the warm-up to
            the last step), `constant`, or `collapsed`, a decay that begins before the warm-up ends.
        warmup_fraction: linear warm-up from 0; the first update has rate 0.
        decay_fraction: of `wsd`, the final decay; of `collapsed`, the same, more than the warm-up
            leaves of the run and possibly more than 1; other kinds don't read it.
        min_ratio: final rate as a share of the peak; `constant` doesn't read it.
    """

    kind: str = "wsd"
    warmup_fraction: float = 0.02
    decay_fraction: float = 0.2
    min_ratio: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"schedule.kind={self.kind!r} must be one of {', '.join(KINDS)}")
        for name in ("warmup_fraction", "decay_fraction", "min_ratio"):
            value = getattr(self, name)
            most = math.inf if self.kind == "collapsed" and name == "decay_fraction" else 1
            if not 0 <= value <= most or math.isinf(value):
                raise ValueError(f"schedule.{name}={value} must lie in [0, {most}]")
        _check_room_for_decay(self)


def _check_room_for_decay(config: ScheduleConfig) -> None:
    fractions = (
        f"schedule.warmup_fraction={config.warmup_fraction} and "
        f"schedule.decay_fraction={config.decay_fraction}"
    )
    exceeds = config.warmup_fraction + config.decay_fraction > 1
    # A decay that starts before the warm-up has ended drops the rate in one step, unnoticed.
    if config.kind == "wsd" and exceeds:
        raise ValueError(f"{fractions} together exceed the run: their sum must be at most 1")
    if config.kind == "collapsed" and not exceeds:
        raise ValueError(
            f"{fractions} fit into the run, so that nothing collapses: schedule.kind must be 'wsd'"
        )


def warmup_steps(config: ScheduleConfig, num_steps: int) -> int:
    """Updates of the warm-up: at least one where there is a warm-up, never the whole run."""
    if not config.warmup_fraction:
        return 0
    return min(max(1, round(config.warmup_fraction * num_steps)), num_steps - 1)


def decay_steps(config: ScheduleConfig, num_steps: int) -> int:
    """Updates of the final decay: all after the warm-up for `cosine`, none for `constant`.

    Of `collapsed`, those that the decay was meant to have, which are more than it gets.
    """
    after_warmup = num_steps - warmup_steps(config, num_steps)
    if config.kind == "constant" or (config.kind == "wsd" and not config.decay_fraction):
        return 0
    if config.kind == "cosine":
        return max(1, after_warmup - 1)
    asked = max(1, round(config.decay_fraction * num_steps))
    return asked if config.kind == "collapsed" else min(asked, after_warmup)


def warmup_ratio(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Share of the peak that update `step` has by warm-up alone: the schedule without its decay.

    Args:
        config: the schedule.
        step: 0-based index of the update.
        num_steps: updates of the whole run.

    Raises:
        ValueError: `step` lies outside the run.
    """
    _check_step(step, num_steps)
    warmup = warmup_steps(config, num_steps)
    return step / warmup if step < warmup else 1.0


def lr_ratio(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Share of the peak rate that update `step` has.

    Args:
        config: the schedule.
        step: 0-based index of the update.
        num_steps: updates of the whole run.

    Raises:
        ValueError: `step` lies outside the run.
    """
    ratio = warmup_ratio(config, step, num_steps)
    decay = decay_steps(config, num_steps)
    if config.kind == "collapsed" and step <= warmup_steps(config, num_steps):
        return ratio
    progress = (step - (num_steps - 1 - decay)) / decay if decay else 0.0
    if progress <= 0:
        return ratio
    shape = cosine if config.kind == "cosine" else minus_sqrt
    return config.min_ratio + (1 - config.min_ratio) * shape(progress)


def minus_sqrt(progress: float) -> float:
    """1 − √progress: 1 where the decay starts, 0 where it ends."""
    return 1 - math.sqrt(progress)


def cosine(progress: float) -> float:
    """(1 + cos(π · progress)) / 2: 1 where the decay starts, 0 where it ends."""
    return (1 + math.cos(math.pi * progress)) / 2


def quartiles(
    config: ScheduleConfig, num_steps: int, peak: float = 1.0, *, is_decayed: bool = True
) -> tuple[float, ...]:
    """Rates at 0, 25, 50, 75 and 100 % of the updates, for plans and records.

    Args:
        config: the schedule.
        num_steps: updates of the whole run.
        peak: rate that the ratios multiply.
        is_decayed: false for a group that stays constant after the warm-up.
    """
    last, ratio = num_steps - 1, lr_ratio if is_decayed else warmup_ratio
    return tuple(peak * ratio(config, round(share * last), num_steps) for share in QUARTILES)


def _check_step(step: int, num_steps: int) -> None:
    if not 0 <= step < num_steps:
        raise ValueError(f"{step=} lies outside the run: it must be from 0 to {num_steps - 1}")
