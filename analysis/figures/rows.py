"""Differences to the baseline as rows: is one real, and is it big enough to matter?"""

import numpy as np
from matplotlib.axes import Axes

from analysis.anytime import METHOD
from analysis.comparison import ArmDifference, Comparison
from analysis.figures.style import FAINT, INK, Drawing, Palette, freeze, house_style, new_figure
from analysis.stats import Interval
from analysis.study import Comparable
from analysis.wording import BAR_SEEDS, p_text, signed

MAX_ROWS = 40


def sorted_rows(comparison: Comparison) -> list[ArmDifference]:
    """Rows with the best difference first."""
    return sorted(comparison.rows, key=lambda row: row.loss_gap)


def drawn_interval(row: ArmDifference) -> Interval | None:
    """The interval that a figure shows: of a pooled test always, of a pair from three seeds."""
    test = row.loss
    if test is None or (test.method != "blocked ANOVA" and test.df < BAR_SEEDS - 1):
        return None
    return Interval(mean=test.mean, low=test.low, high=test.high, n=test.pairs)


def draw_differences(part: Comparable) -> Drawing | None:
    """Interval rows; none without a baseline and another arm."""
    comparison = part.comparison
    if comparison is None or not comparison.rows:
        return None
    rows = sorted_rows(comparison)
    shown = rows[:MAX_ROWS]
    palette = Palette(tuple(point.arm for point in part.points))
    with house_style():
        figure = new_figure(9.0, 0.24 * len(shown) + 1.2)
        axes, words = figure.subplots(1, 2, sharey=True, width_ratios=(1.9, 1))
        words.set_axis_off()
        margin = comparison.margin_nats
        axes.axvspan(-margin, margin, color=FAINT, alpha=0.18, linewidth=0)
        axes.axvline(0, color=INK, linewidth=0.9)
        for height, row in enumerate(shown):
            _draw_row(axes, height, row, palette)
            ratio = f"{row.speed_ratio.mean:.2f}×" if row.speed_ratio else "–"
            texts = (str(row.pairs), p_text(row.p_holm), row.verdict, ratio)
            _write(words, height, texts, INK)
        axes.set_yticks(range(len(shown)), [row.arm.label for row in shown])
        axes.set_ylim(len(shown) - 0.4, -1.0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel(f"loss minus that of {comparison.baseline.label}, nats (left is better)")
        _write(words, -0.7, ("pairs", "Holm p", "verdict", "speed"), FAINT)
        axes.set_title("Loss against the baseline, each arm at its own best rate", loc="left")
        freeze(figure)
    return Drawing(
        name="differences",
        figure=figure,
        caption=differences_caption(comparison, len(rows) - len(shown)),
        alt=_alt(comparison, rows),
    )


def _draw_row(axes: Axes, height: int, row: ArmDifference, palette: Palette) -> None:
    look = palette.look(row.arm)
    interval = drawn_interval(row)
    if interval and row.simultaneous:
        axes.plot(row.simultaneous, [height, height], color=look.color, linewidth=0.7)
    if interval:
        axes.plot([interval.low, interval.high], [height, height], color=look.color, linewidth=1.6)
    axes.plot(
        row.loss_gap,
        height,
        look.mark,
        color=look.color,
        markersize=6,
        markerfacecolor="white" if row.is_single else look.color,
    )


def _write(axes: Axes, height: float, texts: tuple[str, ...], color: str) -> None:
    for x, text in zip((0.0, 0.16, 0.5, 0.85), texts, strict=True):
        axes.text(
            x,
            height,
            text,
            transform=axes.get_yaxis_transform(),
            fontsize=8,
            va="center",
            color=color,
        )


def differences_caption(comparison: Comparison, num_hidden: int = 0) -> str:
    """Which test, which correction, and what these seeds could have seen."""
    tests = sorted({row.loss.method for row in comparison.rows if row.loss})
    parts = [
        f"Family: each arm at its own best learning rate against {comparison.baseline.label}, "
        "seeds paired.",
        f"Test: {', '.join(tests) or 'none, one seed only'}; p values corrected after Holm; "
        "thick bars are 95 % intervals, thin ones hold together for the whole family (Bonferroni).",
        f"Grey: ±{comparison.margin_nats:g} nats, the margin below which a difference does not "
        "matter; ‘equivalent’ needs two one-sided tests inside it.",
    ]
    if METHOD in tests:
        parts.append(
            f"‘{METHOD}’: seeds were added until a comparison was decided, and these intervals and "
            "p values allow for it."
        )
    if comparison.why_not_pooled:
        parts.append(f"No pooled test: {comparison.why_not_pooled}.")
    if np.isfinite(comparison.detectable_nats):
        parts.append(
            f"These seeds see a true difference of {comparison.detectable_nats:.4f} nats with "
            "power 80 %."
        )
    if comparison.seeds_for_margin:
        parts.append(f"The margin would need {comparison.seeds_for_margin} seeds per arm.")
    if num_hidden:
        parts.append(f"{num_hidden} more rows are in the table.")
    return " ".join(parts)


def _alt(comparison: Comparison, rows: list[ArmDifference]) -> str:
    parts = [f"{row.arm.label} {signed(row.loss_gap)} nats, {row.verdict}" for row in rows]
    return f"Differences to {comparison.baseline.label}: {'; '.join(parts)}."
