"""What may stand in one comparison: equal budgets, data, evaluation sets and devices, or none."""

import json
from typing import Any

import pandas as pd

MATCHED = ("tokens", "seq_len", "data_id", "eval_id", "device_name", "precision", "threads")
"""Columns in which the completed replicates of one comparison must agree."""

MATCHED_DEVICE = ("device_name", "precision", "threads")
"""The same where only speed is measured."""

PATH_COLUMNS = {
    "budget.tokens": "tokens",
    "batch.tokens": "batch_tokens",
    "model.mixer": "mixer",
    "model.mixer.name": "mixer",
    "model.stack": "stack",
    "optimizer.name": "optimizer",
    "data": "data_id",
    "data.name": "data_id",
}
"""Configuration paths that have a column of another name."""


def assign_groups(trials: pd.DataFrame, compare_within: tuple[str, ...]) -> "pd.Series[str]":
    """Name of the comparison that each row belongs to, such as `seq_len=4096`.

    Raises:
        ValueError: an axis that is neither a column nor a path of the configurations.
    """
    if not compare_within:
        return pd.Series("", index=trials.index)
    names = [
        _axis(trials, path).map(lambda v, p=path: f"{p}={_text(v)}") for path in compare_within
    ]
    return pd.concat(names, axis=1).agg(", ".join, axis=1)


def _axis(trials: pd.DataFrame, path: str) -> "pd.Series[Any]":
    column = PATH_COLUMNS.get(path, path)
    if column in trials and trials[column].notna().any():
        return trials[column]
    values = trials["config_json"].map(lambda text: _lookup(text, path))
    if values.isna().all():
        raise ValueError(
            f"compare_within={path!r} is neither a column of the records nor a path of their "
            "configurations"
        )
    return values


def _lookup(config_json: str | None, path: str) -> Any:
    if not config_json:
        return None
    try:
        value = json.loads(config_json)
    except ValueError:
        return None
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return None
        value = value[key]
    return json.dumps(value) if isinstance(value, dict | list) else value


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and abs(value) < 1e6 else _whole(value)


def _whole(value: Any) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def check_matched(trials: pd.DataFrame, matched: tuple[str, ...] = MATCHED) -> None:
    """Refuses comparisons whose completed replicates differ in one of `matched`.

    Raises:
        ValueError: names the column, its values and an example replicate of each.
    """
    completed = trials[trials["state"] == "completed"]
    for group, rows in completed.groupby("group", sort=False):
        for column in matched:
            values = rows[column].dropna()
            if values.nunique() <= 1:
                continue
            place = f" within {group!s}" if group else ""
            raise ValueError(
                f"one comparison{place} mixes {column}: {_examples(rows, column)}; name the axis "
                "in compare_within or report the rows apart"
            )


def _examples(rows: pd.DataFrame, column: str, most: int = 4) -> str:
    parts = []
    groups = rows.dropna(subset=[column]).groupby(column, sort=True)
    for value, members in list(groups)[:most]:
        count = len(members)
        noun = "replicate" if count == 1 else "replicates"
        parts.append(f"{_whole(value)} ({count} {noun}, e.g. {members.iloc[0]['replicate_id']})")
    more = len(groups) - most
    return " and ".join(parts) + (f" and {more} more values" if more > 0 else "")
