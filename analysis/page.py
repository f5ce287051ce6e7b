"""`index.html`: one file that opens without a network, in light and dark, on a phone."""

import html
import json
from collections.abc import Sequence
from typing import Any

from plotly.offline import get_plotlyjs

from analysis.answers import answers, question
from analysis.assets import SCRIPT, STYLE
from analysis.budgets import matched_losses
from analysis.figures.curves import build_curves, curves_caption
from analysis.figures.pareto_parts import pareto_caption
from analysis.figures.relative_rate import RELATIVE_CAPTION
from analysis.figures.rows import differences_caption
from analysis.figures.scaling import scaling_caption
from analysis.interactive.costs import curves_figure, scaling_figures, trade_off_figure
from analysis.interactive.learning_rate import rate_figures
from analysis.interactive.pareto import pareto_figure
from analysis.interactive.rows import difference_figure
from analysis.markdown import regenerate
from analysis.next_runs import proposal_sentence, propose
from analysis.published import PUBLISHED_HEADER, published_section
from analysis.rendering import (
    DIFFERENCE_HEADER,
    EQUAL_COST_CAPTION,
    EQUAL_COST_HEADER,
    MAIN_CAPTION,
    MAIN_HEADER,
    ROUTING_CAPTION,
    ROUTING_HEADER,
    difference_text_rows,
    equal_cost,
    main_rows,
    routing_rows,
)
from analysis.run_links import RunLinks
from analysis.scaling import build_families
from analysis.study import Comparable, Study
from analysis.tradeoffs import trade_offs
from analysis.wording import edge_sentences, front_sentence

RATE_CAPTION = (
    "Mean over seeds with 95 % t intervals from 3 seeds; small dots are seeds, the large ringed "
    "mark is the chosen rate, × with k/n are seeds that diverged. All panels share the loss axis, "
    "which does not start at 0."
)
TRADE_CAPTION = (
    "Each arm at its chosen learning rate; the line is the front of that cost and loss, its "
    "members are ringed and named. The loss axis does not start at 0."
)


def html_page(
    study: Study,
    provenance: Sequence[tuple[str, str]],
    findings: Sequence[str],
    links: RunLinks | None = None,
) -> str:
    """The page as text.

    Args:
        study: the numbers.
        provenance: rows of name and value.
        findings: sentences that the report concludes.
        links: where the runs can be looked at.
    """
    links = links or RunLinks()
    figures: dict[str, Any] = {}
    body = [_head(study)]
    for number, part in enumerate(study.comparables):
        if study.sweep.purpose == "measure" and not part.has_losses:
            continue
        key = f"p{number}"
        body += _part(part, key, figures, links)
        body += _costs(part, key, study, figures)
    body += [
        *_shared(study, figures),
        _section("Findings", _list(findings)),
        _section("Provenance", _table((), provenance, is_wide=False) + _regenerate(study)),
    ]
    # In a script element only this sequence could end it early.
    data = json.dumps(figures, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c")
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{html.escape(study.title)}</title>",
            f"<style>{STYLE}</style></head><body><main>",
            *body,
            "</main>",
            f'<script type="application/json" id="figures">{data}</script>',
            f"<script>{get_plotlyjs()}</script>",
            f"<script>{SCRIPT}</script>",
            "</body></html>",
            "",
        ]
    )


def _regenerate(study: Study) -> str:
    # Commands stand between backticks, as in the Markdown report.
    parts = [html.escape(part) for part in regenerate(study).split("`")]
    text = "".join(f"<code>{p}</code>" if i % 2 else p for i, p in enumerate(parts))
    return f"<p>To regenerate: {text}</p>"


def _head(study: Study) -> str:
    lines = [f"<header><h1>{html.escape(study.title)}</h1>"]
    lines.append(f'<p class="question">{html.escape(question(study))}</p>')
    lines += [f'<p class="answer">{html.escape(text)}</p>' for text in answers(study)]
    counts = study.sweep.accounting.rows()
    states = [state.replace("_", " ") for state, _ in counts]
    lines.append(_table(("replicates", *states), [("", *(str(count) for _, count in counts))]))
    return "\n".join([*lines, _list(study.sweep.notes), "</header>"])


