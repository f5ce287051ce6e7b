"""What to run next: the rate beyond an edge, the seeds an undecided pair lacks, and the cost."""

import math
from dataclasses import dataclass

from analysis.arms import Arm
from analysis.front import Point
from analysis.study import Comparable
from analysis.wording import rate_text, seeds_text

MOST_SEEDS = 100
"""A proposal of more seeds than this says that the pair can't be told apart, not how to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Proposal:
    """Runs that would settle something the report leaves open.

    Attributes:
        arm: what to run.
        reason: what they would settle, as a sentence.
        lr: the learning rate; NaN for the chosen one.
        num_runs: replicates.
        device_seconds: what they cost at the arm's mean so far; NaN where not measured.
    """

    arm: Arm
    reason: str
    lr: float
    num_runs: int
    device_seconds: float


def propose(part: Comparable) -> list[Proposal]:
    """Edges first, since a rate that is not bracketed may change every other comparison."""
    edges = [proposal for point in part.points if (proposal := _beyond_edge(point))]
    return edges + _more_seeds(part)


def _beyond_edge(point: Point) -> Proposal | None:
    choice = point.choice
    if choice is None or not choice.edge.startswith("at the "):
        return None
    rates = sorted({cell.lr for cell in point.arm.cells if cell.lr > 0})
    if len(rates) < 2:
        return None
    lr = rates[0] ** 2 / rates[1] if "lowest" in choice.edge else rates[-1] ** 2 / rates[-2]
    return Proposal(
        arm=point.arm,
        reason=f"{point.arm.label} is best {choice.edge}; {rate_text(lr)}, one step beyond, would "
        f"bracket it ({seeds_text(choice.cell.n)}).",
        lr=lr,
        num_runs=choice.cell.n,
        device_seconds=choice.cell.n * choice.cell.measures["device_seconds"],
    )


def _more_seeds(part: Comparable) -> list[Proposal]:
    comparison = part.comparison
    if comparison is None or comparison.seeds_for_margin is None:
        return []
    by_arm = {point.arm.arm_id: point for point in part.points}
    needed = comparison.seeds_for_margin
    proposals = []
    for row in comparison.rows:
        point = by_arm[row.arm.arm_id]
        missing = needed - row.pairs
        if row.verdict != "undecided" or missing <= 0 or needed > MOST_SEEDS:
            continue
        seconds = point.choice.cell.measures["device_seconds"] if point.choice else math.nan
        proposals.append(
            Proposal(
                arm=row.arm,
                reason=f"{row.arm.label} against {comparison.baseline.label} is undecided; "
                f"{seeds_text(needed)} of both would show a difference of "
                f"{comparison.margin_nats:g} nats with power 80 %.",
                lr=math.nan,
                num_runs=missing,
                device_seconds=missing * seconds,
            )
        )
    return proposals


def proposal_sentence(proposal: Proposal) -> str:
    """The proposal with its price."""
    if math.isnan(proposal.device_seconds):
        return proposal.reason
    hours = proposal.device_seconds / 3600
    price = f"{hours:.2g} device-hours" if hours >= 0.1 else f"{proposal.device_seconds:.0f} s"
    return f"{proposal.reason} About {price} for {proposal.arm.label}."
