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

from analysis import wording
from analysis.comparison import ArmDifference, Comparison
from analysis.cost_tables import csv_tables
from analysis.csvtext import json_text
from analysis.front import Hypervolume, Point
from analysis.load import load_sweep
from analysis.markdown import markdown_page
from analysis.study import Comparable, Settings, Study, analyse

FORMAT = 1
RELATIVE_TOLERANCE = 1e-9
"""Sums in another order differ by a few units in the last of 16 digits."""

Claim = dict[str, Any]


def make_claims(study: Study) -> list[Claim]:
    """The claims of a study, in the order in which a report makes them."""
    claims = [
        _claim(
            f"accounting/{state}",
            f"{count} replicates are {state.replace('_', ' ')}.",
            count,
            "replicates",
            f"count of replicates in state {state}",
        )
        for state, count in study.sweep.accounting.rows()
    ]
    for part in study.comparables:
        prefix = f"{part.name}/" if part.name else ""
        claims.append(_headline(part, prefix))
        for point in part.points:
            claims += _point_claims(point, prefix)
        if part.hypervolume:
            claims.append(_volume_claim(part.hypervolume, len(part.front_seeds), prefix))
        if part.comparison:
            claims += [
                _difference_claim(row, part.comparison, prefix) for row in part.comparison.rows
            ]
    return claims


def _claim(
    name: str,
    statement: str,
    value: Any,
    unit: str,
    query: str,
    *,
    test: dict[str, Any] | None = None,
    replicates: tuple[str, ...] = (),
) -> Claim:
    return {
        "id": name,
        "statement": statement,
        "value": value,
        "unit": unit,
        "query": query,
        "test": test or {},
        "replicates": list(replicates),
    }


def _headline(part: Comparable, prefix: str) -> Claim:
    ids = [name for point in part.front if point.choice for name in point.choice.cell.replicate_ids]
    return _claim(
        f"{prefix}front",
        wording.headline_sentence(part),
        [point.arm.arm_id for point in part.front],
        "arm ids, fastest first",
        "arms that no other arm matches on both mean loss and mean tokens_per_second and beats on "
        "one, each at its chosen rate",
        replicates=tuple(ids),
    )


def _point_claims(point: Point, prefix: str) -> list[Claim]:
    arm, choice = point.arm, point.choice
    if choice is None:
        return [
            _claim(
                f"{prefix}left_out/{arm.arm_id}",
                wording.loss_sentence(point),
                arm.num_diverged,
                "diverged replicates",
                f"arm_id = {arm.arm_id} and state = diverged",
                test={"n": arm.num_ended},
                replicates=tuple(name for cell in arm.cells for name in cell.diverged_ids),
            )
        ]
    cell = choice.cell
    where = f"cell_id = {cell.cell_id} and state = completed"
    tried = tuple(name for each in arm.cells for name in each.replicate_ids)
    return [
        _claim(
            f"{prefix}lr/{arm.arm_id}",
            wording.choice_sentence(point),
            cell.lr,
            "learning rate",
            f"arm_id = {arm.arm_id}: the cell without a diverged seed with the smallest mean "
            "val_loss_nats",
            test={
                "held_out_nats": choice.held_out,
                "selection_effect_nats": choice.selection_effect,
                "share_of_draws": choice.probabilities.get(cell.cell_id),
                "edge": choice.edge,
            },
            replicates=tried,
        ),
        _claim(
            f"{prefix}loss/{arm.arm_id}",
            wording.loss_sentence(point),
            point.loss,
            "nats per token",
            f"mean val_loss_nats where {where}",
            test=_interval_test(point.loss_interval, point.n),
            replicates=cell.replicate_ids,
        ),
        _claim(
            f"{prefix}speed/{arm.arm_id}",
            wording.speed_sentence(point),
            point.speed,
            "tokens per second",
            f"mean tokens_per_second where {where}",
            test=_interval_test(point.speed_interval, point.n),
            replicates=cell.replicate_ids,
        ),
        _claim(
            f"{prefix}on_front/{arm.arm_id}",
            wording.front_sentence(point),
            point.on_front,
            "whether not dominated",
            "dominance of mean loss and mean tokens_per_second; its share over draws of the seeds, "
            "the same for all arms, the rate chosen anew in each",
            test={"share_of_draws": point.front_probability},
            replicates=cell.replicate_ids,
        ),
    ]


def _interval_test(interval: Any, n: int) -> dict[str, Any]:
    if interval is None:
        return {"method": "none", "n": n}
    return {
        "method": "95 % t interval",
        "n": interval.n,
        "low": interval.low,
        "high": interval.high,
    }


def _volume_claim(volume: Hypervolume, num_seeds: int, prefix: str) -> Claim:
    return _claim(
        f"{prefix}hypervolume",
        wording.hypervolume_sentence(volume),
        volume.of_means,
        "nats × tokens per second",
        f"area dominated by the front up to ({volume.reference_loss_nats!r} nats, 0 tokens/s)",
        test=_interval_test(volume.per_seed, num_seeds),
    )


def _difference_claim(row: ArmDifference, comparison: Comparison, prefix: str) -> Claim:
    test: dict[str, Any] = {"method": "not tested", "pairs": row.pairs, "verdict": row.verdict}
    if row.loss:
        test = asdict(row.loss) | {
            "p_holm": row.p_holm,
            "p_benjamini_hochberg": row.p_bh,
            "p_equivalence": row.p_equivalence,
            "margin_nats": comparison.margin_nats,
            "verdict": row.verdict,
        }
    return _claim(
        f"{prefix}difference/{row.arm.arm_id}",
        wording.difference_sentence(row, comparison),
        row.loss_gap,
        "nats per token",
        f"mean over common seeds of val_loss_nats of arm {row.arm.arm_id} minus that of arm "
        f"{comparison.baseline.arm_id}, each at its chosen rate",
        test=test,
    )


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
