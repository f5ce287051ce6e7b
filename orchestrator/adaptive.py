"""Adaptive seeds: pairs are added where a named comparison is undecided.

    adaptive:
      effect: 0.01                  nats; smaller differences do not matter
      max_seeds: 16                 the budget of a cell
      comparisons:
        - first: {model.mixer: gated_deltanet, optimizer.lr: 3e-3}
          second: {model.mixer: deltanet, optimizer.lr: 3e-3}

Both cells of a comparison get the same new seeds, so that every difference is one of a pair. A
comparison is decided when its interval (`orchestrator.sequential`) excludes zero, or lies within
±effect, which an interval narrower than the effect always does one of. Nothing is stored: the looks
that were taken are taken again from the ledger, so a call that was interrupted goes on, and a
smaller effect or a larger budget adds to what is there.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.axes import shown
from orchestrator.cells import Cell
from orchestrator.config import AdaptiveConfig
from orchestrator.errors import ConfigError
from orchestrator.identity import replicate_id
from orchestrator.ledger import ReplicateState
from orchestrator.plan import Plan, planned_record
from orchestrator.sequential import AnytimeInterval, anytime_interval, half_width_sds

BETTER = "decided"
EQUAL = "no difference that matters"
OUT_OF_SEEDS = "undecided, and the seeds are used up"
WAITING = "undecided, more seeds are due"
DIVERGED = "not comparable by loss: a replicate diverged"
FAILED = "waits for a replicate that failed"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Where a comparison stands.

    Attributes:
        first: the cell whose loss comes first in the difference.
        second: the other one.
        label: both in the words of the sweep file.
        outcome: one of this module's constants.
        seeds: seeds that both cells need for the next look, or had at the last one.
        interval: first minus second, in nats; None before the first look.
    """

    first: Cell
    second: Cell
    label: str
    outcome: str
    seeds: list[int]
    interval: AnytimeInterval | None


def verdicts(plan: Plan, tried: Collection[str] = ()) -> list[Verdict]:
    """Every comparison, looked at as often as its results allow.

    Args:
        plan: of the sweep.
        tried: replicates that failed in this call and are not tried again.

    Raises:
        ConfigError: a comparison that does not name two cells, or a budget below `seeds`.
    """
    settings = plan.spec.adaptive
    assert settings is not None
    if settings.max_seeds < max(2, len(plan.spec.seeds)):
        raise ConfigError(
            f"adaptive.max_seeds={settings.max_seeds} must be at least the "
            f"{len(plan.spec.seeds)} seeds that every cell has"
        )
    found = []
    for number, comparison in enumerate(settings.comparisons):
        where = f"adaptive.comparisons[{number}]"
        first = _only_cell(plan, comparison.first, f"{where}.first")
        second = _only_cell(plan, comparison.second, f"{where}.second")
        if first.cell_id == second.cell_id:
            raise ConfigError(f"{where} compares the cell {shown(comparison.first)} with itself")
        label = f"{shown(comparison.first)} - {shown(comparison.second)}"
        found.append(_looked_at(plan, settings, (first, second), label, tried))
    return found


def _only_cell(plan: Plan, condition: dict[str, Any], where: str) -> Cell:
    cells = [
        cell
        for cell in plan.sweep.cells
        if all(
            _value(cell, path) in (wanted if isinstance(wanted, list) else [wanted])
            for path, wanted in condition.items()
        )
    ]
    if len(cells) != 1:
        raise ConfigError(
            f"{where}={shown(condition)} must be met by exactly one cell, but {len(cells)} meet "
            "it; name the value of every axis that tells them apart"
        )
    return cells[0]


def _value(cell: Cell, path: str) -> Any:
    if path in cell.assignment:
        return cell.assignment[path]
    node: Any = cell.values
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node.get("name") if isinstance(node, dict) else node


