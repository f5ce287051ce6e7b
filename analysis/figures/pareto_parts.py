"""What the static and the interactive front share: points, limits, marks and words."""

import math

import numpy as np

from analysis.front import Point, seed_points
from analysis.pareto import attained_loss, attainment_surface
from analysis.samples import joint_region
from analysis.stats import Array
from analysis.study import Comparable
from analysis.wording import BAR_SEEDS, ELLIPSE_SEEDS, count_text, signed

MAX_DETAILED = 60
"""Beyond so many arms only the front is drawn with bars and seeds; the others are dots."""


SMALLEST_SHIFT = 5e-5
"""Nats: a smaller effect of choosing the rate is none at the four digits that a report shows."""


FADE_BELOW = 0.05
"""Arms that are on the front in fewer of the draws are faded."""


def split_by_detail(part: Comparable) -> tuple[tuple[Point, ...], tuple[Point, ...]]:
    """Points to draw in full, and those to draw as dots where there are too many."""
    if len(part.drawn) <= MAX_DETAILED:
        return part.drawn, ()
    return part.front[:MAX_DETAILED], tuple(p for p in part.drawn if not p.on_front)


def front_label(point: Point) -> str:
    """The arm's name, with its frequency on the front where that is in doubt and n where small."""
    text = point.arm.label
    share = point.front_probability
    if share is not None and FADE_BELOW <= share <= 1 - FADE_BELOW:
        text += f"  {100 * share:.0f} %"
    if point.n < BAR_SEEDS:
        text += f"  n={point.n}"
    return text


def is_faded(point: Point) -> bool:
    """Whether hardly any seed draw puts it on the front."""
    share = point.front_probability
    return not point.on_front and share is not None and share < FADE_BELOW


def seed_cloud(point: Point) -> tuple[Array, Array]:
    """Speed and loss of the seeds that have both."""
    if point.choice is None:
        return np.empty(0), np.empty(0)
    known = np.isfinite(point.choice.cell.speeds)
    return point.choice.cell.speeds[known], point.choice.cell.losses[known]


def has_ellipse(point: Point) -> bool:
    """Whether enough seeds have both quantities for a joint region worth looking at."""
    return len(seed_cloud(point)[0]) >= ELLIPSE_SEEDS


def held_out_shift(point: Point) -> float | None:
    """Held-out minus naive loss where leaving a seed out changes the rate; else none."""
    effect = point.choice.selection_effect if point.choice else None
    return effect if effect is not None and abs(effect) >= SMALLEST_SHIFT else None


def attainment_band(part: Comparable) -> tuple[Array, list[float], list[float]] | None:
    """Throughputs, and the losses that a quarter and three quarters of the seeds reach there.

    None below three seeds, where quarters say nothing.
    """
    if len(part.front_seeds) < BAR_SEEDS:
        return None
    sets = seed_points(part.points, part.front_seeds)
    quarter, most = (attainment_surface(sets, level) for level in (0.25, 0.75))
    if not len(quarter) or not len(most):
        return None
    xs = np.unique(np.concatenate([quarter[:, 0], most[:, 0]]))
    xs = xs[xs <= most[:, 0].max()]
    # Both surfaces reach as far as the slower one, so every value is there.
    low, high = ([attained_loss(surface, x) or 0.0 for x in xs] for surface in (quarter, most))
    return xs, low, high


def _spread(point: Point) -> tuple[list[float], list[float]]:
    """All throughputs and losses that belong to a drawn point."""
    speeds, losses = (list(values) for values in seed_cloud(point))
    for values, interval, mean in (
        (speeds, point.speed_interval, point.speed),
        (losses, point.loss_interval, point.loss),
    ):
        values.append(mean)
        if interval and interval.n >= BAR_SEEDS:
            values += [interval.low, interval.high]
    if has_ellipse(point):
        outline = joint_region(*seed_cloud(point))
        speeds += list(outline[:, 0])
        losses += list(outline[:, 1])
    losses.append(point.loss + (held_out_shift(point) or 0.0))
    return speeds, losses


