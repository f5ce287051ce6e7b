"""One house style: colours by memory rule, marks by optimizer and stack, and reproducible files.

The palette is Okabe and Ito's, which colour-blind readers can tell apart, with a grey for softmax;
every colour is joined by a mark and a line style, so that none is needed to read a figure.
"""

import io
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from analysis.arms import Arm

K = TypeVar("K")
V = TypeVar("V")

INK = "#1f2328"
FAINT = "#8b929a"
GRID = "#e3e6e9"

MIXER_COLORS = {
    "softmax": "#6e7781",
    "linear": "#CC79A7",
    "linear_unnormalized": "#9b6fb3",
    "gated_linear": "#56B4E9",
    "deltanet": "#1f7fc0",
    "gated_deltanet": "#009E73",
    "kimi_delta": "#D55E00",
    "gated_deltanet2": "#E69F00",
}
SPARE_COLORS = ("#8c6d31", "#5254a3", "#bd4f6c", "#3f8f8f", "#7a7a00", "#a05d9c")

Line = str | tuple[int, tuple[int, ...]]

OPTIMIZER_LINES: dict[str, Line] = {"adamw": "-", "muon": "--"}
SPARE_LINES: tuple[Line, ...] = (":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))

MARKS = {
    ("adamw", "pure"): "o",
    ("adamw", "hybrid"): "s",
    ("muon", "pure"): "^",
    ("muon", "hybrid"): "D",
}
SPARE_MARKS = ("v", "P", "h", "<", "p", ">", "*", "8")

SETTINGS: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 9.0,
    "axes.labelsize": 9.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "text.color": INK,
    # A name with a dollar sign is a name, not a formula.
    "text.parse_math": False,
    "svg.hashsalt": "seedfront",
    "figure.facecolor": "white",
    "lines.linewidth": 1.4,
}
PNG_DPI = 300


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """A figure with the words that go with it.

    Attributes:
        name: file name without its ending.
        figure: the picture.
        caption: what is drawn and how to read it.
        alt: what a reader who can't see it should know.
    """

    name: str
    figure: Figure
    caption: str
    alt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """Colour, mark and line of an arm."""

    color: str
    mark: str
    line: Line


MIN_CONTRAST = 4.5
"""Contrast that small text needs against its paper (WCAG 2.2, success criterion 1.4.3)."""


def readable(color: str, paper: str = "#ffffff") -> str:
    """`color` moved towards black, or white on dark paper, until text in it can be read."""
    rgb, goal = to_rgb(color), (0.0 if _luminance(to_rgb(paper)) > 0.2 else 1.0)
    shade = to_hex(rgb)
    for step in range(21):
        red, green, blue = (value + (goal - value) * step / 20 for value in rgb)
        shade = to_hex((red, green, blue))
        ordered = sorted((_luminance(to_rgb(shade)), _luminance(to_rgb(paper))))
        if (ordered[1] + 0.05) / (ordered[0] + 0.05) >= MIN_CONTRAST:
            break
    return shade


def _luminance(rgb: tuple[float, ...]) -> float:
    """Relative luminance of sRGB values in [0, 1], as WCAG defines it."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


class Palette:
    """Looks for the arms of one comparison: fixed for known names, the next spare for others."""

    def __init__(self, arms: tuple[Arm, ...]) -> None:
        mixers = dict.fromkeys(arm.fact("mixer") for arm in arms)
        optimizers = dict.fromkeys(arm.fact("optimizer") for arm in arms)
        kinds = dict.fromkeys(_kind(arm) for arm in arms)
        others = [name for name in mixers if name not in MIXER_COLORS]
        self._colors = MIXER_COLORS | _cycle(others, SPARE_COLORS)
        self._lines = OPTIMIZER_LINES | _cycle(
            [name for name in optimizers if name not in OPTIMIZER_LINES], SPARE_LINES
        )
        self._marks = MARKS | _cycle([kind for kind in kinds if kind not in MARKS], SPARE_MARKS)

    def look(self, arm: Arm) -> Look:
        """How `arm` is drawn in every figure."""
        return Look(
            color=self._colors[arm.fact("mixer")],
            mark=self._marks[_kind(arm)],
            line=self._lines[arm.fact("optimizer")],
        )


def _kind(arm: Arm) -> tuple[str, str]:
    return arm.fact("optimizer"), arm.fact("stack")


def _cycle(names: list[K], spare: tuple[V, ...]) -> dict[K, V]:
    return {name: spare[index % len(spare)] for index, name in enumerate(names)}


@contextmanager
def house_style() -> Iterator[None]:
    """Sets the style for what is made and saved inside; leaves matplotlib's own state alone."""
    with mpl.rc_context(SETTINGS), warnings.catch_warnings():
        # Names may use scripts that the figure's font lacks; the pages spell them out.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, in inches, bound to no window."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure


def add_key(figure: Figure, entries: list[tuple[str, Look]], columns: int = 3) -> None:
    """A key under the figure: each name with its line, mark and colour."""
    styles: list[dict[str, Any]] = [
        {"color": look.color, "linestyle": look.line, "marker": look.mark, "label": name}
        for name, look in entries
    ]
    handles = [Line2D([], [], markersize=5, **style) for style in styles]
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(len(entries), columns),
        frameon=False,
        fontsize=8,
        handlelength=2.8,
    )


def byte_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most `most` + 1 round ticks in powers of 1024 between two counts of bytes."""
    unit = 1024.0 ** max(0, int(math.log(max(high, 1.0), 1024)))
    step = (high - low) / most / unit
    nice = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    step = next(nice * m for m in (1, 2, 5, 10) if nice * m >= step * (1 - 1e-9)) * unit
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step) + 1)]


def freeze(figure: Figure) -> None:
    """Lays a finished figure out, once and for all.

    A figure that owned the engine would be laid out and drawn once more for each file it is saved
    to, which takes as long as the saving.
    """
    ConstrainedLayoutEngine().execute(figure)


def png_bytes(figure: Figure, source: str, dpi: int = PNG_DPI) -> bytes:
    """The figure as PNG; `source` says in its metadata what it was made from."""
    buffer = io.BytesIO()
    figure.savefig(
        buffer,
        format="png",
        dpi=dpi,
        metadata={"Software": None, "Source": source},
        # Three quarters of the time that level 6 takes, for a tenth more bytes.
        pil_kwargs={"compress_level": 3},
    )
    return buffer.getvalue()


def svg_bytes(figure: Figure, source: str) -> bytes:
    """The figure as SVG, the same bytes every time."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Source": source})
    return buffer.getvalue()
