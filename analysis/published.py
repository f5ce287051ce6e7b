"""Published numbers beside a report's own: the same arms, their order and their relative speed.

Absolute losses depend on data, tokenizer, size and budget, so what is compared is what a claim of
the source is about: which arm is better, and by how much it is faster than another.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from analysis.front import Point
from analysis.pareto import front_mask
from analysis.study import Comparable
from analysis.wording import count_text, loss_text

KEYS = ("mixer", "stack", "optimizer")
"""What tells the arms of a published table apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedRow:
    """One published arm beside the one of a report.

    Attributes:
        point: the report's arm.
        published_loss_nats: its published final loss.
        published_speed: its published throughput, in any unit; NaN where not given.
    """

    point: Point
    published_loss_nats: float
    published_speed: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Agreement:
    """How far a report's arms are ordered as the published ones.

    Attributes:
        rows: the arms that both have.
        missing: published arms without one here, as text.
        loss_pairs: pairs of arms whose published losses differ.
        loss_agreed: of these, pairs in the same order here.
        speed_pairs: the same for throughput.
        speed_agreed: the same for throughput.
    """

    rows: tuple[PublishedRow, ...]
    missing: tuple[str, ...]
    loss_pairs: int
    loss_agreed: int
    speed_pairs: int
    speed_agreed: int


def read_published(path: Path, table: str) -> pd.DataFrame:
    """One table of a file of published numbers.

    Raises:
        ValueError: the file or the table is missing, or a row has other than the table's columns.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not readable as YAML: {reason}") from error
    tables = {k: v for k, v in (content or {}).items() if isinstance(v, dict) and "rows" in v}
    if table not in tables:
        raise ValueError(f"{path} has no table {table!r}; it has {', '.join(sorted(tables))}")
    columns, rows = tables[table]["columns"], tables[table]["rows"]
    for number, row in enumerate(rows, start=1):
        if len(row) != len(columns):
            raise ValueError(
                f"{path}: row {number} of {table} has {len(row)} values; {len(columns)} are needed"
            )
    return pd.DataFrame(rows, columns=columns)


def published_front(table: pd.DataFrame) -> list[tuple[str, str, str]]:
    """Mixer, stack and optimizer of the published arms on the front of speed and loss."""
    members = front_mask(table[["speed", "val_loss_nats"]].to_numpy(dtype=float))
    return [(row["mixer"], row["stack"], row["optimizer"]) for _, row in table[members].iterrows()]


def compare_with_published(part: Comparable, table: pd.DataFrame) -> Agreement:
    """The arms of `part` beside those of `table`, matched by mixer, stack and optimizer.

    Raises:
        ValueError: the table lacks one of these columns, or two arms of `part` match one row.
    """
    lacking = [name for name in (*KEYS, "val_loss_nats") if name not in table]
    if lacking:
        raise ValueError(f"the published table lacks {', '.join(lacking)}")
    own: dict[tuple[str, ...], Point] = {}
    for point in part.points:
        key = tuple(point.arm.fact(name) for name in KEYS)
        if key in own:
            raise ValueError(
                f"{own[key].arm.label} and {point.arm.label} both match the published "
                f"{' '.join(key)}; a comparison needs one arm per mixer, stack and optimizer"
            )
        own[key] = point
    rows, missing = [], []
    for _, row in table.iterrows():
        key = tuple(str(row[name]) for name in KEYS)
        match = own.get(key)
        if match is None or match.choice is None:
            missing.append(" ".join(key))
            continue
        rows.append(
            PublishedRow(
                point=match,
                published_loss_nats=float(row["val_loss_nats"]),
                published_speed=_speed(row),
            )
        )
    losses = np.array([(row.published_loss_nats, row.point.loss) for row in rows])
    speeds = np.array([(row.published_speed, row.point.speed) for row in rows])
    loss_pairs, loss_agreed = _agreement(losses)
    speed_pairs, speed_agreed = _agreement(speeds)
    return Agreement(
        rows=tuple(rows),
        missing=tuple(missing),
        loss_pairs=loss_pairs,
        loss_agreed=loss_agreed,
        speed_pairs=speed_pairs,
        speed_agreed=speed_agreed,
    )


def _speed(row: "pd.Series[Any]") -> float:
    for name in ("speed", "tokens_per_second"):
        if name in row and not pd.isna(row[name]):
            return float(row[name])
    return math.nan


def _agreement(pairs: np.ndarray) -> tuple[int, int]:
    """Pairs of rows that differ in the first column, and those in the same order in the second."""
    if len(pairs) == 0:
        return 0, 0
    pairs = pairs[np.isfinite(pairs).all(axis=1)]
    total = agreed = 0
    for i in range(len(pairs)):
        for j in range(i):
            first, second = pairs[i] - pairs[j]
            if first != 0:
                total += 1
                agreed += bool(np.sign(first) == np.sign(second))
    return total, agreed


PUBLISHED_HEADER = ("arm", "published loss", "loss here", "published speed", "tokens/s here")


def published_section(part: Comparable, reference: str) -> tuple[str, list[list[str]]]:
    """A sentence and the rows of a table that put `part` beside published numbers.

    Args:
        part: the comparison.
        reference: `PATH#TABLE`.

    Raises:
        ValueError: the reference has no table, or `read_published` refuses it.
    """
    path, mark, table = reference.partition("#")
    if not mark or not table:
        raise ValueError(f"published={reference!r} must be PATH#TABLE")
    agreement = compare_with_published(part, read_published(Path(path), table))
    rows = [
        [
            row.point.arm.label,
            f"{row.published_loss_nats:.4f}",
            loss_text(row.point.loss, row.point.loss_interval),
            "–" if math.isnan(row.published_speed) else f"{row.published_speed:g}",
            count_text(row.point.speed),
        ]
        for row in agreement.rows
    ]
    return agreement_sentence(agreement, f"the published {table}"), rows


def agreement_sentence(agreement: Agreement, source: str) -> str:
    """What the comparison shows, with its counts."""
    if len(agreement.rows) < 2:
        return f"Fewer than two arms of {source} are here, so no order can be compared."
    text = (
        f"{len(agreement.rows)} arms of {source} are here; {agreement.loss_agreed} of "
        f"{agreement.loss_pairs} pairs have their losses in the published order"
    )
    if agreement.speed_pairs:
        text += f", {agreement.speed_agreed} of {agreement.speed_pairs} their throughputs"
    return text + "."
