"""The question that a sweep asks, and its answer in three sentences: front, difference, doubt."""

from analysis import wording
from analysis.front import Point
from analysis.scaling import build_families, scaling_sentences
from analysis.study import Comparable, Study

SURE = 0.95
"""A member of the front that fewer of the seed draws confirm is named as doubtful."""

MOST_NAMED = 4
TEST_WORDS = "tests at 5 %, corrected over all pairs of arms"


def question(study: Study) -> str:
    """What the sweep was run to find out."""
    if study.sweep.purpose == "measure":
        return "How do training time and memory grow with the length of the context?"
    arms = len({point.arm.arm_id for point in study.points})
    if arms == 1:
        return "What loss does this arm reach, at which learning rate and which speed?"
    return (
        f"Which of {arms} arms reaches the lowest loss at which training speed, each at its own "
        "best learning rate?"
    )


def answers(study: Study) -> list[str]:
    """The answer of each comparison, or of the timings where only speed was measured."""
    if study.sweep.purpose == "measure":
        timed = scaling_sentences(build_families(study.sweep.trials))
        return timed or ["No arm is timed at two lengths yet."]
    return [
        (f"{part.name}: " if part.name else "") + sentence
        for part in study.comparables
        for sentence in part_answers(part)
    ] or ["No replicate is desired: there is nothing to report."]


def part_answers(part: Comparable) -> list[str]:
    """The front, what the seeds show about the best arm, and how far both can be trusted."""
    sentences = [wording.headline_sentence(part), best_sentence(part), doubt_sentence(part)]
    return [sentence for sentence in sentences if sentence]


def best_sentence(part: Comparable) -> str:
    """The arm with the smallest mean loss beside all others; empty where there is no other."""
    names = {point.arm.arm_id: point.arm.label for point in part.points}
    by_standing: dict[str, list[str]] = {}
    for arm_id, standing in part.against_best.items():
        by_standing.setdefault(standing, []).append(names[arm_id])
    if len(part.against_best) < 2:
        return ""
    best = by_standing["best"][0]
    tied, worse = by_standing.get("tied", []), by_standing.get("worse", [])
    others = len(part.against_best) - 1
    if not tied and not worse:
        return f"{best} has the smallest mean loss, but too few seeds are common to test it."
    if not tied and len(worse) == others:
        return f"{best} has a lower loss than each of the {others} others ({TEST_WORDS})."
    text = f"{best} has the smallest mean loss; of {others} others {len(worse)} are worse"
    if tied:
        text += f", and {_named(tied)} cannot be told from it"
    return f"{text} ({TEST_WORDS})."


def doubt_sentence(part: Comparable) -> str:
    """Seeds, doubtful members of the front, rates that are not bracketed, and divergence."""
    chosen = [point for point in part.points if point.choice]
    if not chosen:
        return ""
    counts = sorted({point.n for point in chosen})
    seeds = wording.seeds_text(counts[-1])
    if len(counts) > 1:
        seeds = f"{counts[0]} to {counts[-1]} seeds"
    doubts = [f"each mean stands on {seeds}"]
    shaky = [point.arm.label for point in part.front if _is_shaky(point)]
    if shaky:
        doubts.append(
            f"{_named(shaky)} hold{'s' if len(shaky) == 1 else ''} the front in fewer "
            f"than {100 * SURE:.0f} % of the seed draws"
        )
    edges = sum(bool(point.choice and point.choice.edge) for point in chosen)
    if edges:
        verb = "is" if edges == 1 else "are"
        doubts.append(f"the best rates of {edges} of {len(chosen)} arms {verb} not bracketed")
    diverged = sum(point.arm.num_diverged for point in part.points)
    if diverged:
        ended = sum(point.arm.num_ended for point in part.points)
        doubts.append(f"{diverged} of {ended} replicates diverged")
    return f"How sure: {'; '.join(doubts)}."


def _is_shaky(point: Point) -> bool:
    return point.front_probability is not None and point.front_probability < SURE


def _named(names: list[str]) -> str:
    """Names in a row; those beyond `MOST_NAMED` are counted."""
    if len(names) > MOST_NAMED:
        return ", ".join(names[: MOST_NAMED - 1]) + f" and {len(names) - MOST_NAMED + 1} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
