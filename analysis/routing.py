"""What cross-layer routing changes: each arm with routing beside its twin without.

A twin has the same memory rule, stack, optimizer and whatever else names an arm, and no routing;
both stand at their own chosen learning rate. The family of comparisons is every pair of twins.
"""

import json
from dataclasses import dataclass
from typing import Any

from analysis.arms import Arm, Cell
from analysis.comparison import ArmDifference, compare_cells
from analysis.front import Point

TWIN_FACTS = (
    "mixer",
    "stack",
    "softmax_every",
    "dt_init",
    "optimizer",
    "optimizer_variant",
    "size",
    "match",
    "seq_len",
    "batch_tokens",
    "precision",
)
"""What twins share. Widths and parameters may differ, as `match` has it."""

FREE_KEYS = ("routing", "lr", "adam_lr", "seed", "ffn_dim")
"""Configuration keys in which twins may differ; `match` solves the feed-forward width."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingDelta:
    """One arm with routing against its twin.

    Attributes:
        point: the arm with routing.
        twin: the arm without.
        difference: loss of the former minus that of the latter, tested, with Holm's correction
            over all twins of the comparison.
    """

    point: Point
    twin: Point
    difference: ArmDifference


def routing_deltas(
    points: tuple[Point, ...], margin_nats: float, fixed_seeds: frozenset[int] | None = None
) -> tuple[RoutingDelta, ...]:
    """One per arm that routes and has one twin with a result; empty where nothing routes."""
    plain = [point for point in points if point.choice and not _routes(point.arm)]
    pairs = []
    for point in points:
        if point.choice is None or not _routes(point.arm):
            continue
        twins = [other for other in plain if _facts(other.arm) == _facts(point.arm)]
        if len(twins) > 1:
            twins = [other for other in twins if _config(other.arm) == _config(point.arm)]
        if len(twins) == 1:
            pairs.append((point, twins[0]))
    triples = [(point.arm, _cell(point), _cell(twin)) for point, twin in pairs]
    rows, _, _ = compare_cells(triples, margin_nats, fixed_seeds)
    return tuple(
        RoutingDelta(point=point, twin=twin, difference=row)
        for (point, twin), row in zip(pairs, rows, strict=True)
    )


def _cell(point: Point) -> Cell:
    assert point.choice is not None
    return point.choice.cell


def _routes(arm: Arm) -> bool:
    return arm.fact("routing") not in ("", "none")


def _facts(arm: Arm) -> tuple[str, ...]:
    return tuple(arm.fact(name) for name in TWIN_FACTS)


def _config(arm: Arm) -> Any:
    """The configuration without what twins may differ in; none where it is unreadable."""
    try:
        return _bare(json.loads(arm.fact("config_json") or "null"))
    except ValueError:
        return None


def _bare(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _bare(inner) for key, inner in value.items() if key not in FREE_KEYS}
    return value
