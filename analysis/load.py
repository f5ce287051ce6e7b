"""Records from disk to one checked frame, with every replicate accounted for.

A sweep's folder has `trials.parquet` and, if curves were logged, `curves.parquet`, with the columns
of `orchestrator.records`; `spec.json` beside them may name the sweep, its seeds and its provenance.
Columns that a question does not need may be missing. Nothing is dropped without being counted, and
rows that cannot be compared are refused with their values.
"""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.matching import MATCHED, MATCHED_DEVICE, assign_groups, check_matched
from analysis.spec import read_spec, spec_value
from analysis.tidy import conform, tidy
from orchestrator.records import CURVE_COLUMNS, STATUSES, CurvePoint


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
        return str(spec_value(self.spec, "purpose", None) or "compare")

    @property
    def fixed_seeds(self) -> frozenset[int] | None:
        """Seeds that every cell was given; none where the sweep adds none after looking."""
        is_adaptive = spec_value(self.spec, "adaptive", None) is not None
        return frozenset(spec_value(self.spec, "seeds", None) or ()) if is_adaptive else None


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
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give one that holds trials.parquet")
    spec = read_spec(folder / "spec.json")
    frame = _read_table(folder / "trials.parquet")
    within = compare_within
    if within is None:
        within = tuple(spec_value(spec, "compare_within", None) or ())
    notes: list[str] = []
    has_losses = spec_value(spec, "purpose", "compare") != "measure"
    trials = tidy(frame, str(folder / "trials.parquet"), notes, has_losses=has_losses)
    wanted = trials["desired"].fillna(True).astype(bool)
    not_desired = int((~wanted).sum())
    trials = trials[wanted].reset_index(drop=True)
    trials["group"] = assign_groups(trials, within)
    check_matched(trials, MATCHED if has_losses else MATCHED_DEVICE)
    order = ["group", "arm_id", "adam_lr", "lr", "cell_id", "seed"]
    trials = trials.sort_values(order, kind="stable", ignore_index=True)
    curves = _read_curves(folder, trials, notes)
    name = spec_value(spec, "name", None) or _only(trials["sweep"]) or folder.resolve().name
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


def _read_table(path: Path) -> pd.DataFrame:
    if not path.is_file():
        raise ValueError(f"{path} does not exist; the records of a sweep are needed")
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not readable as Parquet: {reason}") from error


ADAPTIVE_NOTE = (
    "Seeds were added to {} while comparisons were undecided. Differences of such cells are tested "
    "so that they hold at every look; t intervals of single arms are those of a number of seeds "
    "that was fixed beforehand, which theirs was not."
)


def _account(
    trials: pd.DataFrame, not_desired: int, spec: dict[str, Any], notes: list[str]
) -> Accounting:
    counts = trials["state"].value_counts()
    seeds = spec_value(spec, "seeds", None)
    missing = 0
    if seeds and len(trials):
        wanted = set(seeds)
        have = trials.groupby("cell_id")["seed"].agg(set)
        missing = int(sum(len(wanted - found) for found in have))
    asked = spec_value(spec, "replicates", None)
    if asked is not None:
        # Cells without any row are missing too, and only the sweep's own count knows them.
        missing = max(missing, asked - len(trials))
    uneven = trials.groupby("cell_id")["seed"].nunique()
    if len(uneven) and uneven.min() != uneven.max():
        notes.append(f"Cells have between {uneven.min()} and {uneven.max()} seeds.")
    if spec_value(spec, "adaptive", None) is not None:
        grown = trials.loc[~trials["seed"].isin(seeds or ()), "cell_id"].nunique()
        notes.append(ADAPTIVE_NOTE.format("1 cell" if grown == 1 else f"{grown} cells"))
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
    curves = conform(frame.reset_index(drop=True), CurvePoint, CURVE_COLUMNS, str(path))
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
