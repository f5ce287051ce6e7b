"""Rows of the tables on learning rates: one per arm, and one per cell."""

import math

import numpy as np

from analysis.csvtext import Row, ends
from analysis.front import Point
from analysis.learning_rate import expected_best
from analysis.study import Comparable, Study

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
    "expected_best_k",
    "expected_best_nats",
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
    row |= _expected_best(part, point)
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


def _expected_best(part: Comparable, point: Point) -> Row:
    """Expected smallest mean loss of as many rates as the least tuned arm had: equal effort.

    A rate at which a seed diverged counts as the loss at initialisation.
    """
    k = min(len(each.arm.cells) for each in part.points)
    ceiling = float(point.arm.facts["init_loss_nats"])
    losses = [cell.mean_loss if cell.is_eligible else ceiling for cell in point.arm.cells]
    if not all(math.isfinite(loss) for loss in losses):
        return {"expected_best_k": k}
    return {"expected_best_k": k, "expected_best_nats": expected_best(np.array(losses), k)}


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