def _part(part: Comparable, key: str, figures: dict[str, Any], links: RunLinks) -> list[str]:
    suffix = f" · {part.name}" if part.name else ""
    sections = []
    facts = f'<p class="facts">{html.escape(part.facts)}</p>' if part.facts else ""
    pareto = pareto_figure(part, links)
    if pareto:
        figures[f"{key}-pareto"] = pareto
        sections.append(
            _section(
                f"Loss against throughput{suffix}",
                facts + _figure(f"{key}-pareto", pareto_caption(part), "tall", has_detail=True),
            )
        )
    sections.append(_section(f"Arms at their chosen learning rate{suffix}", _main(part)))
    panels = rate_figures(part)
    if panels:
        boxes = []
        for index, (name, figure, relative) in enumerate(panels):
            figures[f"{key}-rate{index}"] = figure
            box = (
                f'<h3>{html.escape(name)}</h3><div class="plot small" id="{key}-rate{index}"></div>'
            )
            if relative:
                figures[f"{key}-relative{index}"] = relative
                box += f'<div class="plot low" id="{key}-relative{index}"></div>'
            boxes.append(f'<div class="panel">{box}</div>')
        has_relative = any(relative for *_, relative in panels)
        caption = f"{RATE_CAPTION} {RELATIVE_CAPTION}" if has_relative else RATE_CAPTION
        content = f'<div class="panels">{"".join(boxes)}</div>' + _caption(caption)
        sections.append(_section(f"Loss against learning rate{suffix}", content))
    rows = difference_figure(part)
    if rows and part.comparison:
        figures[f"{key}-rows"] = rows
        content = _figure(f"{key}-rows", differences_caption(part.comparison), "rows")
        content += _table(DIFFERENCE_HEADER, difference_text_rows(part))
        title = f"Differences to {part.comparison.baseline.label}{suffix}"
        sections.append(_section(title, content))
    if part.routing:
        content = _table(ROUTING_HEADER, routing_rows(part)) + _caption(ROUTING_CAPTION)
        sections.append(_section(f"What routing changes{suffix}", content))
    return sections


def _costs(part: Comparable, key: str, study: Study, figures: dict[str, Any]) -> list[str]:
    """Curves and fronts of other costs of one comparison."""
    suffix = f" · {part.name}" if part.name else ""
    sections = []
    built = build_curves(part, study.sweep.curves)
    curves = curves_figure(part, study.sweep.curves)
    if curves:
        figures[f"{key}-curves"] = curves
        content = _figure(f"{key}-curves", curves_caption(built, len(part.points)), "tall")
        sections.append(_section(f"Loss over training{suffix}", content))
    equal, unknown = equal_cost(matched_losses(part.points, study.sweep.curves))
    if equal or unknown:
        table = _table(EQUAL_COST_HEADER, equal) + _caption(EQUAL_COST_CAPTION) if equal else ""
        content = table + _list(unknown)
        sections.append(_section(f"Loss at equal cost{suffix}", content))
    boxes = []
    for index, trade in enumerate(trade_offs(part)):
        figures[f"{key}-trade{index}"] = trade_off_figure(trade, part)
        boxes.append(f'<div class="plot medium" id="{key}-trade{index}"></div>')
    if boxes:
        content = f'<div class="panels">{"".join(boxes)}</div>' + _caption(TRADE_CAPTION)
        sections.append(_section(f"Loss against other costs{suffix}", content))
    if study.settings.published:
        sentence, rows = published_section(part, study.settings.published)
        content = f"<p>{html.escape(sentence)}</p>" + _table(PUBLISHED_HEADER, rows)
        sections.append(_section(f"Beside published numbers{suffix}", content))
    proposals = [proposal_sentence(proposal) for proposal in propose(part)]
    if proposals:
        sections.append(_section(f"What to run next{suffix}", _list(proposals)))
    return sections


def _shared(study: Study, figures: dict[str, Any]) -> list[str]:
    """Sections across comparisons."""
    families = build_families(study.sweep.trials)
    found = scaling_figures(families)
    if not found:
        return []
    boxes = []
    for index, figure in enumerate(found):
        figures[f"scaling{index}"] = figure
        boxes.append(f'<div class="plot large" id="scaling{index}"></div>')
    content = f'<div class="panels">{"".join(boxes)}</div>' + _caption(scaling_caption(families))
    return [_section("Against context length", content)]


def _main(part: Comparable) -> str:
    left_out = [front_sentence(point) for point in part.points if point.left_out]
    return (
        _table(MAIN_HEADER, main_rows(part))
        + _caption(MAIN_CAPTION)
        + _list(left_out + edge_sentences(part))
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def _figure(name: str, caption: str, kind: str, *, has_detail: bool = False) -> str:
    detail = f'<div class="detail" id="{name}-detail" aria-live="polite"></div>'
    plot = f'<div class="plot {kind}" id="{name}"></div>'
    return plot + (detail if has_detail else "") + _caption(caption)


def _caption(text: str) -> str:
    return f'<p class="caption">{html.escape(text)}</p>'


def _list(sentences: Sequence[str]) -> str:
    if not sentences:
        return ""
    items = "".join(f"<li>{html.escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, is_wide: bool = True) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    kind = "wide" if is_wide else "narrow"
    top = f"<thead><tr>{head}</tr></thead>" if header else ""
    return f'<div class="scroll"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'
