"""The claims of a report: each number and sentence with its query, its test and its replicates."""

from dataclasses import asdict
from typing import Any

from analysis import wording
from analysis.answers import best_sentence, doubt_sentence
from analysis.comparison import ArmDifference, Comparison
from analysis.front import Hypervolume, Point
from analysis.routing import RoutingDelta
from analysis.study import Comparable, Settings, Study

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
        claims += _answer_claims(part, prefix)
        for point in part.points:
            claims += _point_claims(point, prefix)
        if part.hypervolume:
            claims.append(_volume_claim(part.hypervolume, len(part.front_seeds), prefix))
        if part.comparison:
            claims += [
                _difference_claim(row, part.comparison, prefix) for row in part.comparison.rows
            ]
        claims += [_routing_claim(delta, study.settings, prefix) for delta in part.routing]
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


def _answer_claims(part: Comparable, prefix: str) -> list[Claim]:
    """The three sentences at the head of a report."""
    claims = [_headline(part, prefix)]
    best, doubt = best_sentence(part), doubt_sentence(part)
    if best:
        claims.append(
            _claim(
                f"{prefix}best",
                best,
                part.against_best,
                "standing by arm id",
                "each arm's loss against the smallest mean at common seeds, each at its chosen "
                "rate",
                test={
                    "method": "blocked ANOVA, else paired t or Welch",
                    "correction": "over all pairs of arms",
                },
            )
        )
    if doubt:
        values = {
            "not_bracketed": sum(bool(p.choice and p.choice.edge) for p in part.points),
            "diverged": sum(point.arm.num_diverged for point in part.points),
            "seeds": [point.n for point in part.points if point.choice],
        }
        query = "counts over the arms of this comparison at their chosen rates"
        claims.append(_claim(f"{prefix}doubt", doubt, values, "counts", query))
    return claims


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
    return _claim(
        f"{prefix}difference/{row.arm.arm_id}",
        wording.difference_sentence(row, comparison),
        row.loss_gap,
        "nats per token",
        _difference_query(row.arm.arm_id, comparison.baseline.arm_id),
        test=_difference_test(row, comparison.margin_nats),
    )


def _routing_claim(delta: RoutingDelta, settings: Settings, prefix: str) -> Claim:
    row, twin = delta.difference, delta.twin.arm
    return _claim(
        f"{prefix}routing/{row.arm.arm_id}",
        wording.routing_sentence(delta, settings.margin_nats),
        row.loss_gap,
        "nats per token",
        _difference_query(row.arm.arm_id, twin.arm_id),
        test=_difference_test(row, settings.margin_nats),
    )


def _difference_query(arm_id: str, other_id: str) -> str:
    return (
        f"mean over common seeds of val_loss_nats of arm {arm_id} minus that of arm {other_id}, "
        "each at its chosen rate"
    )


def _difference_test(row: ArmDifference, margin_nats: float) -> dict[str, Any]:
    test: dict[str, Any] = {"method": "not tested", "pairs": row.pairs, "verdict": row.verdict}
    if row.loss:
        test = asdict(row.loss) | {
            "p_holm": row.p_holm,
            "p_benjamini_hochberg": row.p_bh,
            "p_equivalence": row.p_equivalence,
            "margin_nats": margin_nats,
            "verdict": row.verdict,
        }
    return test
