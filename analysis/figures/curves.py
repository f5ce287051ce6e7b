"""Loss against tokens and against time: does the ranking hold over budgets?"""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from analysis.figures.style import (
    Drawing,
    Palette,
    add_key,
    freeze,
    house_style,
    new_figure,
)
from analysis.front import Point
from analysis.stats import Array, interval_factor
from analysis.study import Comparable
from analysis.wording import BAR_SEEDS, tick_text

MAX_ARMS = 8
MIN_POINTS = 3
"""Fewer evaluations than this make no curve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """An arm's loss over its training, at the steps that all its seeds evaluated.

    Attributes:
        point: the arm at its chosen rate.
        tokens: [steps], ascending.
        seconds: [steps], device seconds at the measured throughput; NaN where not measured.
        losses: [steps, seeds].
        quantity: `validation` or `training`.
    """

    point: Point
    tokens: Array
    seconds: Array
    losses: Array
    quantity: str

    @property
    def mean(self) -> Array:
        """Mean over seeds [steps]."""
        return np.asarray(self.losses.mean(axis=1))

    @property
    def half_width(self) -> Array | None:
        """Half width of the t interval [steps]; none below three seeds."""
        n = self.losses.shape[1]
        if n < BAR_SEEDS:
            return None
        return np.asarray(interval_factor(n) * self.losses.std(axis=1, ddof=1))


def build_curves(part: Comparable, curves: pd.DataFrame) -> list[Curve]:
    """Curves of the front's arms first, then of the best others, at most `MAX_ARMS`.

    Validation loss where every arm has it at three steps or more, else training loss.
    """
    chosen = [point for point in part.points if point.choice]
    chosen.sort(key=lambda point: (not point.on_front, point.loss))
    for column, quantity in (("val_loss_nats", "validation"), ("train_loss_nats", "training")):
        built = [_build(point, curves, column, quantity) for point in chosen[:MAX_ARMS]]
        kept = [curve for curve in built if curve is not None]
        if kept and len(kept) == len(built):
            return kept
    return []


def _build(point: Point, curves: pd.DataFrame, column: str, quantity: str) -> Curve | None:
    names = list(point.choice.cell.replicate_ids) if point.choice else []
    rows = curves[curves["replicate_id"].isin(names) & np.isfinite(curves[column])]
    # A step that was trained twice after a resume counts once, as it was last.
    rows = rows.drop_duplicates(["replicate_id", "tokens"], keep="last")
    table = rows.pivot(index="tokens", columns="replicate_id", values=column).dropna()
    if table.shape[1] != len(names) or len(table) < MIN_POINTS:
        return None
    tokens = table.index.to_numpy(dtype=float)
    return Curve(
        point=point,
        tokens=tokens,
        seconds=tokens / point.speed,
        losses=table.to_numpy(dtype=float),
        quantity=quantity,
    )


def draw_curves(part: Comparable, curves: pd.DataFrame) -> Drawing | None:
    """Two panels, tokens and seconds; none without curves."""
    built = build_curves(part, curves)
    if not built:
        return None
    palette = Palette(tuple(point.arm for point in part.points))
    with house_style():
        figure = new_figure(9.6, 4.2)
        left, right = figure.subplots(1, 2, sharey=True)
        for axes, is_time in ((left, False), (right, True)):
            for curve in built:
                _draw(axes, curve, palette, is_time=is_time)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(value)))
        left.set_ylim(*curve_limits(built))
        left.set_ylabel(f"{built[0].quantity} loss, nats per token")
        left.set_xlabel("training tokens")
        right.set_xlabel("device seconds at the measured throughput")
        add_key(figure, [(c.point.arm.label, palette.look(c.point.arm)) for c in built])
        freeze(figure)
    return Drawing(
        name="curves",
        figure=figure,
        caption=curves_caption(built, len(part.points)),
        alt="Loss over training of " + ", ".join(curve.point.arm.label for curve in built) + ".",
    )


def curve_limits(built: list[Curve]) -> tuple[float, float]:
    """Loss axis from the best end to where the curves have left their first steps."""
    low = min(float(curve.mean.min()) for curve in built)
    # The first tenth of a run falls from the loss of a random model and would hide the rest.
    early = [curve.mean[max(1, len(curve.mean) // 10)] for curve in built]
    high = max(float(max(early)), *(float(curve.mean[-1]) for curve in built))
    pad = 0.05 * (high - low) or 0.05
    return low - pad, high + pad


def _draw(axes: Axes, curve: Curve, palette: Palette, *, is_time: bool) -> None:
    look = palette.look(curve.point.arm)
    x = curve.seconds if is_time else curve.tokens
    if not np.isfinite(x).all():
        return
    axes.plot(
        x,
        curve.mean,
        color=look.color,
        linestyle=look.line,
        # Colour and line say rule and optimizer; only the mark tells stacks apart.
        marker=look.mark,
        markersize=3.5,
        markevery=max(1, len(x) // 6),
    )
    half = curve.half_width
    if half is not None:
        axes.fill_between(
            x, curve.mean - half, curve.mean + half, color=look.color, alpha=0.12, linewidth=0
        )
    axes.plot(
        x[-1],
        curve.mean[-1],
        look.mark,
        color=look.color,
        markersize=6,
        markerfacecolor="white" if curve.losses.shape[1] == 1 else look.color,
    )


def curves_caption(built: list[Curve], num_arms: int) -> str:
    """How to read the curves."""
    parts = [
        f"Mean {built[0].quantity} loss over seeds at the chosen rate, with 95 % t bands from 3 "
        "seeds. The large marks are ends of the schedule; ranks before the end are no results, "
        "since the learning rate has not decayed yet.",
    ]
    if num_arms > len(built):
        parts.append(f"{len(built)} of {num_arms} arms: the front and the best of the others.")
    if any(math.isnan(curve.point.speed) for curve in built):
        parts.append("Arms without a measured speed are missing on the right.")
    return " ".join(parts)
