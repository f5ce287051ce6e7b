"""A frame of records made regular: every column with its kind, ids filled in, values in range."""

from collections.abc import Callable
from typing import Any, get_type_hints

import numpy as np
import pandas as pd

from orchestrator.records import STATUSES, TRIAL_COLUMNS, TrialRecord

NEEDED = ("seed", "lr", "status", "val_loss_nats")
"""Columns without which there is no loss to compare."""


ARM_COLUMNS = (
    "mixer",
    "stack",
    "softmax_every",
    "routing",
    "residual",
    "dt_init",
    "optimizer",
    "optimizer_variant",
    "size",
    "match",
    "seq_len",
    "batch_tokens",
    "precision",
)
"""What makes an arm where `arm_id` is missing: the configuration without its rates and its seed."""


POSITIVE = (
    "tokens_per_second",
    "step_seconds_median",
    "decode_tokens_per_second",
    "peak_memory_bytes",
    "device_seconds",
    "flops_per_token",
)
"""Quantities of which zero or less is no measurement."""


def _kinds(record: type[Any]) -> dict[str, str]:
    """Column to `flag`, `number` or `text`, from the record's annotations."""
    kinds = {}
    for name, hint in get_type_hints(record).items():
        members = getattr(hint, "__args__", (hint,))
        if bool in members:
            kinds[name] = "flag"
        else:
            kinds[name] = "number" if {int, float} & set(members) else "text"
    return kinds


def conform(
    frame: pd.DataFrame, record: type[Any], columns: tuple[str, ...], where: str
) -> pd.DataFrame:
    """All `columns` with their kinds; those that are missing are null."""
    kinds = _kinds(record)
    readers = {"number": _numbers, "flag": _flags, "text": _texts}
    result = pd.DataFrame(index=frame.index)
    for name in columns:
        values = frame[name] if name in frame else pd.Series(None, index=frame.index, dtype=object)
        nested = values[values.map(lambda value: isinstance(value, list | dict | np.ndarray))]
        if len(nested):
            raise ValueError(f"{where}: {name} in row {nested.index[0]} holds several values")
        result[name] = readers[kinds[name]](values, f"{where}: {name}")
    return result


WRITTEN_INFINITY = 1e300
"""Stores without infinities, MLflow's among them, write them as ±1.797e308."""


def _numbers(values: "pd.Series[Any]", where: str) -> "pd.Series[float]":
    numbers = pd.to_numeric(values, errors="coerce").astype(float)
    is_infinite = numbers.abs() >= WRITTEN_INFINITY
    numbers[is_infinite] = np.copysign(np.inf, numbers[is_infinite])
    bad = values[numbers.isna() & values.notna()]
    # Text such as "nan" is a number that is not one; anything else is a wrong column.
    bad = bad[bad.map(lambda value: str(value).strip().lower() != "nan")]
    if len(bad):
        raise ValueError(f"{where}={bad.tolist()[0]!r} in row {bad.index[0]} is not a number")
    return numbers


FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}


def _flags(values: "pd.Series[Any]", where: str) -> "pd.Series[Any]":
    found = values.map(lambda value: FLAGS.get(str(value).strip().lower()))
    bad = values[found.isna() & values.notna()]
    if len(bad):
        raise ValueError(f"{where}={bad.tolist()[0]!r} in row {bad.index[0]} must be true or false")
    return found.astype("boolean")


def _texts(values: "pd.Series[Any]", where: str) -> "pd.Series[Any]":
    del where
    return values.map(lambda value: None if pd.isna(value) else str(value)).astype(object)


def tidy(frame: pd.DataFrame, where: str, notes: list[str], *, has_losses: bool) -> pd.DataFrame:
    """One row per replicate with all of `TRIAL_COLUMNS` and `state`.

    Args:
        frame: what was read.
        where: the file's name, for errors.
        notes: gets a sentence on everything that is set aside or filled in.
        has_losses: whether completed replicates must have a finite loss to be used.

    Raises:
        ValueError: a column or value that cannot be used.
    """
    missing = [name for name in NEEDED if name not in frame]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; a comparison of losses needs them")
    if "arm_id" not in frame and "mixer" not in frame:
        raise ValueError(f"{where} has neither arm_id nor mixer: nothing says what was trained")
    if frame.empty:
        raise ValueError(f"{where} has no rows: the sweep has no replicates yet")
    trials = conform(frame.reset_index(drop=True), TrialRecord, TRIAL_COLUMNS, where)
    nameless = trials.index[trials["arm_id"].isna() & trials["mixer"].isna()]
    if len(nameless):
        raise ValueError(
            f"{where}: row {nameless[0]} has neither arm_id nor mixer; nothing says what it is"
        )
    _check_ranges(trials, where)
    _derive_ids(trials, notes)
    for keys in (["replicate_id"], ["cell_id", "seed"]):
        twice = trials[trials.duplicated(keys)]
        if len(twice):
            value = ", ".join(f"{key}={twice.iloc[0][key]}" for key in keys)
            raise ValueError(f"{where}: {value} appears twice; one row per replicate is needed")
    trials["state"] = trials["status"]
    # A sweep that only measures speed has no losses to be finite.
    blown = (trials["status"] == "completed") & ~np.isfinite(trials["val_loss_nats"])
    blown &= has_losses
    trials.loc[blown, "state"] = "diverged"
    if blown.any():
        notes.append(
            f"{replicates_text(blown)} completed without a finite validation loss; "
            "counted as diverged."
        )
    _unmeasure(trials, notes)
    _mention_mixtures(trials, notes)
    return trials


