"""The report's tables: as CSV with every digit, as Markdown and LaTeX for reading."""

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

from analysis.stats import Interval
from analysis.study import Comparable, Point, Study
from analysis.wording import BAR_SEEDS

Row = dict[str, Any]


def csv_text(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as CSV; null, NaN and none are empty, numbers keep every digit."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        writer.writerow([_field(row.get(column)) for column in columns])
    return buffer.getvalue()


def _field(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return repr(float(value)) if isinstance(value, float) else str(value)


def ends(name: str, interval: Interval | None) -> Row:
    """The ends of a drawn interval; none where too few seeds make it."""
    if interval is None or interval.n < BAR_SEEDS:
        return {}
    return {f"{name}_low": interval.low, f"{name}_high": interval.high}


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
        }
        for part in study.comparables
        for point in part.points
    ]


CHOICE_COLUMNS = (
    "arm_id",
    "cell_id",
    "label",
    "group",
    "lr",
    "adam_lr",
    "rates_tried",
    "edge",
    "choice_probability",
    "naive_loss_nats",
    "held_out_loss_nats",
    "selection_effect_nats",
    "interpolated_lr",
    "interpolated_loss_nats",
    "tolerance_lr_low",
    "tolerance_lr_high",
    "tolerance_decades",
    "sensitivity_nats",
    "sensitivity_low",
    "sensitivity_high",
    "sensitivity_rule",
    "sensitivity_lr_low",
    "sensitivity_lr_high",
)


def _choice_row(part: Comparable, point: Point) -> Row:
    row: Row = {
        "arm_id": point.arm.arm_id,
        "label": point.arm.label,
        "group": part.name,
        "rates_tried": len(point.arm.cells),
    }
    choice = point.choice
    if choice is None:
        return row | {"edge": point.left_out}
    row |= {
        "cell_id": choice.cell.cell_id,
        "lr": choice.cell.lr,
        "adam_lr": choice.cell.adam_lr,
        "edge": choice.edge,
        "choice_probability": choice.probabilities.get(choice.cell.cell_id),
        "naive_loss_nats": choice.naive,
        "held_out_loss_nats": choice.held_out,
        "selection_effect_nats": choice.selection_effect,
    }
    if choice.vertex:
        row |= {
            "interpolated_lr": choice.vertex.lr,
            "interpolated_loss_nats": choice.vertex.loss,
        }
    if choice.tolerance:
        low, high = choice.tolerance
        row |= {
            "tolerance_lr_low": low,
            "tolerance_lr_high": high,
            "tolerance_decades": math.log10(high / low),
        }
    if choice.sensitivity:
        row |= {
            "sensitivity_nats": choice.sensitivity.mean,
            **ends("sensitivity", choice.sensitivity.interval),
            "sensitivity_rule": choice.sensitivity.rule,
            "sensitivity_lr_low": choice.sensitivity.low,
            "sensitivity_lr_high": choice.sensitivity.high,
        }
    return row


def choice_rows(study: Study) -> list[Row]:
    """One row per arm: the rate it is judged at and how sure the choice is."""
    return [_choice_row(part, point) for part in study.comparables for point in part.points]


CELL_COLUMNS = (
    "arm_id",
    "cell_id",
    "label",
    "group",
    "lr",
    "adam_lr",
    "n_seeds",
    "n_diverged",
    "n_failed",
    "n_desired",
    "val_loss_nats_mean",
    "val_loss_nats_sd",
    "tokens_per_second_mean",
    "is_chosen",
    "choice_probability",
)


def cell_rows(study: Study) -> list[Row]:
    """One row per cell, also those that were not chosen."""
    rows = []
    for part in study.comparables:
        for point in part.points:
            choice = point.choice
            for cell in point.arm.cells:
                share = choice.probabilities.get(cell.cell_id) if choice else None
                rows.append(
                    {
                        "arm_id": cell.arm_id,
                        "cell_id": cell.cell_id,
                        "label": point.arm.label,
                        "group": part.name,
                        "lr": cell.lr,
                        "adam_lr": cell.adam_lr,
                        "n_seeds": cell.n,
                        "n_diverged": cell.num_diverged,
                        "n_failed": cell.num_failed,
                        "n_desired": cell.num_desired,
                        "val_loss_nats_mean": cell.mean_loss,
                        "val_loss_nats_sd": float(cell.losses.std(ddof=1)) if cell.n > 1 else None,
                        "tokens_per_second_mean": cell.mean_speed,
                        "is_chosen": choice is not None and cell.cell_id == choice.cell.cell_id,
                        "choice_probability": share,
                    }
                )
    return rows


DIFFERENCE_COLUMNS = (
    "arm_id",
    "baseline_arm_id",
    "label",
    "baseline",
    "group",
    "difference_nats",
    "difference_low",
    "difference_high",
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
    rows = []
    for part in study.comparables:
        comparison = part.comparison
        for entry in comparison.rows if comparison else ():
            row: Row = {
                "arm_id": entry.arm.arm_id,
                "baseline_arm_id": comparison.baseline.arm_id if comparison else None,
                "label": entry.arm.label,
                "baseline": comparison.baseline.label if comparison else None,
                "group": part.name,
                "difference_nats": entry.loss_gap,
                "pairs": entry.pairs,
                "method": "not tested",
                "p_holm": entry.p_holm,
                "p_benjamini_hochberg": entry.p_bh,
                "margin_nats": comparison.margin_nats if comparison else None,
                "p_equivalence": entry.p_equivalence,
                "verdict": entry.verdict,
            }
            if entry.loss:
                row |= {
                    "difference_low": entry.loss.low,
                    "difference_high": entry.loss.high,
                    "method": entry.loss.method,
                    "df": entry.loss.df,
                    "t": entry.loss.t,
                    "p": entry.loss.p,
                }
            if entry.speed_ratio:
                row |= {"speed_ratio": entry.speed_ratio.mean}
                row |= ends("speed_ratio", entry.speed_ratio)
            rows.append(row)
    return rows


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
"""Name of the file to what makes its rows, and its columns in order."""


def json_text(value: Any) -> str:
    """JSON that is the same every time; NaN and infinity become null."""
    return json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
