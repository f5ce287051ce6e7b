"""Fronts of loss against what a model costs beside training time."""

import math
from dataclasses import dataclass

import numpy as np

from analysis.front import Point
from analysis.pareto import Directions, front_mask
from analysis.study import Comparable


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """A quantity that is traded against loss.

    Attributes:
        column: its name in the records.
        label: its name on an axis, with unit.
        is_bytes: whether it is written in bytes.
        is_better_large: whether more of it is better.
    """

    column: str
    label: str
    is_bytes: bool
    is_better_large: bool


COSTS = (
    Cost(
        column="peak_memory_bytes",
        label="peak training memory",
        is_bytes=True,
        is_better_large=False,
    ),
    Cost(
        column="state_bytes",
        label="recurrent state per sequence",
        is_bytes=True,
        is_better_large=False,
    ),
    Cost(
        column="kv_bytes_per_token",
        label="KV cache per token",
        is_bytes=True,
        is_better_large=False,
    ),
    Cost(
        column="decode_tokens_per_second",
        label="decoding, tokens/s",
        is_bytes=False,
        is_better_large=True,
    ),
    Cost(
        column="flops_per_token",
        label="training FLOPs per token",
        is_bytes=False,
        is_better_large=False,
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TradeOff:
    """Loss against one cost over the arms that have both.

    Attributes:
        cost: the quantity.
        points: the arms.
        values: their costs, in the order of `points`.
        on_front: arm ids on the front of loss and this cost.
    """

    cost: Cost
    points: tuple[Point, ...]
    values: tuple[float, ...]
    on_front: frozenset[str]

    @property
    def maximise(self) -> Directions:
        """Directions of cost and loss."""
        return self.cost.is_better_large, False


def trade_offs(part: Comparable) -> tuple[TradeOff, ...]:
    """One per cost that two arms or more have and that differs between them."""
    found = []
    for cost in COSTS:
        pairs = [
            (point, point.choice.cell.measures[cost.column])
            for point in part.points
            if point.choice and math.isfinite(point.choice.cell.measures[cost.column])
        ]
        values = tuple(value for _, value in pairs)
        if len(set(values)) < 2:
            continue
        points = tuple(point for point, _ in pairs)
        places = np.array([(v, p.loss) for p, v in pairs])
        members = front_mask(places, (cost.is_better_large, False))
        ids = frozenset(p.arm.arm_id for p, member in zip(points, members, strict=True) if member)
        found.append(TradeOff(cost=cost, points=points, values=values, on_front=ids))
    return tuple(found)
