"""Loss against memory, state, cache and decoding speed: small panels, their fronts labelled."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator

from analysis.figures.labels import Surroundings, draw_labels
from analysis.figures.style import (
    INK,
    Drawing,
    Palette,
    add_key,
    byte_ticks,
    freeze,
    house_style,
    new_figure,
)
from analysis.pareto import staircase
from analysis.study import Comparable
from analysis.tradeoffs import TradeOff, trade_offs
from analysis.wording import bytes_text, tick_text

MAX_LABELS = 10
MAX_KEY = 24
"""Beyond so many arms a key would be larger than the panels; the front's members are named."""


def draw_trade_offs(part: Comparable) -> Drawing | None:
    """One panel per cost; none where no cost differs between arms."""
    trades = trade_offs(part)
    if not trades:
        return None
    palette = Palette(tuple(point.arm for point in part.points))
    columns = min(2, len(trades))
    rows = math.ceil(len(trades) / columns)
    with house_style():
        figure = new_figure(4.6 * columns + 0.4, 3.3 * rows + 0.3)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes, trade in zip(grid.flat, trades, strict=False):
            _draw_panel(axes, trade, palette)
        for axes in list(grid.flat)[len(trades) :]:
            axes.set_axis_off()
        figure.supylabel("final validation loss, nats per token", fontsize=9)
        shown = {p.arm.label: palette.look(p.arm) for trade in trades for p in trade.points}
        if len(shown) <= MAX_KEY:
            add_key(figure, list(shown.items()), columns=3 if columns > 1 else 2)
        freeze(figure)
        for axes, trade in zip(grid.flat, trades, strict=False):
            _label_panel(axes, trade, palette)
    return Drawing(
        name="trade_offs",
        figure=figure,
        caption="Loss against other costs, each arm at its chosen learning rate; the line is the "
        "front of that cost and its members are named. The loss axis does not start at 0.",
        alt="Loss against " + ", ".join(trade.cost.label for trade in trades) + ".",
    )


def _places(trade: TradeOff) -> np.ndarray:
    return np.array([(v, p.loss) for p, v in zip(trade.points, trade.values, strict=True)])


def _draw_panel(axes: Axes, trade: TradeOff, palette: Palette) -> None:
    places = _places(trade)
    low, high = places[:, 0].min(), places[:, 0].max()
    if low > 0 and high > 10 * low:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.5, high * 1.5)
    else:
        pad = 0.15 * (high - low)
        axes.set_xlim(low - pad, high + pad)
    pad = 0.12 * np.ptp(places[:, 1]) or 0.02 * places[0, 1]
    axes.set_ylim(places[:, 1].min() - pad, places[:, 1].max() + pad)
    line = staircase(places, trade.maximise)
    axes.plot(line[:, 0], line[:, 1], color=INK, linewidth=1.1, zorder=2)
    for point, (x, y) in zip(trade.points, places, strict=True):
        look = palette.look(point.arm)
        is_member = point.arm.arm_id in trade.on_front
        axes.plot(
            x,
            y,
            look.mark,
            markersize=6,
            markerfacecolor="white" if point.n == 1 else look.color,
            markeredgecolor=INK if is_member else look.color,
            markeredgewidth=0.8,
            alpha=1.0 if is_member else 0.6,
            zorder=3,
        )
    write = bytes_text if trade.cost.is_bytes else tick_text
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    if axes.get_xscale() == "linear":
        ticks = byte_ticks(*axes.get_xlim()) if trade.cost.is_bytes else None
        axes.xaxis.set_major_locator(FixedLocator(ticks) if ticks else MaxNLocator(5))
    better = "more is better" if trade.cost.is_better_large else "less is better"
    axes.set_xlabel(f"{trade.cost.label} ({better})")


def _label_panel(axes: Axes, trade: TradeOff, palette: Palette) -> None:
    places = _places(trade)
    members = [i for i, p in enumerate(trade.points) if p.arm.arm_id in trade.on_front]
    members = members[:MAX_LABELS]
    draw_labels(
        axes,
        [trade.points[i].arm.label for i in members],
        [palette.look(trade.points[i].arm).color for i in members],
        places[members],
        Surroundings(
            marks=places,
            dots=np.empty((0, 2)),
            lines=[staircase(places, trade.maximise)],
            corner=(0.0, 0.0, 0.0, 0.0),
        ),
    )
