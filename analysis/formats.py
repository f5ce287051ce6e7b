"""Tables in the formats that they leave in: Markdown and LaTeX, with every cell as it reads."""

import re
from collections.abc import Sequence

MARKDOWN_ESCAPES = str.maketrans({"|": r"\|", "<": r"\<", "`": r"\`"})


def _one_line(cell: str) -> str:
    """The cell without line breaks and control characters, which would end a row or a run."""
    return " ".join("".join(c if c.isprintable() else " " for c in cell).split())


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; what a cell could open, a column or a tag, is escaped."""

    def line(cells: Sequence[str]) -> str:
        shown = [_one_line(cell).translate(MARKDOWN_ESCAPES) for cell in cells]
        return "| " + " | ".join(shown) + " |"

    return "\n".join([line(header), "|" + " --- |" * len(header), *[line(row) for row in rows]])


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
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        "±": r"$\pm$",
        "·": r"$\cdot$",
        "−": r"$-$",
        "×": r"$\times$",
        "`": r"\textasciigrave{}",
        "–": r"\textendash{}",
        "…": r"\ldots{}",
        "⚠": r"$^\dagger$",
        "Δ": r"$\Delta$",
    }
)


def latex_text(text: str) -> str:
    """Text as LaTeX sets it; every special character is escaped."""
    escaped = _one_line(text).translate(LATEX_ESCAPES)
    # Two of these are one sign of LaTeX's: a dash, a quotation mark.
    escaped = re.sub(r"([-',])(?=\1)", r"\1{}", escaped)
    # After the end of a row these would be read as that command's own.
    return "{}" + escaped if escaped.startswith(("[", "*")) else escaped


def latex_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> str:
    """A table for a document that loads `booktabs`."""
    columns = "l" + "r" * (len(header) - 1)

    def line(cells: Sequence[str]) -> str:
        return "  " + " & ".join(latex_text(cell) for cell in cells) + r" \\"

    return "\n".join(
        [
            r"% \usepackage{booktabs}",
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{latex_text(caption)}}}",
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
