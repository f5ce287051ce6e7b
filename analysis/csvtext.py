"""Rows as CSV with every digit, values as JSON that is the same every time."""

import csv
import io
import json
import math
from collections.abc import Sequence
from typing import Any

from analysis.stats import Interval
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
