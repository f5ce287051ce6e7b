"""Records from disk to one checked frame, with every replicate accounted for.

A sweep's folder has `trials.parquet` and, if curves were logged, `curves.parquet`, with the columns
of `orchestrator.records`; `spec.json` beside them may name the sweep, its seeds and its provenance.
Columns that a question does not need may be missing. Nothing is dropped without being counted, and
rows that cannot be compared are refused with their values.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pandas as pd

from analysis.matching import MATCHED, MATCHED_DEVICE, assign_groups, check_matched
from orchestrator.records import CURVE_COLUMNS, STATUSES, TRIAL_COLUMNS, CurvePoint, TrialRecord

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Accounting:
    """Where every replicate went; the states add up to `expected`.

    Attributes:
        expected: replicates that the sweep asks for.
        found: of these, those with a row.
        used: completed with a finite loss.
        diverged: training blew up, or the final loss is not finite.
        failed: ended without a result.
        running: not ended.
        pending: not begun.
        missing: expected, but without a row.
        not_desired: rows that the sweep as last described no longer asks for; not in `expected`.
    """

    expected: int
    found: int
    used: int
    diverged: int
    failed: int
    running: int
    pending: int
    missing: int
    not_desired: int

    def rows(self) -> list[tuple[str, int]]:
        """State and number of replicates, in the order of the attributes."""
        return [(f.name, getattr(self, f.name)) for f in fields(self)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """A sweep's records, checked.

    Attributes:
        name: the sweep's name.
        trials: one row per desired replicate with all of `TRIAL_COLUMNS`, `state` (a status, where
            `completed` means a finite loss) and `group`; ordered by arm, rates and seed.
        curves: rows of `curves.parquet` that belong to `trials`.
        groups: names of the comparisons; one, empty, unless `compare_within` splits them.
        compare_within: axes across which nothing is compared.
        accounting: where every replicate went.
        spec: content of `spec.json`; empty without one.
        notes: sentences on everything that was set aside.
        digest: SHA-256 of what the report is made from.
    """

    name: str
    trials: pd.DataFrame
    curves: pd.DataFrame
    groups: tuple[str, ...]
    compare_within: tuple[str, ...]
    accounting: Accounting
    spec: dict[str, Any]
    notes: tuple[str, ...]
    digest: str

    @property
    def purpose(self) -> str:
        """`compare`, `search` or `measure`; `compare` where nothing says."""
        return str(spec_value(self.spec, "purpose", "compare"))


def spec_value(spec: dict[str, Any], key: str, default: Any) -> Any:
    """`key` of a `spec.json`, whether it stands at the top or under `spec`."""
    nested = spec.get("spec")
    if key not in spec and isinstance(nested, dict):
        return nested.get(key, default)
    return spec.get(key, default)


def load_sweep(folder: Path, *, compare_within: tuple[str, ...] | None = None) -> Sweep:
    """The sweep in `folder`.

    Args:
        folder: holds `trials.parquet`.
        compare_within: columns or configuration paths across which nothing is compared; those of
            `spec.json` by default.

    Raises:
        ValueError: a file or column is missing or unreadable, a value is out of its range, a
            replicate appears twice, or rows that would be compared differ in budget, data,
            evaluation set, sequence length, device or precision.
    """
    spec = _read_spec(folder)
    frame = _read_table(folder / "trials.parquet")
    within = compare_within
    if within is None:
        within = tuple(str(path) for path in spec_value(spec, "compare_within", None) or ())
    notes: list[str] = []
    has_losses = spec_value(spec, "purpose", "compare") != "measure"
    trials = _tidy(frame, folder, notes, has_losses=has_losses)
    wanted = trials["desired"].fillna(True).astype(bool)
    not_desired = int((~wanted).sum())
    trials = trials[wanted].reset_index(drop=True)
    trials["group"] = assign_groups(trials, within)
    check_matched(trials, MATCHED if has_losses else MATCHED_DEVICE)
    order = ["group", "arm_id", "adam_lr", "lr", "cell_id", "seed"]
    trials = trials.sort_values(order, kind="stable", ignore_index=True)
    curves = _read_curves(folder, trials, notes)
    name = str(spec_value(spec, "name", "")) or _only(trials["sweep"]) or folder.resolve().name
    return Sweep(
        name=name,
        trials=trials,
        curves=curves,
        groups=tuple(dict.fromkeys(trials["group"])),
        compare_within=within,
        accounting=_account(trials, not_desired, spec, notes),
        spec=spec,
        notes=tuple(notes),
        digest=_digest(trials, curves),
    )


def _read_spec(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one that holds trials.parquet")
    path = folder / "spec.json"
    if not path.exists():
        return {}
    try:
        spec = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(spec, dict):
        raise ValueError(f"{path} holds a {type(spec).__name__}; a JSON object is needed")
    return spec


def _read_table(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; the records of a sweep are needed")
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not readable as Parquet: {reason}") from error


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


def _conform(
    frame: pd.DataFrame, record: type[Any], columns: tuple[str, ...], where: str
) -> pd.DataFrame:
    """All `columns` with their kinds; those that are missing are null."""
    kinds = _kinds(record)
    result = pd.DataFrame(index=frame.index)
    for name in columns:
        values = frame[name] if name in frame else pd.Series(None, index=frame.index, dtype=object)
        if kinds[name] == "number":
            numbers = pd.to_numeric(values, errors="coerce").astype(float)
            bad = values[numbers.isna() & values.notna()]
            # Text such as "nan" is a number that is not one; anything else is a wrong column.
            bad = bad[bad.map(lambda value: str(value).strip().lower() != "nan")]
            if len(bad):
                raise ValueError(
                    f"{where}: {name}={bad.iloc[0]!r} in row {bad.index[0]} is not a number"
                )
            result[name] = numbers
        elif kinds[name] == "flag":
            result[name] = values.astype("boolean")
        else:
            result[name] = values.map(lambda v: None if pd.isna(v) else str(v)).astype(object)
    return result


def _tidy(frame: pd.DataFrame, folder: Path, notes: list[str], *, has_losses: bool) -> pd.DataFrame:
    where = str(folder / "trials.parquet")
    missing = [name for name in NEEDED if name not in frame]
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; a comparison of losses needs them")
    if "arm_id" not in frame and "mixer" not in frame:
        raise ValueError(f"{where} has neither arm_id nor mixer: nothing says what was trained")
    if frame.empty:
        raise ValueError(f"{where} has no rows: the sweep has no replicates yet")
    trials = _conform(frame.reset_index(drop=True), TrialRecord, TRIAL_COLUMNS, where)
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
            f"{_replicates(blown)} completed without a finite validation loss; counted as diverged."
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
            notes.append(f"{name} was missing in {_replicates(absent)} and was derived.")


def _unmeasure(trials: pd.DataFrame, notes: list[str]) -> None:
    """Turns speeds and sizes that are no measurement into nulls, and says so."""
    for name in POSITIVE:
        bad = trials[name].notna() & ~(np.isfinite(trials[name]) & (trials[name] > 0))
        if bad.any():
            trials.loc[bad, name] = np.nan
            notes.append(
                f"{name} is not a positive number in {_replicates(bad)}; taken as not measured."
            )
    shared = (trials["exclusive"] == False).fillna(False).astype(bool)  # noqa: E712
    shared &= trials["tokens_per_second"].notna()
    if shared.any():
        trials.loc[shared, ["tokens_per_second", "step_seconds_median"]] = np.nan
        notes.append(
            f"tokens_per_second of {_replicates(shared)} was measured on a shared device; taken as "
            "not measured."
        )
    if (trials["lr"] == 0).any():
        notes.append(
            f"{_replicates(trials['lr'] == 0)} trained at a learning rate of 0, which has no place "
            "on a logarithmic axis; tables list them."
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
        notes.append(f"{_replicates(dirty)} ran from a checkout with uncommitted changes.")


def _replicates(mask: "pd.Series[bool]") -> str:
    count = int(mask.sum())
    return f"{count} replicate" if count == 1 else f"{count} replicates"


def _account(
    trials: pd.DataFrame, not_desired: int, spec: dict[str, Any], notes: list[str]
) -> Accounting:
    counts = trials["state"].value_counts()
    seeds = spec_value(spec, "seeds", None)
    missing = 0
    if isinstance(seeds, list) and seeds and len(trials):
        wanted = {int(seed) for seed in seeds}
        have = trials.groupby("cell_id")["seed"].agg(set)
        missing = int(sum(len(wanted - found) for found in have))
    uneven = trials.groupby("cell_id")["seed"].nunique()
    if len(uneven) and uneven.min() != uneven.max():
        notes.append(f"Cells have between {uneven.min()} and {uneven.max()} seeds.")
    state = {name: int(counts.get(name, 0)) for name in STATUSES}
    return Accounting(
        expected=len(trials) + missing,
        found=len(trials),
        used=state["completed"],
        diverged=state["diverged"],
        failed=state["failed"],
        running=state["running"],
        pending=state["pending"],
        missing=missing,
        not_desired=not_desired,
    )


def _read_curves(folder: Path, trials: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    path = folder / "curves.parquet"
    if not path.exists():
        return pd.DataFrame({name: pd.Series(dtype=float) for name in CURVE_COLUMNS})
    frame = _read_table(path)
    missing = [name for name in ("replicate_id", "step", "tokens") if name not in frame]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; a curve needs them")
    curves = _conform(frame.reset_index(drop=True), CurvePoint, CURVE_COLUMNS, str(path))
    known = curves["replicate_id"].isin(trials["replicate_id"])
    foreign = curves.loc[~known, "replicate_id"].nunique()
    if foreign:
        notes.append(f"{foreign} curves belong to no desired replicate and are left out.")
    return curves[known].sort_values(["replicate_id", "step"], kind="stable", ignore_index=True)


def _digest(trials: pd.DataFrame, curves: pd.DataFrame) -> str:
    digest = hashlib.sha256()
    for frame in (trials, curves):
        digest.update(pd.util.hash_pandas_object(frame, index=False).to_numpy().tobytes())
    return digest.hexdigest()


def _only(values: "pd.Series[str]") -> str:
    """The one value that `values` has; empty if there are several or none."""
    unique = values.dropna().unique()
    return str(unique[0]) if len(unique) == 1 else ""
