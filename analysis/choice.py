"""The learning rate of an arm: which, how sure, and whether the grid reached round it."""

import math
from dataclasses import dataclass

import numpy as np

from analysis import learning_rate as lr
from analysis.arms import Arm, Cell
from analysis.resampling import MAX_EXACT_SEEDS, resample_weights
from analysis.stats import Array, Interval, mean_interval

TOLERANCE_NATS = 0.05
"""Margin of the tolerance width: rates within this of the best are as good for practice."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sensitivity:
    """How much a wrong rate costs.

    Attributes:
        mean: nats; mean capped loss over the rates minus the smallest, averaged over seeds.
        interval: its t interval over seeds; none below two.
        rule: `grid mean` for rates at equal ratios, else `trapezoid`.
        low: smallest rate of the range.
        high: largest rate of the range.
    """

    mean: float
    interval: Interval | None
    rule: str
    low: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The cell that an arm is judged by.

    Attributes:
        cell: the chosen cell.
        edge: why its rate is not shown to be the optimum; empty where it is bracketed.
        naive: mean loss of the chosen cell over the common seeds, which its choosing biased low.
        held_out: loss with the rate chosen without the seed that is scored; none below two seeds.
        probabilities: cell id to the share of seed draws that choose it; empty below two seeds.
        vertex: interpolated optimum along the rate; none at an edge.
        tolerance: rates within `TOLERANCE_NATS` of the best; none for one rate.
        sensitivity: none for fewer than two rates or without the loss at initialisation.
        common_seeds: seeds that all eligible cells have.
        is_balanced: whether the eligible cells have the same seeds.
    """

    cell: Cell
    edge: str
    naive: float
    held_out: float | None
    probabilities: dict[str, float]
    vertex: lr.Vertex | None
    tolerance: tuple[float, float] | None
    sensitivity: Sensitivity | None
    common_seeds: tuple[int, ...]
    is_balanced: bool

    @property
    def selection_effect(self) -> float | None:
        """Held-out loss minus the naive mean: what choosing on the same seeds flatters."""
        return None if self.held_out is None else self.held_out - self.naive


def choose(arm: Arm) -> Choice | None:
    """The cell of `arm` with the smallest mean loss over seeds; none if none is eligible.

    A cell with a diverged seed is not eligible. Where cells have different seeds their means are
    cleared of the seeds' own effect first, so that an easy seed decides nothing.
    """
    eligible = [cell for cell in arm.cells if cell.is_eligible]
    if not eligible:
        return None
    seeds = sorted({seed for cell in eligible for seed in cell.seeds})
    table = np.full((len(eligible), len(seeds)), math.nan)
    for row, cell in enumerate(eligible):
        table[row, [seeds.index(seed) for seed in cell.seeds]] = cell.losses
    chosen = eligible[lr.argmin_first(lr.adjusted_means(table))]
    complete = np.isfinite(table).all(axis=0)
    common = tuple(seed for seed, everywhere in zip(seeds, complete, strict=True) if everywhere)
    shared = table[:, complete]
    line = _line_through(arm, chosen)
    return Choice(
        cell=chosen,
        edge=_edge(arm, chosen),
        naive=float(shared.mean(axis=1).min()) if common else chosen.mean_loss,
        held_out=lr.leave_one_seed_out(shared) if len(common) > 1 else None,
        probabilities=_probabilities(eligible, shared),
        vertex=_vertex(line),
        tolerance=_tolerance(line, _ceiling(arm)),
        sensitivity=_sensitivity(line, _ceiling(arm)),
        common_seeds=common,
        is_balanced=len(common) == len(seeds),
    )


def _probabilities(cells: list[Cell], shared: Array) -> dict[str, float]:
    n = shared.shape[1]
    if not 2 <= n <= MAX_EXACT_SEEDS:
        return {}
    weights, probabilities = resample_weights(n)
    shares = lr.choice_probability(weights @ shared.T / n, probabilities)
    return {cell.cell_id: float(share) for cell, share in zip(cells, shares, strict=True)}


