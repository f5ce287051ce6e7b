"""The report's tables: as CSV with every digit, as Markdown and LaTeX for reading."""

from collections.abc import Callable, Sequence

from analysis.arms import Arm
from analysis.choice_tables import CELL_COLUMNS, CHOICE_COLUMNS, cell_rows, choice_rows
from analysis.comparison import ArmDifference
from analysis.csvtext import Row, ends
from analysis.front import seed_points
from analysis.pareto import attainment_surface
from analysis.study import Study

FRONT_COLUMNS = (
    "arm_id",
    "cell_id",
    "n_seeds",
    "val_loss_nats_mean",
    "tokens_per_second_mean",
    "on_front",
    "front_probability",
    "label",
    "group",
    "lr",
    "adam_lr",
    "val_loss_nats_low",
    "val_loss_nats_high",
    "tokens_per_second_low",
    "tokens_per_second_high",
    "n_diverged",
    "n_ended",
    "left_out",
    "against_best",
)


def front_rows(study: Study) -> list[Row]:
    """One row per arm at its chosen rate."""
    return [
        {
            "arm_id": point.arm.arm_id,
            "cell_id": point.choice.cell.cell_id if point.choice else None,
            "n_seeds": point.n,
            "val_loss_nats_mean": point.loss,
            "tokens_per_second_mean": point.speed,
            "on_front": point.on_front,
            "front_probability": point.front_probability,
            "label": point.arm.label,
            "group": part.name,
            "lr": point.choice.cell.lr if point.choice else None,
            "adam_lr": point.choice.cell.adam_lr if point.choice else None,
            **ends("val_loss_nats", point.loss_interval),
            **ends("tokens_per_second", point.speed_interval),
            "n_diverged": point.arm.num_diverged,
            "n_ended": point.arm.num_ended,
            "left_out": point.left_out,
            "against_best": part.against_best.get(point.arm.arm_id),
        }
        for part in study.comparables
        for point in part.points
    ]


DIFFERENCE_COLUMNS = (
    "arm_id",
    "baseline_arm_id",
    "label",
    "baseline",
    "group",
    "difference_nats",
    "difference_low",
    "difference_high",
    "simultaneous_low",
    "simultaneous_high",
    "pairs",
    "method",
    "df",
    "t",
    "p",
    "p_holm",
    "p_benjamini_hochberg",
    "margin_nats",
    "p_equivalence",
    "verdict",
    "speed_ratio",
    "speed_ratio_low",
    "speed_ratio_high",
)


def difference_rows(study: Study) -> list[Row]:
    """One row per arm beside the baseline."""
    return [
        _difference_row(entry, part.comparison.baseline, part.name, part.comparison.margin_nats)
        for part in study.comparables
        if part.comparison
        for entry in part.comparison.rows
    ]


def routing_delta_rows(study: Study) -> list[Row]:
    """One row per arm with cross-layer routing beside its twin without."""
    margin = study.settings.margin_nats
    return [
        _difference_row(delta.difference, delta.twin.arm, part.name, margin)
        for part in study.comparables
        for delta in part.routing
    ]


def _difference_row(entry: ArmDifference, baseline: Arm, group: str, margin_nats: float) -> Row:
    row: Row = {
        "arm_id": entry.arm.arm_id,
        "baseline_arm_id": baseline.arm_id,
        "label": entry.arm.label,
        "baseline": baseline.label,
        "group": group,
        "difference_nats": entry.loss_gap,
        "pairs": entry.pairs,
        "method": "not tested",
        "p_holm": entry.p_holm,
        "p_benjamini_hochberg": entry.p_bh,
        "margin_nats": margin_nats,
        "p_equivalence": entry.p_equivalence,
        "verdict": entry.verdict,
    }
    if entry.loss:
        row |= {
            "difference_low": entry.loss.low,
            "difference_high": entry.loss.high,
            "simultaneous_low": entry.simultaneous[0] if entry.simultaneous else None,
            "simultaneous_high": entry.simultaneous[1] if entry.simultaneous else None,
            "method": entry.loss.method,
            "df": entry.loss.df,
            "t": entry.loss.t,
            "p": entry.loss.p,
        }
    if entry.speed_ratio:
        row |= {"speed_ratio": entry.speed_ratio.mean, **ends("speed_ratio", entry.speed_ratio)}
    return row


ATTAINMENT_LEVELS = (0.25, 0.5, 0.75, 0.9)


def attainment_rows(study: Study) -> list[Row]:
    """Corners of the boundaries that a share of the seeds reach, by share and throughput."""
    return [
        {"share": level, "tokens_per_second": x, "val_loss_nats": y, "group": part.name}
        for part in study.comparables
        if len(part.front_seeds) > 1
        for level in ATTAINMENT_LEVELS
        for x, y in attainment_surface(seed_points(part.points, part.front_seeds), level).tolist()
    ]


def accounting_rows(study: Study) -> list[Row]:
    """One row per state."""
    return [{"state": state, "replicates": count} for state, count in study.sweep.accounting.rows()]


TABLES: dict[str, tuple[Callable[[Study], list[Row]], Sequence[str]]] = {
    "front": (front_rows, FRONT_COLUMNS),
    "accounting": (accounting_rows, ("state", "replicates")),
    "lr_choice": (choice_rows, CHOICE_COLUMNS),
    "cells": (cell_rows, CELL_COLUMNS),
    "differences": (difference_rows, DIFFERENCE_COLUMNS),
}
"""Name of the file to what makes its rows, and its columns in order; always written."""

OPTIONAL_TABLES: dict[str, tuple[Callable[[Study], list[Row]], Sequence[str]]] = {
    "routing": (routing_delta_rows, DIFFERENCE_COLUMNS),
    "attainment": (attainment_rows, ("share", "tokens_per_second", "val_loss_nats", "group")),
}
"""The same, written where there are rows."""
