"""Every number of a report as a claim that can be computed again from the records.

A claim names its value, the query that gives it, the test behind its wording and the replicates it
stands on. `verify` computes all of them again and says what drifted: a changed record, an edited
table, a sentence that no longer follows.
"""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from analysis.cost_tables import csv_tables
from analysis.csvtext import json_text
from analysis.load import load_sweep
from analysis.markdown import markdown_page
from analysis.statements import Claim, make_claims
from analysis.study import Settings, Study, analyse

FORMAT = 1
RELATIVE_TOLERANCE = 1e-9
"""Sums in another order differ by a few units in the last of 16 digits."""


def claims_text(study: Study) -> str:
    """`claims.json`: the settings that the claims need, and the claims."""
    sweep = study.sweep
    commits = sorted(str(name) for name in sweep.trials["git_commit"].dropna().unique())
    return json_text(
        {
            "format": FORMAT,
            "sweep": sweep.name,
            "records_sha256": sweep.digest,
            "git_commits": commits,
            "seeds": sorted(int(seed) for seed in sweep.trials["seed"].unique()),
            "compare_within": list(sweep.compare_within),
            "settings": asdict(study.settings),
            "claims": make_claims(study),
        }
    )


def verify(folder: Path, report: Path | None = None) -> list[str]:
    """Sentences on every claim, table or page that the records in `folder` no longer give.

    Args:
        folder: the sweep's folder.
        report: the report's folder; `report` in `folder` by default.

    Raises:
        ValueError: there is no readable `claims.json`, or the records are refused.
    """
    place = report or folder / "report"
    stored = _read_claims(place / "claims.json")
    settings = _settings(stored, place / "claims.json")
    sweep = load_sweep(folder, compare_within=tuple(stored["compare_within"]))
    study = analyse(sweep, settings)
    fresh = json.loads(claims_text(study))
    drifts = _compare_claims(stored["claims"], fresh["claims"])
    texts = {f"tables/{name}": text for name, text in csv_tables(study).items()}
    texts["report.md"] = markdown_page(study)
    drifts += [drift for name, text in texts.items() if (drift := _compare_text(place, name, text))]
    return drifts


def _read_claims(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} is not readable; write the report first") from error
    except ValueError as error:
        raise ValueError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(stored, dict) or stored.get("format") != FORMAT:
        raise ValueError(f"{path} is not in format {FORMAT}; write the report again")
    return stored


def _settings(stored: dict[str, Any], path: Path) -> Settings:
    try:
        values = dict(stored["settings"])
        values["context"] = tuple((str(key), str(value)) for key, value in values["context"])
        return Settings(**values)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} lacks the settings it was made with; write it again") from error


def _compare_claims(stored: list[Claim], fresh: list[Claim]) -> list[str]:
    old, new = ({claim["id"]: claim for claim in claims} for claims in (stored, fresh))
    drifts = [
        f"{name} is claimed, but no longer follows from the records."
        for name in old
        if name not in new
    ]
    drifts += [
        f"{name} follows from the records, but is not claimed." for name in new if name not in old
    ]
    for name, claim in old.items():
        if name not in new:
            continue
        again = new[name]
        for key in ("value", "test", "replicates", "statement", "unit", "query"):
            if not _same(claim.get(key), again[key]):
                drifts.append(
                    f"{name}: {key} was {_short(claim.get(key))}, is now {_short(again[key])}."
                )
                break
    return drifts


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, int | float) and isinstance(second, int | float):
        return math.isclose(first, second, rel_tol=RELATIVE_TOLERANCE, abs_tol=1e-12)
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(_same(first[k], second[k]) for k in first)
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(_same, first, second))
    return bool(first == second)


def _short(value: Any, most: int = 120) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= most else text[: most - 1] + "…"


def _compare_text(place: Path, name: str, text: str) -> str:
    try:
        stored = (place / name).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return f"{name} is missing or unreadable."
    if stored == text:
        return ""
    pairs = zip(stored.splitlines(), text.splitlines(), strict=False)
    line = next((i for i, (old, new) in enumerate(pairs, 1) if old != new), None)
    where = f"from line {line} on" if line else "in its length"
    return f"{name} differs {where} from what the records give."
