"""Tables that leave as Markdown and LaTeX say what their cells say, whatever these hold."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis.formats import LATEX_ESCAPES, latex_table, latex_text, markdown_table

NASTY = [
    "a_b & c % d # e $ f",
    "{x}^2~\\",
    "\\textbf{bold}",
    "[2em] after a row",
    "* after a row",
    "$\\frac{",
    "<script>alert(1)</script>",
    "a | b",
    'say "yes"',
    "new\nline\n\npar",
    "bell\x07",
    "--seeds - --- 'a''b' ,, ``c`` ?`",
    "5 % ± 1 − 2 × 3 · 4 … ⚠ Δ",
    "naïve Ünïcødé",
    "",
]


def plain(text):
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def read(latex):
    """What LaTeX sets; fails at a special character that no command accounts for."""
    commands = {chr(code): text for code, text in LATEX_ESCAPES.items()}
    by_length = sorted(commands.items(), key=lambda pair: -len(pair[1]))
    found, rest = "", latex.removeprefix("{}")
    while rest:
        for char, command in by_length:
            if rest.startswith(command):
                found, rest = found + char, rest[len(command) :]
                break
        else:
            if rest.startswith("{}"):  # sets nothing, and parts its neighbours
                rest = rest[2:]
                continue
            assert rest[0] not in "&%$#_{}~^\\`", f"{rest!r} in {latex!r}"
            assert rest[:2] not in ("--", "''", ",,"), f"{rest!r} in {latex!r} is one sign"
            found, rest = found + rest[0], rest[1:]
    return found


@pytest.mark.parametrize("text", NASTY)
def test_latex_sets_the_text_that_it_was_given(text):
    assert read(latex_text(text)) == plain(text)


@given(st.text() | st.text("-',`?!<>$\\{}[* a"))
def test_latex_sets_any_text(text):
    assert read(latex_text(text)) == plain(text)


def test_every_row_of_a_latex_table_has_its_cells_and_nothing_eats_the_next():
    table = latex_table(("name", "value"), [(text, "1") for text in NASTY], "100 % of #1")
    body = table.split("\\midrule\n")[1].split("\\bottomrule")[0]
    rows = body.splitlines()
    assert len(rows) == len(NASTY)
    for row, text in zip(rows, NASTY, strict=True):
        assert row.endswith(r" & 1 \\")
        cells = re.split(r"(?<!\\) & ", row.removesuffix(r" \\").removeprefix("  "))
        assert [read(cell) for cell in cells] == [plain(text), "1"]
        assert not row.lstrip().startswith(("[", "*"))
    assert r"\caption{100 \% of \#1}" in table
    assert table.count("{") - table.count(r"\{") == table.count("}") - table.count(r"\}")


def test_a_markdown_table_has_one_line_per_row_and_no_cell_opens_another_or_a_tag():
    lines = markdown_table(("name", "value"), [(text, "1") for text in NASTY]).splitlines()
    assert len(lines) == 2 + len(NASTY)
    for line in lines:
        assert len(re.findall(r"(?<!\\)\|", line)) == 3
        assert not re.search(r"(?<!\\)<", line)