def _looked_at(
    plan: Plan,
    settings: AdaptiveConfig,
    pair: tuple[Cell, Cell],
    label: str,
    tried: Collection[str],
) -> Verdict:
    """Takes look after look, each with the seeds that it would have had."""
    seeds = _seed_order(plan.spec.seeds, settings.max_seeds)
    alpha = settings.alpha / len(settings.comparisons)
    count = len(plan.spec.seeds)
    interval: AnytimeInterval | None = None
    while True:
        names = [replicate_id(cell.cell_id, s) for cell in pair for s in seeds[:count]]
        states = plan.ledger.states(names)
        outcome = _obstacle(states, tried)
        if outcome is None:
            interval = anytime_interval(_differences(states, names), alpha)
            outcome = _decision(interval, settings.effect)
        if outcome is None and count >= settings.max_seeds:
            outcome = OUT_OF_SEEDS
        if outcome is not None:
            return Verdict(*pair, label, outcome, seeds[:count], interval)
        count = min(count + settings.batch, settings.max_seeds)


def _seed_order(seeds: list[int], most: int) -> list[int]:
    """The sweep's seeds, then the numbers after the largest of them."""
    return [*seeds, *range(max(seeds) + 1, max(seeds) + 1 + most - len(seeds))]


def _obstacle(states: dict[str, ReplicateState], tried: Collection[str]) -> str | None:
    """What keeps a comparison from being looked at."""
    if any(state.status == "diverged" for state in states.values()):
        return DIVERGED
    open_names = [name for name, state in states.items() if not state.is_result]
    if not open_names:
        return None
    return FAILED if all(name in tried for name in open_names) else WAITING


def _differences(states: dict[str, ReplicateState], names: list[str]) -> list[float]:
    losses = [float(states[name].end["val_loss_nats"]) for name in names]
    half = len(losses) // 2
    return [a - b for a, b in zip(losses[:half], losses[half:], strict=True)]


def _decision(interval: AnytimeInterval, effect: float) -> str | None:
    if interval.excludes_zero:
        return BETTER
    return EQUAL if interval.lies_within(effect) else None


def extended_seeds(plan: Plan, tried: Collection[str]) -> Plan:
    """The plan with the seeds that its comparisons need by now; reads only.

    Args:
        plan: of the sweep.
        tried: replicates that failed in this call and are not tried again.
    """
    desired = dict(plan.desired)
    for verdict in verdicts(plan, tried):
        for seed in verdict.seeds:
            for cell in (verdict.first, verdict.second):
                record = planned_record(plan.spec.name, cell, seed)
                desired.setdefault(record.replicate_id, record)
    return replace(
        plan,
        desired=desired,
        states=plan.ledger.states(desired),
        undesired=[name for name in plan.ledger.replicate_ids() if name not in desired],
    )


def comparison_lines(plan: Plan) -> list[str]:
    """Each comparison in words, and the smallest difference that its budget could show."""
    settings = plan.spec.adaptive
    assert settings is not None
    count = len(settings.comparisons)
    widest = half_width_sds(settings.max_seeds, settings.alpha / count)
    lines = []
    for verdict in verdicts(plan):
        interval = verdict.interval
        text = f"{verdict.label}: {verdict.outcome}"
        if interval is not None:
            text += (
                f"; {interval.mean:+.4f} nats ({interval.low:+.4f} to {interval.high:+.4f}) "
                f"from {interval.n} pairs"
            )
        if interval is not None and interval.n > 1:
            text += (
                f"; {settings.max_seeds} seeds could show {widest * interval.sd:.4f} nats, as the "
                f"differences spread by {interval.sd:.4f}"
            )
        lines.append(text)
    lines.append(
        f"{count} intervals that hold together and at every look with a chance of "
        f"{1 - settings.alpha:.0%}; with {settings.max_seeds} seeds the smallest difference that "
        f"they can show is {widest:.2f} standard deviations of a paired difference"
    )
    return lines


def comparisons_json(plan: Plan) -> list[dict[str, Any]]:
    """The same as JSON-ready objects; an end that is not known yet is null."""
    rows = []
    for verdict in verdicts(plan):
        interval = verdict.interval
        is_known = interval is not None and interval.low > -float("inf")
        rows.append(
            {
                "label": verdict.label,
                "first": verdict.first.cell_id,
                "second": verdict.second.cell_id,
                "outcome": verdict.outcome,
                "seeds": verdict.seeds,
                "pairs": interval.n if interval else 0,
                "mean_nats": interval.mean if interval else None,
                "low_nats": interval.low if interval and is_known else None,
                "high_nats": interval.high if interval and is_known else None,
            }
        )
    return rows