def _same(first: float, second: float) -> bool:
    return first == second or (math.isnan(first) and math.isnan(second))


def _line_through(arm: Arm, chosen: Cell) -> list[Cell]:
    """Cells along the rate through the chosen one, by ascending rate.

    Where every rate has an Adam rate of its own the two move together, and that is the line;
    where they form a grid, the line keeps the chosen Adam rate.
    """
    if len({cell.lr for cell in arm.cells}) == len(arm.cells):
        line = list(arm.cells)
    else:
        line = [cell for cell in arm.cells if _same(cell.adam_lr, chosen.adam_lr)]
    return sorted(line, key=lambda cell: cell.lr)


def _edge(arm: Arm, chosen: Cell) -> str:
    reason = _edge_along(_line_through(arm, chosen), chosen)
    rates = {cell.lr for cell in arm.cells}
    if reason or len(rates) == len(arm.cells):
        return reason
    across = [cell for cell in arm.cells if cell.lr == chosen.lr]
    across.sort(key=lambda cell: cell.adam_lr)
    if len(across) < 2:
        return reason
    other = _edge_along(across, chosen)
    return f"Adam rate {other}" if other else ""


def _edge_along(line: list[Cell], chosen: Cell) -> str:
    if len(line) == 1:
        return "only one rate tried"
    at = line.index(chosen)
    if at == 0:
        return "at the lowest rate tried"
    if at == len(line) - 1:
        return "at the highest rate tried"
    # A neighbour that diverged was tried and is worse; one without a result leaves a gap.
    gaps = [line[i] for i in (at - 1, at + 1) if line[i].n == 0 and line[i].num_diverged == 0]
    return f"neighbouring rate {gaps[0].lr:g} has no result" if gaps else ""


def _mean_losses(line: list[Cell]) -> tuple[Array, Array]:
    """Positive rates with their mean loss; infinite where a seed diverged or nothing came out."""
    cells = [cell for cell in line if cell.lr > 0 and (cell.n or cell.num_diverged)]
    rates = np.array([cell.lr for cell in cells])
    return rates, np.array([c.mean_loss if c.is_eligible else math.inf for c in cells])


def _vertex(line: list[Cell]) -> lr.Vertex | None:
    rates, losses = _mean_losses(line)
    return lr.interpolated_optimum(rates, losses) if np.isfinite(losses).any() else None


def _tolerance(line: list[Cell], ceiling: float) -> tuple[float, float] | None:
    rates, losses = _mean_losses(line)
    if len(rates) < 2 or not np.isfinite(losses).any():
        return None
    limit = ceiling if math.isfinite(ceiling) else math.inf
    return lr.tolerance_interval(rates, losses, TOLERANCE_NATS, limit)


def _ceiling(arm: Arm) -> float:
    value = arm.facts.get("init_loss_nats")
    return math.nan if value is None else float(value)


def _sensitivity(line: list[Cell], ceiling: float) -> Sensitivity | None:
    cells = [cell for cell in line if cell.lr > 0 and cell.num_ended]
    seeds = sorted({seed for cell in cells for seed in cell.seeds})
    if len(cells) < 2 or not math.isfinite(ceiling) or not seeds:
        return None
    rates = np.array([cell.lr for cell in cells])
    is_grid = lr.has_equal_ratios(rates)
    values = []
    for seed in seeds:
        losses = np.full(len(cells), math.inf)
        for index, cell in enumerate(cells):
            if seed in cell.seeds:
                losses[index] = cell.losses[cell.seeds.index(seed)]
            elif not cell.num_diverged:
                break
        else:
            # Only seeds that every rate has tried: a seed that a cell lacks for another reason
            # than divergence says nothing about it.
            values.append(
                lr.sensitivity_grid(losses, ceiling)
                if is_grid
                else lr.sensitivity_trapezoid(rates, losses, ceiling)
            )
    if not values:
        return None
    return Sensitivity(
        mean=float(np.mean(values)),
        interval=mean_interval(np.array(values)),
        rule="grid mean" if is_grid else "trapezoid",
        low=float(rates[0]),
        high=float(rates[-1]),
    )
