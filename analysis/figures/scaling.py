"""Time and memory against context length: from which length on is which arm faster?"""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
)

from analysis.arms import Arm
from analysis.figures.style import FAINT, Drawing, Look, Palette, freeze, house_style, new_figure
from analysis.scaling import Family, build_families, scaling_sentences
from analysis.study import Study
from analysis.wording import bytes_text, tick_text

GUIDE_EXPONENTS = (1.0, 2.0)


def family_looks(families: tuple[Family, ...]) -> dict[str, Look]:
    """Label to look, the same colours as in every other figure."""
    arms = tuple(
        Arm(
            arm_id=family.label,
            label=family.label,
            facts={
                "mixer": family.mixer,
                "optimizer": family.optimizer,
                "stack": family.stack,
            },
            cells=(),
        )
        for family in families
    )
    palette = Palette(arms)
    return {arm.label: palette.look(arm) for arm in arms}


def draw_scaling(study: Study) -> Drawing | None:
    """Time per sequence and peak memory; none where length does not vary."""
    families = build_families(study.sweep.trials)
    if not families:
        return None
    looks = family_looks(families)
    has_memory = any(np.isfinite(family.memory).any() for family in families)
    with house_style():
        figure = new_figure(9.6 if has_memory else 5.4, 4.4)
        panels = figure.subplots(1, 2 if has_memory else 1, squeeze=False)[0]
        _draw_times(panels[0], families, looks)
        if has_memory:
            _draw_memory(panels[1], families, looks)
        figure.legend(
            *panels[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=8,
        )
        freeze(figure)
    return Drawing(
        name="scaling",
        figure=figure,
        caption=scaling_caption(families),
        alt="Training seconds per sequence against context length, both axes logarithmic, of "
        + ", ".join(family.label for family in families)
        + ".",
    )


def _length_axis(axes: Axes, families: tuple[Family, ...]) -> None:
    lengths = sorted({float(n) for family in families for n in family.lengths})
    lengths += [float(n) for family in families for n in family.out_of_memory]
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(sorted(set(lengths))))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("context length, tokens")


def _draw_times(axes: Axes, families: tuple[Family, ...], looks: dict[str, Look]) -> None:
    axes.set_yscale("log")
    _length_axis(axes, families)
    for family in families:
        look = looks[family.label]
        axes.plot(
            family.lengths,
            family.seconds,
            color=look.color,
            linestyle=look.line,
            marker=look.mark,
            markersize=5,
            label=family.label,
        )
        per_seed = family.lengths[:, None] / family.speeds
        for seed in range(per_seed.shape[1]):
            axes.plot(family.lengths, per_seed[:, seed], ".", color=look.color, markersize=2.5)
        _draw_out_of_memory(axes, family, look)
    _draw_guides(axes, families)
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("training seconds per sequence")


def _draw_guides(axes: Axes, families: tuple[Family, ...]) -> None:
    """Grey lines of slope 1 and 2 from the fastest first point."""
    start = min(families, key=lambda family: float(family.seconds[0]))
    x = np.array([start.lengths[0], max(float(f.lengths[-1]) for f in families)])
    limits = axes.get_ylim()
    for power in GUIDE_EXPONENTS:
        y = start.seconds[0] * 0.8 * (x / x[0]) ** power
        axes.plot(x, y, color=FAINT, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
        axes.annotate(
            f"∝ T{'²' if power == 2 else ''}",
            (x[-1], min(y[-1], limits[1])),
            fontsize=8,
            color=FAINT,
            ha="right",
            va="top",
        )
    axes.set_ylim(limits[0] * 0.8, limits[1])


def _draw_out_of_memory(axes: Axes, family: Family, look: Look) -> None:
    for length in family.out_of_memory:
        axes.plot(
            length,
            0.97,
            look.mark,
            transform=axes.get_xaxis_transform(),
            markerfacecolor="white",
            markeredgecolor=look.color,
            markersize=6,
            clip_on=False,
        )
        axes.annotate(
            f"OOM @ {tick_text(length)}",
            (length, 0.94),
            xycoords=axes.get_xaxis_transform(),
            ha="right",
            va="top",
            fontsize=7,
            color=look.color,
        )


def _draw_memory(axes: Axes, families: tuple[Family, ...], looks: dict[str, Look]) -> None:
    axes.set_yscale("log")
    _length_axis(axes, families)
    for family in families:
        look = looks[family.label]
        axes.plot(
            family.lengths,
            family.memory,
            color=look.color,
            linestyle=look.line,
            marker=look.mark,
            markersize=5,
        )
        _draw_out_of_memory(axes, family, look)
    axes.yaxis.set_major_locator(LogLocator(base=2))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_text(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("peak training memory")


def scaling_caption(families: tuple[Family, ...]) -> str:
    """What is timed, and where which family overtakes softmax."""
    parts = [
        "Median-step training time per sequence, mean over seeds, pooled over learning rates; "
        "small dots are seeds, grey lines grow with T and T²."
    ]
    return " ".join([*parts, *scaling_sentences(families)])