def _check_ranges(trials: pd.DataFrame, where: str) -> None:
    unknown = trials[~trials["status"].isin(STATUSES)]
    if len(unknown):
        raise ValueError(
            f"{where}: status={unknown.iloc[0]['status']!r} in row {unknown.index[0]} must be one "
            f"of {', '.join(STATUSES)}"
        )
    for name, rule in (("lr", "a finite number, at least 0"), ("seed", "a whole number")):
        values = trials[name]
        good = np.isfinite(values) & ((values >= 0) if name == "lr" else (values % 1 == 0))
        if not good.all():
            row = trials.index[~good][0]
            raise ValueError(f"{where}: {name}={values[row]} in row {row} must be {rule}")
    trials["seed"] = trials["seed"].astype(int)


def _derive_ids(trials: pd.DataFrame, notes: list[str]) -> None:
    """Fills `arm_id`, `cell_id` and `replicate_id` where they are missing."""

    def text(value: Any) -> str:
        return f"{value:g}" if isinstance(value, float) else str(value)

    known = [name for name in ARM_COLUMNS if trials[name].notna().any()]
    rules: dict[str, Callable[[pd.Series[Any]], str]] = {
        "arm_id": lambda row: "-".join(text(row[k]) for k in known if pd.notna(row[k])),
        "cell_id": lambda row: (
            row["arm_id"]
            + "".join(f"-{key}{row[key]:g}" for key in ("lr", "adam_lr") if pd.notna(row[key]))
        ),
        "replicate_id": lambda row: f"{row['cell_id']}-{row['seed']}",
    }
    for name, rule in rules.items():
        absent = trials[name].isna()
        if absent.any():
            trials.loc[absent, name] = trials[absent].apply(rule, axis=1)
            notes.append(f"{name} was missing in {replicates_text(absent)} and was derived.")


def _unmeasure(trials: pd.DataFrame, notes: list[str]) -> None:
    """Turns speeds and sizes that are no measurement into nulls, and says so."""
    for name in POSITIVE:
        bad = trials[name].notna() & ~(np.isfinite(trials[name]) & (trials[name] > 0))
        if bad.any():
            trials.loc[bad, name] = np.nan
            notes.append(
                f"{name} is not a positive number in {replicates_text(bad)}; taken as not measured."
            )
    shared = (trials["exclusive"] == False).fillna(False).astype(bool)  # noqa: E712
    shared &= trials["tokens_per_second"].notna()
    if shared.any():
        trials.loc[shared, ["tokens_per_second", "step_seconds_median"]] = np.nan
        notes.append(
            f"tokens_per_second of {replicates_text(shared)} was measured on a shared device; "
            "taken as not measured."
        )
    if (trials["lr"] == 0).any():
        notes.append(
            f"{replicates_text(trials['lr'] == 0)} trained at a learning rate of 0, which has no "
            "place on a logarithmic axis; tables list them."
        )


def _mention_mixtures(trials: pd.DataFrame, notes: list[str]) -> None:
    for name, noun in (("git_commit", "commits"), ("torch_version", "versions of torch")):
        values = sorted(trials.loc[trials["state"] == "completed", name].dropna().unique())
        if len(values) > 1:
            shown = ", ".join(value[:12] for value in values[:4])
            more = ", …" if len(values) > 4 else ""
            notes.append(f"Replicates ran under {len(values)} {noun}: {shown}{more}.")
    dirty = trials["git_dirty"].fillna(False).astype(bool)
    if dirty.any():
        notes.append(f"{replicates_text(dirty)} ran from a checkout with uncommitted changes.")


def replicates_text(mask: "pd.Series[bool]") -> str:
    """`1 replicate` or `3 replicates`: how many rows `mask` holds."""
    count = int(mask.sum())
    return f"{count} replicate" if count == 1 else f"{count} replicates"