def axis_limits(
    drawn: tuple[Point, ...], reference: float = math.nan
) -> tuple[tuple[float, float], tuple[float, float], bool]:
    """Limits of throughput and loss with room for labels, and whether throughput is logarithmic.

    Args:
        drawn: the arms.
        reference: a loss that is worth seeing as a line; the axis reaches up to it where that
            leaves the arms at least two thirds of the height.
    """
    speeds: list[float] = []
    losses: list[float] = []
    for point in drawn:
        own = _spread(point)
        speeds += own[0]
        losses += own[1]
    means = [point.speed for point in drawn]
    is_log = max(means) > 10 * min(means)
    if is_log:
        # A bar may reach below zero; a logarithmic axis has its floor under the smallest mean.
        lowest = max(min(speeds), min(means) / 3)
        pad = 0.12 * math.log10(max(speeds) / lowest) + 0.02
        x = (lowest / 10**pad, max(speeds) * 10**pad)
    else:
        pad = 0.12 * (max(speeds) - min(speeds)) or 0.1 * max(speeds)
        x = (min(speeds) - pad, max(speeds) + pad)
    pad = 0.09 * (max(losses) - min(losses)) or 0.02 * abs(max(losses)) or 0.02
    # The top edge is where diverged arms are marked.
    low, high = min(losses) - pad, max(losses) + 1.6 * pad
    if high < reference + pad <= high + (high - low) / 2:
        high = reference + pad
    return x, (low, high), is_log


def diverged_marks(part: Comparable) -> list[tuple[Point, float, str]]:
    """Arms with a cell that diverged: the arm, its throughput, and k/n over those cells."""
    marks = []
    for point in part.points:
        cells = [cell for cell in point.arm.cells if cell.num_diverged]
        if not cells:
            continue
        k, n = sum(c.num_diverged for c in cells), sum(c.num_ended for c in cells)
        speeds = [c.diverged_speeds for c in cells] + [c.mean_speed for c in point.arm.cells]
        known = [speed for speed in speeds if math.isfinite(speed)]
        speed = sum(known) / len(known) if known else math.nan
        name = f"{point.arm.label} diverged " if point.choice is None else ""
        marks.append((point, speed, f"{name}{k}/{n}"))
    return marks


def pareto_caption(part: Comparable) -> str:
    """How to read the front: what was chosen, what the bars are, what is left out."""
    drawn = part.drawn
    counts = sorted({point.n for point in drawn})
    seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    noun = "seed" if counts == [1] else "seeds"
    parts = [
        "Each arm at the learning rate with the smallest mean loss over its seeds "
        f"({seeds} {noun}); small grey marks are its other rates, pale dots its seeds.",
    ]
    if any(point.n >= BAR_SEEDS for point in drawn):
        parts.append("Bars are 95 % t intervals.")
    if any(has_ellipse(point) for point in drawn):
        parts.append("Ellipses are joint 95 % regions of both means (Hotelling, from 5 seeds).")
    if any(point.n == 1 for point in drawn):
        parts.append("A hollow mark is one seed.")
    parts.append("The line passes only through losses that an arm reached at that speed or faster.")
    if len(part.front_seeds) >= 2:
        parts.append(
            f"Per cent: share of draws of the {len(part.front_seeds)} seeds, the rate chosen anew "
            "in each, with the arm on the front; faded below 5 %."
        )
    if len(part.front_seeds) >= BAR_SEEDS:
        parts.append(
            "Shaded: between the boundaries that 25 % and 75 % of the seeds reach; dotted 50 %, "
            "dashed 90 %."
        )
    parts += [text for text in [_selection_words(drawn)] if text]
    if len(drawn) > MAX_DETAILED:
        parts.append(f"Of {len(drawn)} arms those off the front are dots; tables name them.")
    if diverged_marks(part):
        parts.append("× at the top: arms with a rate at which k of n seeds diverged.")
    missing = [point.arm.label for point in part.points if "not measured" in point.left_out]
    if missing:
        parts.append(f"Speed not measured yet, so not drawn: {', '.join(missing)}.")
    parts.append("The loss axis does not start at 0.")
    return " ".join(parts)


def _selection_words(drawn: tuple[Point, ...]) -> str:
    """How much of the result is the choosing of rates on the seeds that are reported."""
    effects = [
        effect
        for point in drawn
        if point.choice and (effect := point.choice.selection_effect) is not None
    ]
    if not effects or all(len(point.arm.cells) == 1 for point in drawn):
        return ""
    moved = [effect for effect in effects if abs(effect) >= SMALLEST_SHIFT]
    if not moved:
        return "Whichever seed is left out, every arm would choose the same rate."
    return (
        f"Rates are chosen on the seeds that are shown, which moves {len(moved)} of {len(effects)} "
        f"arms' means, the most by {signed(-max(moved, key=abs))} nats: a dash on a dotted stem "
        "stands at the held-out loss."
    )


def pareto_alt(part: Comparable) -> str:
    """What a reader who can't see the front should know."""
    members = "; ".join(
        f"{point.arm.label}, {count_text(point.speed)} tokens per second, {point.loss:.4f} nats"
        for point in part.front
    )
    return f"Scatter of loss against throughput. On the front, fastest first: {members}."
