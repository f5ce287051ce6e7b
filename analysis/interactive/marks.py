"""Marks and numbers as plotly writes them."""

import math
from typing import Any

import numpy as np

from analysis.figures.style import Look

Figure = dict[str, Any]


SYMBOLS = {
    "o": "circle",
    "s": "square",
    "^": "triangle-up",
    "D": "diamond",
    "v": "triangle-down",
    "P": "cross",
    "h": "hexagon",
    "<": "triangle-left",
    "p": "pentagon",
    ">": "triangle-right",
    "*": "star",
    "8": "octagon",
}


DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}


def dash(look: Look) -> str:
    """The look's line style in plotly's words."""
    return DASHES.get(look.line, "longdashdot") if isinstance(look.line, str) else "longdashdot"


def mark(look: Look, *, size: int, is_single: bool) -> Figure:
    """A mark in the arm's look; hollow where one seed stands behind it, and only there."""
    face = "PAPER" if is_single else look.color
    line = {"color": look.color, "width": 1.5 if is_single else 0}
    return {"symbol": SYMBOLS[look.mark], "size": size, "color": face, "line": line}


def rounded(values: Any) -> list[float | None]:
    """Seven digits, enough for any screen; null where not finite."""
    return [
        float(f"{v:.7g}") if math.isfinite(v) else None for v in np.asarray(values, dtype=float)
    ]
