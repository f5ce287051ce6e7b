"""Tables as text for reading: rows of words, Markdown and LaTeX."""

import math
from collections.abc import Sequence

from analysis.front import Point
from analysis.study import Comparable
from analysis.wording import arm_rate, bytes_text, count_text, loss_text, p_text, share_text, signed

MAIN_HEADER = (
    "arm",
    "learning rate",
    "n",
    "final loss, nats",
    "held-out",
    "tokens/s",
    "memory",
    "front",
    "on front",
    "diverged",
)


def main_rows(part: Comparable) -> list[list[str]]:
    """The main table as text, best loss first; arms without a loss last."""
    return [
        _main_row(point)
        for point in sorted(part.points, key=lambda p: (math.isnan(p.loss), p.loss))
    ]


def _main_row(point: Point) -> list[str]:
    choice = point.choice
    held_out = choice.held_out if choice else None
    flag = " ⚠" if choice and choice.edge else ""
    memory = choice.cell.measures["peak_memory_bytes"] if choice else math.nan
    return [
        point.arm.label,
        f"{arm_rate(point.arm, choice)}{flag}" if choice else "–",
        str(point.n),
        loss_text(point.loss, point.loss_interval),
        "–" if held_out is None else f"{held_out:.4f}",
        count_text(point.speed),
        bytes_text(memory),
        "yes" if point.on_front else "left out" if point.left_out else "no",
        share_text(point.front_probability),
        f"{point.arm.num_diverged}/{point.arm.num_ended}",
    ]


DIFFERENCE_HEADER = (
    "arm",
    "Δ loss, nats",
    "95 % interval",
    "pairs",
    "test",
    "Holm p",
    "verdict",
    "speed ratio",
)


def difference_text_rows(part: Comparable) -> list[list[str]]:
    """Differences to the baseline as text, best first."""
    if part.comparison is None:
        return []
    rows = []
    for entry in sorted(part.comparison.rows, key=lambda row: row.loss_gap):
        test = entry.loss
        ratio = entry.speed_ratio
        rows.append(
            [
                entry.arm.label,
                signed(entry.loss_gap),
                f"{signed(test.low)} … {signed(test.high)}" if test else "–",
                str(entry.pairs),
                test.method if test else "not tested",
                p_text(entry.p_holm),
                entry.verdict,
                "–" if ratio is None else f"{ratio.mean:.3f}×",
            ]
        )
    return rows


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; pipes in cells are escaped."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


LATEX_ESCAPES = str.maketrans(
    {
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "\\": r"\textbackslash{}",
        "±": r"$\pm$",
        "·": r"$\cdot$",
        "−": r"$-$",
        "×": r"$\times$",
        "–": "--",
        "…": r"\ldots{}",
        "⚠": r"$^\dagger$",
        "Δ": r"$\Delta$",
    }
)


def latex_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A `booktabs` table; every special character is escaped."""
    columns = "l" + "r" * (len(header) - 1)

    def line(cells: Sequence[str]) -> str:
        return "  " + " & ".join(cell.translate(LATEX_ESCAPES) for cell in cells) + r" \\"

    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{caption.translate(LATEX_ESCAPES)}}}",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            line(header),
            r"\midrule",
            *[line(row) for row in rows],
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )
