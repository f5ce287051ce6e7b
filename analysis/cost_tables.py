"""Tables on costs beside speed, equal budgets and context length, and all tables as files."""

import math

from analysis.budgets import matched_losses
from analysis.csvtext import Row, csv_text, ends
from analysis.scaling import (
    RECALL_COLUMNS,
    build_families,
    exponent,
    find_crossovers,
    growth_percent,
)
from analysis.study import Study
from analysis.tables import OPTIONAL_TABLES, TABLES
from analysis.tradeoffs import trade_offs

TRADE_OFF_COLUMNS = (
    "arm_id",
    "quantity",
    "value",
    "val_loss_nats_mean",
    "on_front",
    "label",
    "group",
)


def trade_off_rows(study: Study) -> list[Row]:
    """One row per arm and cost beside training speed."""
    return [
        {
            "arm_id": point.arm.arm_id,
            "quantity": trade.cost.column,
            "value": value,
            "val_loss_nats_mean": point.loss,
            "on_front": point.arm.arm_id in trade.on_front,
            "label": point.arm.label,
            "group": part.name,
        }
        for part in study.comparables
        for trade in trade_offs(part)
        for point, value in zip(trade.points, trade.values, strict=True)
    ]


MATCHED_COLUMNS = (
    "arm_id",
    "budget",
    "amount",
    "tokens",
    "share_of_schedule",
    "val_loss_nats_mean",
    "val_loss_nats_low",
    "val_loss_nats_high",
    "label",
    "group",
)


def matched_rows(study: Study) -> list[Row]:
    """One row per arm and budget: its loss at a cost that it shares with the others."""
    return [
        {
            "arm_id": match.arm.arm_id,
            "budget": match.budget,
            "amount": match.amount,
            "tokens": match.tokens,
            "share_of_schedule": match.share,
            "val_loss_nats_mean": match.loss,
            **ends("val_loss_nats", match.interval),
            "label": match.arm.label,
            "group": part.name,
        }
        for part in study.comparables
        for match in matched_losses(part.points, study.sweep.curves)
    ]


SCALING_COLUMNS = (
    "label",
    "seq_len",
    "n_seeds",
    "tokens_per_second_mean",
    "seconds_per_sequence",
    "local_exponent",
    "overall_exponent",
    "time_growth_percent",
    "peak_memory_bytes_mean",
    "decode_tokens_per_second_mean",
    "held_bytes_mean",
    *RECALL_COLUMNS,
    "state",
)


def scaling_rows(study: Study) -> list[Row]:
    """One row per family and context length; growth of the time per token over the shortest."""
    rows: list[Row] = []
    for family in build_families(study.sweep.trials):
        seconds = family.seconds
        per_token = seconds / family.lengths
        for i, length in enumerate(family.lengths):
            slope = (
                exponent(family.lengths[i - 1 : i + 1], seconds[i - 1 : i + 1]) if i else math.nan
            )
            rows.append(
                {
                    "label": family.label,
                    "seq_len": int(length),
                    "n_seeds": len(family.seeds),
                    "tokens_per_second_mean": float(family.speeds[i].mean()),
                    "seconds_per_sequence": float(seconds[i]),
                    "local_exponent": slope,
                    "overall_exponent": exponent(family.lengths, seconds),
                    "time_growth_percent": growth_percent(per_token[0], per_token[i]),
                    "peak_memory_bytes_mean": float(family.measures["peak_memory_bytes"][i]),
                    "decode_tokens_per_second_mean": float(
                        family.measures["decode_tokens_per_second"][i]
                    ),
                    "held_bytes_mean": float(family.measures["held_bytes"][i]),
                    **{name: float(family.measures[name][i]) for name in RECALL_COLUMNS},
                    "state": "measured",
                }
            )
        rows += [
            {"label": family.label, "seq_len": length, "state": "out of memory"}
            for length in family.out_of_memory
        ]
    return rows


CROSSOVER_COLUMNS = ("label", "overtakes", "seq_len", "seq_len_low", "seq_len_high", "words")


def crossover_rows(study: Study) -> list[Row]:
    """One row per family: the length from which on it trains faster than softmax."""
    return [
        {
            "label": found.first,
            "overtakes": found.second,
            "seq_len": found.length,
            "seq_len_low": found.low,
            "seq_len_high": found.high,
            "words": found.words,
        }
        for found in find_crossovers(build_families(study.sweep.trials))
    ]


COST_TABLES = {
    "trade_offs": (trade_off_rows, TRADE_OFF_COLUMNS),
    "matched": (matched_rows, MATCHED_COLUMNS),
    "scaling": (scaling_rows, SCALING_COLUMNS),
    "crossovers": (crossover_rows, CROSSOVER_COLUMNS),
}
"""Tables that are written where they have rows."""


def csv_tables(study: Study) -> dict[str, str]:
    """File name under `tables/` to its text."""
    texts = {
        f"{name}.csv": csv_text(make(study), columns) for name, (make, columns) in TABLES.items()
    }
    for name, (make, columns) in {**OPTIONAL_TABLES, **COST_TABLES}.items():
        rows = make(study)
        if rows:
            texts[f"{name}.csv"] = csv_text(rows, columns)
    return texts
