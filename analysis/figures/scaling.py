"""Time, memory, state and decoding speed against context length: from where on is which faster?"""

import math
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.markers import CARETUP
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    NullFormatter,
    NullLocator,
)

from analysis.arms import Arm
from analysis.figures.style import (
    FAINT,
    Drawing,
    Look,
    Palette,
    add_key,
    freeze,
    house_style,
    new_figure,
    readable,
)
from analysis.scaling import RECALL_COLUMNS, Family, build_families, scaling_sentences
from analysis.stats import Array
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantity:
    """What a panel beside the training time shows against context length.

    Attributes:
        attribute: name of the array in `Family`.
        label: its axis.
        is_bytes: whether it is written in bytes.
        is_log: whether its axis is logarithmic; a share from 0 to 1 has a linear one.
    """

    attribute: str
    label: str
    is_bytes: bool = False
    is_log: bool = True

    def of(self, family: Family) -> Array:
        """Its values [lengths]; NaN where not measured, or where they have no logarithm."""
        values: Array = family.measures[self.attribute]
        return np.where(values > 0, values, np.nan) if self.is_log else values


QUANTITIES = (
    Quantity(attribute="peak_memory_bytes", label="peak training memory", is_bytes=True),
    Quantity(attribute="held_bytes", label="state and KV cache of a sequence", is_bytes=True),
    Quantity(attribute="decode_tokens_per_second", label="decoding, tokens/s"),
    *(
        Quantity(
            attribute=name,
            label=name.replace("_", " ").replace("accuracy", "(share right)"),
            is_log=False,
        )
        for name in RECALL_COLUMNS
    ),
)


def shown_quantities(families: tuple[Family, ...]) -> tuple[Quantity, ...]:
    """Those that some family has at two lengths."""
    return tuple(
        quantity
        for quantity in QUANTITIES
        if any(np.isfinite(quantity.of(family)).sum() > 1 for family in families)
    )


def draw_scaling(study: Study) -> Drawing | None:
    """Time per sequence, memory, state and decoding speed; none where length does not vary."""
    families = build_families(study.sweep.trials)
    if not families:
        return None
    looks = family_looks(families)
    quantities = shown_quantities(families)
    columns = min(2, 1 + len(quantities))
    rows = math.ceil((1 + len(quantities)) / columns)
    with house_style():
        figure = new_figure(9.6 if columns == 2 else 5.4, 3.6 * rows + 0.6)
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        _draw_times(panels[0], families, looks)
        for axes, quantity in zip(panels[1:], quantities, strict=False):
            _draw_quantity(axes, quantity, families, looks)
        for axes in panels[1 + len(quantities) :]:
            axes.set_axis_off()
        add_key(figure, [(family.label, looks[family.label]) for family in families])
        freeze(figure)
    return Drawing(
        name="scaling",
        figure=figure,
        caption=scaling_caption(families),
        alt="Training seconds per sequence"
        + "".join(f", {quantity.label}" for quantity in quantities)
        + " against context length, both axes logarithmic, of "
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
        _draw_line(axes, family, family.seconds, look)
        per_seed = family.lengths[:, None] / family.speeds
        # A lone seed is the line itself.
        for seed in range(per_seed.shape[1] if per_seed.shape[1] > 1 else 0):
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
            # The steeper line leaves the panel first, so its name stands nearer to its start.
            (x[0] * (x[1] / x[0]) ** (0.7 / power), y[0] * (y[1] / y[0]) ** (0.7 / power)),
            xytext=(5, -5),
            textcoords="offset points",
            fontsize=8,
            color=FAINT,
            ha="left",
            va="top",
        )
    axes.set_ylim(limits[0] * 0.8, limits[1])


def _draw_out_of_memory(axes: Axes, family: Family, look: Look) -> None:
    """A length that did not fit: an upward caret on the top edge, named."""
    for length in family.out_of_memory:
        axes.plot(
            length,
            0.97,
            marker=CARETUP,
            transform=axes.get_xaxis_transform(),
            color=look.color,
            markersize=7,
            clip_on=False,
        )
        axes.annotate(
            f"out of memory at {length:,}",
            (length, 0.97),
            xycoords=axes.get_xaxis_transform(),
            xytext=(-6, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize=7.5,
            color=readable(look.color),
        )


def _draw_quantity(
    axes: Axes, quantity: Quantity, families: tuple[Family, ...], looks: dict[str, Look]
) -> None:
    if quantity.is_log:
        axes.set_yscale("log")
    _length_axis(axes, families)
    for family in families:
        _draw_line(axes, family, quantity.of(family), looks[family.label])
        if quantity.attribute == "peak_memory_bytes":
            _draw_out_of_memory(axes, family, looks[family.label])
    axes.set_ylabel(quantity.label)
    if not quantity.is_log:
        axes.set_ylim(-0.03, 1.03)
        return
    subs = (1.0,) if quantity.is_bytes else (1.0, 2.0, 5.0)
    base = 2 if quantity.is_bytes else 10
    axes.yaxis.set_major_locator(LogLocator(base=base, subs=subs))
    write = bytes_text if quantity.is_bytes else tick_text
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_line(axes: Axes, family: Family, values: Array, look: Look) -> None:
    axes.plot(
        family.lengths,
        values,
        color=look.color,
        linestyle=look.line,
        marker=look.mark,
        markersize=5,
        # Hollow says one seed and nothing else.
        markerfacecolor="white" if len(family.seeds) == 1 else look.color,
    )


def scaling_caption(families: tuple[Family, ...]) -> str:
    """What is timed, and where which family overtakes softmax."""
    parts = [
        "Median-step training time per sequence, mean over seeds, pooled over learning rates; "
        "small dots are seeds, grey lines grow with T and T²."
    ]
    if any(len(family.seeds) == 1 for family in families):
        parts.append("A hollow mark is one seed.")
    if any(family.out_of_memory for family in families):
        parts.append("A caret at the top: that length did not fit in memory.")
    return " ".join([*parts, *scaling_sentences(families)])
