"""Losses at equal cost instead of equal tokens, read off the evaluation points of a curve.

At an equal number of device-seconds a faster arm has seen more tokens; at equal FLOPs a cheaper one
has. The budget is the largest that every arm has trained for. Losses between evaluation points are
interpolated in the logarithm of the tokens. An arm that is stopped before the end of its schedule
is read at a rate that has not decayed yet, which costs it loss: such ranks are hints, not results.
"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from analysis.arms import Arm
from analysis.front import Point
from analysis.stats import Array, Interval, mean_interval

BUDGETS = {
    "device_seconds": "seconds of the device at the measured throughput",
    "flops": "training FLOPs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchedLoss:
    """An arm's loss at a budget that it shares with the others.

    Attributes:
        arm: the arm.
        budget: one of `BUDGETS`.
        amount: the budget, in its unit.
        tokens: training tokens that the arm has seen by then.
        share: those over the tokens of its whole schedule, at most 1.
        loss: mean over seeds in nats; NaN where the curves have no evaluation before and after.
        interval: its t interval; none below two seeds.
    """

    arm: Arm
    budget: str
    amount: float
    tokens: float
    share: float
    loss: float
    interval: Interval | None


def tokens_per_unit(point: Point, budget: str) -> float:
    """Tokens that one unit of `budget` buys the arm; NaN where not measured."""
    if budget == "device_seconds":
        return point.speed
    cost = point.choice.cell.measures["flops_per_token"] if point.choice else math.nan
    return 1 / cost if cost > 0 else math.nan


def matched_losses(points: tuple[Point, ...], curves: pd.DataFrame) -> list[MatchedLoss]:
    """Losses of every arm with a rate, at each of `BUDGETS` that the arms spent unequally."""
    chosen = [point for point in points if point.choice]
    evaluated = curves[np.isfinite(curves["val_loss_nats"].to_numpy(dtype=float))]
    by_replicate = {str(name): rows for name, rows in evaluated.groupby("replicate_id")}
    result = []
    for budget in BUDGETS:
        usable = [p for p in chosen if math.isfinite(tokens_per_unit(p, budget))]
        totals = {p.arm.arm_id: _schedule_tokens(p) for p in usable}
        usable = [p for p in usable if math.isfinite(totals[p.arm.arm_id])]
        if len(usable) < 2:
            continue
        costs = [totals[p.arm.arm_id] / tokens_per_unit(p, budget) for p in usable]
        amount = min(costs)
        if max(costs) <= amount * (1 + 1e-9):
            continue
        for point in usable:
            tokens = amount * tokens_per_unit(point, budget)
            total = totals[point.arm.arm_id]
            losses = _losses_at(point, by_replicate, min(tokens, total))
            result.append(
                MatchedLoss(
                    arm=point.arm,
                    budget=budget,
                    amount=amount,
                    tokens=min(tokens, total),
                    share=min(tokens / total, 1.0),
                    loss=float(losses.mean()) if len(losses) else math.nan,
                    interval=mean_interval(losses),
                )
            )
    return result


def _schedule_tokens(point: Point) -> float:
    value = point.choice.cell.measures["tokens"] if point.choice else math.nan
    return value if value > 0 else math.nan


def _losses_at(point: Point, curves: dict[str, pd.DataFrame], tokens: float) -> Array:
    """One loss per seed of the chosen cell whose curve reaches round `tokens`."""
    cell = point.choice.cell if point.choice else None
    losses = []
    for name, final in zip(cell.replicate_ids, cell.losses, strict=True) if cell else ():
        if tokens >= _schedule_tokens(point) * (1 - 1e-9):
            losses.append(float(final))
        elif name in curves:
            losses.append(interpolate_loss(curves[name], tokens))
    return np.array([loss for loss in losses if math.isfinite(loss)])


def interpolate_loss(curve: pd.DataFrame, tokens: float) -> float:
    """Validation loss at `tokens`, linear in log tokens; NaN outside the evaluated range."""
    x = curve["tokens"].to_numpy(dtype=float)
    y = curve["val_loss_nats"].to_numpy(dtype=float)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    if len(x) == 0 or x[0] <= 0 or not x[0] <= tokens <= x[-1]:
        return math.nan
    return float(np.interp(math.log(tokens), np.log(x), y))
