"""Tables as text for reading: rows of words."""

import math

from analysis.budgets import MatchedLoss
from analysis.comparison import ArmDifference
from analysis.front import Point
from analysis.study import Comparable
from analysis.wording import arm_rate, bytes_text, count_text, loss_text, p_text, share_text, signed

MAIN_HEADER = (
    "arm",
    "learning rate",
    "n",
    "final loss, nats",
    "held-out",
    "tokens/s",
    "memory",
    "front",
    "on front",
    "against best",
    "diverged",
)
MAIN_CAPTION = (
    "Mean over n seeds ± half width of the 95 % t interval (from 3 seeds). Held-out: the loss with "
    "the rate chosen without the seed that is scored. On front: share of seed draws. Against best: "
    "‘tied’ where a test against the smallest mean, corrected over all pairs of arms since the "
    "same seeds have picked it, shows no difference. ⚠: the rate is not shown to be the optimum."
)


def main_rows(part: Comparable) -> list[list[str]]:
    """The main table as text, best loss first; arms without a loss last."""
    return [
        _main_row(point, part.against_best.get(point.arm.arm_id, "–"))
        for point in sorted(part.points, key=lambda p: (math.isnan(p.loss), p.loss))
    ]


def _main_row(point: Point, standing: str) -> list[str]:
    choice = point.choice
    held_out = choice.held_out if choice else None
    flag = " ⚠" if choice and choice.edge else ""
    memory = choice.cell.measures["peak_memory_bytes"] if choice else math.nan
    return [
        point.arm.label,
        f"{arm_rate(point.arm, choice)}{flag}" if choice else "–",
        str(point.n),
        loss_text(point.loss, point.loss_interval),
        "–" if held_out is None else f"{held_out:.4f}",
        count_text(point.speed),
        bytes_text(memory),
        "yes" if point.on_front else "left out" if point.left_out else "no",
        share_text(point.front_probability),
        standing,
        f"{point.arm.num_diverged}/{point.arm.num_ended}",
    ]


DIFFERENCE_HEADER = (
    "arm",
    "Δ loss, nats",
    "95 % interval",
    "pairs",
    "test",
    "Holm p",
    "verdict",
    "speed ratio",
)


def difference_text_rows(part: Comparable) -> list[list[str]]:
    """Differences to the baseline as text, best first."""
    if part.comparison is None:
        return []
    ordered = sorted(part.comparison.rows, key=lambda row: row.loss_gap)
    return [[entry.arm.label, *_difference_cells(entry)] for entry in ordered]


def _difference_cells(entry: ArmDifference) -> list[str]:
    test, ratio = entry.loss, entry.speed_ratio
    return [
        signed(entry.loss_gap),
        f"{signed(test.low)} … {signed(test.high)}" if test else "–",
        str(entry.pairs),
        test.method if test else "not tested",
        p_text(entry.p_holm),
        entry.verdict,
        "–" if ratio is None else f"{ratio.mean:.3f}×",
    ]


ROUTING_HEADER = ("arm", "without", *DIFFERENCE_HEADER[1:])
ROUTING_CAPTION = (
    "Each arm with cross-layer routing minus its twin without, both at their own best learning "
    "rate; p values corrected after Holm over these rows."
)


def routing_rows(part: Comparable) -> list[list[str]]:
    """What routing changes, arm by arm, as text."""
    return [
        [delta.point.arm.label, delta.twin.arm.label, *_difference_cells(delta.difference)]
        for delta in part.routing
    ]


EQUAL_COST_HEADER = ("arm", "equal", "budget", "tokens by then", "of its schedule", "loss, nats")
EQUAL_COST_CAPTION = (
    "The budget is what the cheapest arm's whole training cost. An arm that is read before the end "
    "of its schedule has not decayed its learning rate yet, which costs it loss: a hint, no result."
)


def equal_cost(matches: list[MatchedLoss]) -> tuple[list[list[str]], list[str]]:
    """Losses at equal device time and equal FLOPs, best first, and what is not known.

    Returns:
        Rows as text for each budget at which two arms or more can be read, and a sentence for each
        budget at which some cannot.
    """
    rows, sentences = [], []
    for budget, words in BUDGET_WORDS.items():
        own = [match for match in matches if match.budget == budget]
        known = [match for match in own if not math.isnan(match.loss)]
        if len(known) < len(own):
            sentences.append(
                f"At equal {words} the loss of {len(own) - len(known)} of {len(own)} arms is not "
                "known: their curves have no evaluation on both sides of it (eval.every_steps)."
            )
        if len(known) > 1:
            own.sort(key=lambda m: (math.isnan(m.loss), m.loss))
            rows += [_equal_cost_row(match) for match in own]
    return rows, sentences


def _equal_cost_row(match: MatchedLoss) -> list[str]:
    unit = " s" if match.budget == "device_seconds" else " FLOPs"
    return [
        match.arm.label,
        BUDGET_WORDS[match.budget],
        count_text(match.amount) + unit,
        count_text(match.tokens),
        share_text(match.share),
        loss_text(match.loss, match.interval),
    ]


BUDGET_WORDS = {"device_seconds": "device time", "flops": "training FLOPs"}
