"""Numbers and findings as text; a sentence may say no more than its test allows."""

import math

from analysis.arms import Arm
from analysis.choice import Choice
from analysis.comparison import ArmDifference, Comparison
from analysis.front import Hypervolume, Point
from analysis.routing import RoutingDelta
from analysis.stats import CONFIDENCE, Interval
from analysis.study import Comparable

MINUS = "−"
BAR_SEEDS = 3
"""From this many seeds a t interval is drawn: at two its half width is nine standard deviations."""


ELLIPSE_SEEDS = 5
"""From this many seeds a joint region is drawn: its radius is 16 standard deviations at three."""


def signed(value: float, digits: int = 4) -> str:
    """A number with its sign, a true minus, and zero without one."""
    text = f"{abs(value):.{digits}f}"
    if float(text) == 0:
        return text
    return ("+" if value > 0 else MINUS) + text


def loss_text(value: float, interval: Interval | None) -> str:
    """A loss with its half width where it has one: `2.4130 ± 0.0120`."""
    if math.isnan(value):
        return "–"
    if interval is None or interval.n < BAR_SEEDS:
        return f"{value:.4f}"
    return f"{value:.4f} ± {interval.half_width:.4f}"


def count_text(value: float) -> str:
    """A count or rate to three digits: `176 k`, `3.1 M`; a dash for none."""
    if math.isnan(value):
        return "–"
    for scale, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= 0.9995 * scale:
            return f"{_three_digits(value / scale)}{unit}"
    return _three_digits(value)


def tick_text(value: float) -> str:
    """A number at an axis: `18k`, `1.5M`, without trailing zeros."""
    for scale, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{unit}"
    return f"{value:.4g}"


def bytes_text(value: float) -> str:
    """Bytes in powers of 1024; a dash for none."""
    if math.isnan(value):
        return "–"
    for scale, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= scale:
            number = value / scale
            is_whole = number == round(number) and number < 1000
            return f"{number:.0f} {unit}" if is_whole else f"{_three_digits(number)} {unit}"
    return f"{value:.0f} B"


def _three_digits(value: float) -> str:
    magnitude = abs(value)
    digits = 0 if magnitude >= 99.95 else 1 if magnitude >= 9.995 else 2
    return f"{value:,.{digits}f}"


def rate_text(value: float) -> str:
    """A learning rate: `3e-4`, `1.2e-3`; a dash for none."""
    if math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    digits = f"{value / 10.0**exponent:.3g}"
    return f"{digits}e{exponent}" if digits != "10" else f"1e{exponent + 1}"


def p_text(value: float) -> str:
    """A p value; never a bare zero."""
    if math.isnan(value):
        return "–"
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.3f}"


def share_text(value: float | None) -> str:
    """A share in per cent; a dash for none."""
    return "–" if value is None or math.isnan(value) else f"{100 * value:.0f} %"


def seeds_text(n: int) -> str:
    """`1 seed` or `3 seeds`."""
    return f"{n} seed" if n == 1 else f"{n} seeds"


def arm_rate(arm: Arm, choice: Choice) -> str:
    """The chosen rate, with the Adam group's where that was tried at several values."""
    text = rate_text(choice.cell.lr)
    adam_rates = {cell.adam_lr for cell in arm.cells if not math.isnan(cell.adam_lr)}
    return f"{text} (Adam {rate_text(choice.cell.adam_lr)})" if len(adam_rates) > 1 else text


def interval_words(interval: Interval | None, n: int) -> str:
    """What the uncertainty of a mean over `n` seeds is, in words."""
    if n == 1:
        return "one seed, so no interval"
    if interval is None or interval.n < BAR_SEEDS:
        return f"mean of {n} seeds, too few for an interval"
    percent = f"{100 * CONFIDENCE:.0f} %"
    return f"mean of {n} seeds, {percent} t interval ± {interval.half_width:.4f}"


def loss_sentence(point: Point) -> str:
    """The final loss of an arm."""
    if point.choice is None:
        return f"{point.arm.label} has no final loss: {point.left_out}."
    return (
        f"{point.arm.label} reaches {point.loss:.4f} nats per token at learning rate "
        f"{arm_rate(point.arm, point.choice)} ({interval_words(point.loss_interval, point.n)})."
    )


def speed_sentence(point: Point) -> str:
    """The training throughput of an arm."""
    if math.isnan(point.speed):
        return f"The training speed of {point.arm.label} is not measured at its chosen rate yet."
    measured = point.speed_interval.n if point.speed_interval else 1
    return (
        f"{point.arm.label} trains at {count_text(point.speed)} tokens per second "
        f"(measured alone on the device, {seeds_text(measured)})."
    )


