"""Cells and arms: the replicates of one configuration, and the cells that differ in rates only."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from analysis.naming import describe_arms, name_arms
from analysis.stats import Array

MEASURES = (
    "peak_memory_bytes",
    "state_bytes",
    "kv_bytes_per_token",
    "decode_tokens_per_second",
    "flops_per_token",
    "params_total",
    "params_non_embedding",
    "device_seconds",
    "tokens",
)
"""Quantities of an arm beside loss and speed; averaged over the seeds that have them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One configuration with its rates, over its seeds.

    Attributes:
        cell_id: its id.
        arm_id: the arm it belongs to.
        lr: peak learning rate.
        adam_lr: peak rate of the Adam group; NaN where there is one group.
        seeds: seeds with a finite loss, ascending.
        losses: nats per token, one per seed.
        speeds: tokens per second, one per seed; NaN where not measured.
        replicate_ids: one per seed.
        measures: mean of each of `MEASURES` over the seeds; NaN where not measured.
        num_desired: replicates that the sweep asks for and that have a row.
        num_diverged: of these, diverged.
        num_failed: of these, failed.
        diverged_ids: replicates that diverged.
        diverged_speeds: their mean speed; NaN where not measured.
    """

    cell_id: str
    arm_id: str
    lr: float
    adam_lr: float
    seeds: tuple[int, ...]
    losses: Array
    speeds: Array
    replicate_ids: tuple[str, ...]
    measures: dict[str, float]
    num_desired: int
    num_diverged: int
    num_failed: int
    diverged_ids: tuple[str, ...]
    diverged_speeds: float

    @property
    def n(self) -> int:
        """Seeds with a finite loss."""
        return len(self.seeds)

    @property
    def num_ended(self) -> int:
        """Replicates that trained to an end, finite or not: the n of k/n diverged."""
        return self.n + self.num_diverged

    @property
    def is_eligible(self) -> bool:
        """Whether it may be chosen and stand on a front: some loss, and no seed diverged."""
        return self.n > 0 and self.num_diverged == 0

    @property
    def mean_loss(self) -> float:
        """Mean over the seeds; NaN without any."""
        return float(self.losses.mean()) if self.n else math.nan

    @property
    def mean_speed(self) -> float:
        """Mean over the seeds that were measured; NaN without any."""
        return nan_mean(self.speeds)

    def at(self, seeds: tuple[int, ...], values: Array) -> Array:
        """`values` (one per own seed) in the order of `seeds`, all of which it must have."""
        position = {seed: index for index, seed in enumerate(self.seeds)}
        return values[[position[seed] for seed in seeds]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One configuration without its rates: what a learning rate is chosen for.

    Attributes:
        arm_id: its id.
        label: its name for people, distinct within its comparison.
        facts: the first value of every column that describes it.
        cells: ascending in `adam_lr`, then `lr`.
    """

    arm_id: str
    label: str
    facts: dict[str, Any]
    cells: tuple[Cell, ...]

    @property
    def num_diverged(self) -> int:
        """Diverged replicates over all cells."""
        return sum(cell.num_diverged for cell in self.cells)

    @property
    def num_ended(self) -> int:
        """Replicates over all cells that trained to an end."""
        return sum(cell.num_ended for cell in self.cells)

    def fact(self, name: str) -> str:
        """A descriptive column as text; empty where it is null."""
        value = self.facts.get(name)
        return "" if value is None or pd.isna(value) else str(value)


def nan_mean(values: Array) -> float:
    """Mean of the finite values; NaN without any, and without a warning."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan


def build_arms(trials: pd.DataFrame) -> tuple[Arm, ...]:
    """The arms of one comparison, in the order in which their configurations first appear.

    Args:
        trials: rows of one group of `Sweep.trials`.
    """
    firsts = describe_arms(trials)
    labels = name_arms(firsts)
    rows = {str(row["arm_id"]): row.to_dict() for _, row in firsts.iterrows()}
    # Each seed starts from a loss of its own, and the first row may not have begun.
    for arm_id, start in trials.groupby("arm_id")["init_loss_nats"].mean().items():
        rows[str(arm_id)]["init_loss_nats"] = float(start)
    # Plain arrays: selecting rows of a frame for each of thousands of cells takes a minute.
    columns = {str(name): trials[name].to_numpy() for name in (*CELL_COLUMNS, *MEASURES)}
    cells: dict[str, list[Cell]] = {arm_id: [] for arm_id in rows}
    for members in trials.groupby("cell_id", sort=False).indices.values():
        cell = _build_cell({name: values[members] for name, values in columns.items()})
        cells[cell.arm_id].append(cell)
    arms = []
    for arm_id, own in cells.items():
        own.sort(key=lambda c: (-1.0 if math.isnan(c.adam_lr) else c.adam_lr, c.lr, c.cell_id))
        facts = {str(key): value for key, value in rows[arm_id].items()}
        arms.append(Arm(arm_id=arm_id, label=labels[arm_id], facts=facts, cells=tuple(own)))
    return tuple(sorted(arms, key=_house_order))


CELL_COLUMNS = (
    "cell_id",
    "arm_id",
    "replicate_id",
    "seed",
    "state",
    "lr",
    "adam_lr",
    "val_loss_nats",
    "tokens_per_second",
)


def _build_cell(rows: dict[str, npt.NDArray[Any]]) -> Cell:
    state, names = rows["state"], rows["replicate_id"]
    blown = np.flatnonzero(state == "diverged")
    done = np.flatnonzero((state == "completed") & np.isfinite(rows["val_loss_nats"]))
    done = done[np.argsort(rows["seed"][done], kind="stable")]
    return Cell(
        cell_id=str(rows["cell_id"][0]),
        arm_id=str(rows["arm_id"][0]),
        lr=float(rows["lr"][0]),
        adam_lr=float(rows["adam_lr"][0]),
        seeds=tuple(int(seed) for seed in rows["seed"][done]),
        losses=rows["val_loss_nats"][done].astype(float),
        speeds=rows["tokens_per_second"][done].astype(float),
        replicate_ids=tuple(str(name) for name in names[done]),
        measures={name: nan_mean(rows[name][done].astype(float)) for name in MEASURES},
        num_desired=len(state),
        num_diverged=len(blown),
        num_failed=int((state == "failed").sum()),
        diverged_ids=tuple(sorted(str(name) for name in names[blown])),
        diverged_speeds=nan_mean(rows["tokens_per_second"][blown].astype(float)),
    )


MIXER_ORDER = (
    "softmax",
    "linear",
    "linear_unnormalized",
    "gated_linear",
    "deltanet",
    "gated_deltanet",
    "kimi_delta",
    "gated_deltanet2",
)
"""From the oldest memory rule to the youngest; others follow by name."""


def mixer_rank(mixer: str) -> tuple[int, str]:
    """Key that sorts memory rules in one order in every figure and table."""
    known = MIXER_ORDER.index(mixer) if mixer in MIXER_ORDER else len(MIXER_ORDER)
    return known, mixer


def _house_order(arm: Arm) -> tuple[Any, ...]:
    stack, length = arm.fact("stack"), arm.fact("seq_len")
    return (
        mixer_rank(arm.fact("mixer")),
        (stack != "pure", stack),
        arm.fact("optimizer"),
        float(length) if length else 0.0,
        arm.label,
    )