def choice_sentence(point: Point) -> str:
    """How an arm's learning rate was chosen, and what is wrong with the choice."""
    choice = point.choice
    if choice is None:
        return f"No learning rate of {point.arm.label} can be chosen: {point.left_out}."
    parts = [
        f"{point.arm.label} is judged at learning rate {arm_rate(point.arm, choice)}, the smallest "
        f"mean loss of {len(point.arm.cells)} tried"
    ]
    share = choice.probabilities.get(choice.cell.cell_id)
    if share is not None and len(point.arm.cells) > 1:
        parts.append(f"chosen in {share_text(share)} of the seed draws")
    effect = choice.selection_effect
    if effect is not None and len(point.arm.cells) > 1:
        moved = signed(-effect)
        parts.append(
            "whichever seed is left out, the others choose as low a loss"
            if float(moved.replace(MINUS, "-")) == 0
            else f"choosing it on the same seeds moves the mean by {moved} nats"
        )
    text = "; ".join(parts) + "."
    if choice.edge:
        text += f" It is {choice.edge}: not shown to be the optimum."
    if not choice.is_balanced:
        text += " Its rates have different seeds, so their means were cleared of the seeds' effect."
    return text


def edge_sentences(part: Comparable, most: int = 3) -> list[str]:
    """Arms whose best rate is not bracketed: one by one, or by reason where they are many."""
    points = [point for point in part.points if point.choice and point.choice.edge]
    if len(points) <= most:
        return [choice_sentence(point) for point in points]
    by_reason: dict[str, list[str]] = {}
    for point in points:
        if point.choice:
            by_reason.setdefault(point.choice.edge, []).append(point.arm.label)
    return [
        f"Not shown to be the optimum, the best rate being {reason}: {'; '.join(names)}."
        for reason, names in by_reason.items()
    ]


def front_sentence(point: Point) -> str:
    """Whether an arm is on the front."""
    if point.left_out:
        return f"{point.arm.label} takes no part in the front: {point.left_out}."
    place = "is on the front" if point.on_front else "is not on the front"
    text = f"{point.arm.label} {place} of mean loss and mean throughput"
    if point.front_probability is None:
        return f"{text}."
    return f"{text}; it is in {share_text(point.front_probability)} of the seed draws."


def difference_sentence(row: ArmDifference, comparison: Comparison) -> str:
    """A difference to the baseline; its verb is the verdict's."""
    return _difference_words(row, comparison.baseline.label, comparison.margin_nats)


def routing_sentence(delta: RoutingDelta, margin_nats: float) -> str:
    """What routing changes in one arm; its verb is the verdict's."""
    return _difference_words(delta.difference, delta.twin.arm.label, margin_nats)


def _difference_words(row: ArmDifference, base: str, margin_nats: float) -> str:
    label = row.arm.label
    gap = f"{signed(row.loss_gap)} nats"
    if row.loss is None:
        return (
            f"{label} differs from {base} by {gap}, without a test: {seeds_text(row.pairs)} common."
        )
    evidence = (
        f"{gap}, 95 % interval {signed(row.loss.low)} to {signed(row.loss.high)}, "
        f"{row.loss.method}, {pairs_text(row.pairs)}, Holm p {p_text(row.p_holm)}"
    )
    if row.verdict in ("better", "worse"):
        side = "lower" if row.verdict == "better" else "higher"
        inside = max(abs(row.loss.low), abs(row.loss.high)) < margin_nats
        small = f", though by less than {margin_nats:g} nats" if inside else ""
        return f"{label} has a {side} loss than {base}{small} ({evidence})."
    if row.verdict == "equivalent":
        return (
            f"{label} and {base} are equivalent within ±{margin_nats:g} nats "
            f"({evidence}, two one-sided tests p {p_text(row.p_equivalence)})."
        )
    return f"Between {label} and {base} no difference is shown, nor equivalence ({evidence})."


def pairs_text(n: int) -> str:
    """`4 pairs`, or that there are none."""
    return "unpaired" if n == 0 else f"{n} pair" if n == 1 else f"{n} pairs"


def hypervolume_sentence(volume: Hypervolume) -> str:
    """The area under the front and where it is measured from."""
    text = (
        f"The front dominates {count_text(volume.of_means)} nats × tokens per second up to a loss "
        f"of {volume.reference_loss_nats:.4f} nats and a throughput of 0"
    )
    seeds = volume.per_seed
    if seeds is None:
        return f"{text}."
    if seeds.n < BAR_SEEDS:
        return f"{text}; seed by seed {count_text(seeds.mean)} on average ({seeds.n} seeds)."
    return (
        f"{text}; seed by seed {count_text(seeds.mean)} on average, 95 % t interval "
        f"{count_text(seeds.low)} to {count_text(seeds.high)} ({seeds.n} seeds)."
    )


def headline_sentence(part: Comparable) -> str:
    """The answer in one sentence."""
    front = part.front
    if not front:
        return "There is no front yet: no arm has both a final loss and a measured speed."
    if len(front) == 1:
        return (
            f"{front[0].arm.label} is both fastest ({count_text(front[0].speed)} tokens/s) and "
            f"best ({front[0].loss:.4f} nats): nothing trades against it."
        )
    fast, good = front[0], front[-1]
    return (
        f"The front has {len(front)} of {len(part.drawn)} arms, from {fast.arm.label} "
        f"({count_text(fast.speed)} tokens/s, {fast.loss:.4f} nats) to {good.arm.label} "
        f"({count_text(good.speed)} tokens/s, {good.loss:.4f} nats)."
    )
