"""`report.md`, and what both pages say: provenance and findings."""

import json
from typing import Any

from analysis import wording
from analysis.answers import answers, question
from analysis.budgets import matched_losses
from analysis.figures.learning_rate import loss_limits
from analysis.figures.pareto_parts import pareto_alt, pareto_caption
from analysis.figures.rows import differences_caption
from analysis.formats import markdown_table
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
from analysis.scaling import build_families
from analysis.spec import spec_value
from analysis.study import Comparable, Study


def provenance(study: Study) -> list[tuple[str, str]]:
    """What the report was made from, as rows of name and value."""
    sweep = study.sweep
    trials = sweep.trials
    rows = [("sweep", sweep.name), ("purpose", sweep.purpose)]
    for name, column in (
        ("device", "device_name"),
        ("precision", "precision"),
        ("data id", "data_id"),
        ("evaluation set", "eval_id"),
        ("commit", "git_commit"),
        ("torch", "torch_version"),
        ("kernels", "kernel_impl"),
    ):
        values = sorted(str(value) for value in trials[column].dropna().unique())
        if values:
            more = f" and {len(values) - 3} more" if len(values) > 3 else ""
            rows.append((name, ", ".join(values[:3]) + more))
    seeds = sorted({int(seed) for seed in trials["seed"]})
    rows += _sources(sweep.spec)
    rows.append(
        ("seeds", ", ".join(str(seed) for seed in seeds[:12]) + (" …" if len(seeds) > 12 else ""))
    )
    rows.append(("records", f"sha256 {sweep.digest}"))
    return rows + list(study.settings.context)


PACKAGES = ("torch", "triton", "numpy", "ray", "hydra-core", "mlflow")
"""Packages whose versions bear on the numbers; the sweep's `spec.json` has all."""


def _sources(spec: dict[str, Any]) -> list[tuple[str, str]]:
    """Configuration, command and versions that `spec.json` names, as rows of name and value."""
    origin = spec_value(spec, "provenance", None) or {}
    rows = []
    command = origin.get("command") or spec_value(spec, "command", None)
    if command:
        rows.append(
            ("command", " ".join(map(str, command)) if isinstance(command, list) else str(command))
        )
    for name in ("base", "axes", "exclude"):
        value = spec_value(spec, name, None)
        if value:
            rows.append((name, json.dumps(value, ensure_ascii=False)))
    packages = origin.get("packages") or {}
    versions = [f"{name} {packages[name]}" for name in PACKAGES if name in packages]
    if origin.get("python"):
        versions.insert(0, f"Python {origin['python']}")
    if versions:
        rows.append(("versions", ", ".join(versions)))
    if origin.get("code_digest"):
        rows.append(("code", f"sha256 {origin['code_digest']}"))
    return rows


def regenerate(study: Study) -> str:
    """How to get the sweep and this report again."""
    command = dict(_sources(study.sweep.spec)).get("command")
    sweep = f"`{command}` runs what is missing of the sweep; " if command else ""
    return f"{sweep}`python -m analysis FOLDER` writes this report from the sweep's folder."


def findings(study: Study) -> list[str]:
    """What the report concludes, one sentence each, every one a claim's statement."""
    sentences = answers(study)
    for part in study.comparables:
        prefix = f"{part.name}: " if part.name else ""
        if part.hypervolume:
            sentences.append(prefix + wording.hypervolume_sentence(part.hypervolume))
        if part.comparison:
            rows = sorted(part.comparison.rows, key=lambda row: row.loss_gap)
            sentences += [
                prefix + wording.difference_sentence(row, part.comparison) for row in rows[:24]
            ]
        sentences += [
            prefix + wording.routing_sentence(delta, study.settings.margin_nats)
            for delta in part.routing
        ]
    return sentences


def markdown_page(study: Study) -> str:
    """`report.md`."""
    lines = [f"# {study.title}", "", question(study), "", " ".join(answers(study)), ""]
    lines += ["## Where every replicate went", ""]
    states = [
        [state.replace("_", " "), str(count)] for state, count in study.sweep.accounting.rows()
    ]
    lines += [markdown_table(("state", "replicates"), states), ""]
    lines += [f"- {note}" for note in study.sweep.notes] + ([""] if study.sweep.notes else [])
    lines += ["## Findings", "", *[f"- {sentence}" for sentence in findings(study)], ""]
    for number, part in enumerate(study.comparables, start=1):
        if study.sweep.purpose == "measure" and not part.has_losses:
            continue
        figure = f"_{number}" if len(study.comparables) > 1 else ""
        lines += _markdown_part(part, figure, study)
    if build_families(study.sweep.trials):
        lines += ["![Training time against context length](figures/scaling.png)", ""]
    lines += [
        "## Provenance",
        "",
        markdown_table(("", ""), [list(row) for row in provenance(study)]),
    ]
    lines += ["", f"Regenerate: {regenerate(study)}"]
    return "\n".join(lines) + "\n"


def _markdown_part(part: Comparable, figure: str, study: Study) -> list[str]:
    suffix = f" ({part.name})" if part.name else ""
    lines = [f"## Arms at their chosen learning rate{suffix}", ""]
    if part.facts:
        lines += [f"All arms: {part.facts}.", ""]
    if part.drawn:
        lines += [f"![{pareto_alt(part)}](figures/pareto{figure}.png)", ""]
        lines += [pareto_caption(part), ""]
    lines += [markdown_table(MAIN_HEADER, main_rows(part)), "", MAIN_CAPTION, ""]
    left_out = [point for point in part.points if point.left_out]
    lines += [f"- {wording.front_sentence(point)}" for point in left_out]
    edges = wording.edge_sentences(part)
    lines += [f"- {sentence}" for sentence in edges]
    lines += [""] if left_out or edges else []
    if loss_limits(part) is not None:
        lines += [f"![Loss against learning rate](figures/learning_rate{figure}.png)", ""]
    if part.comparison and part.comparison.rows:
        lines += [f"## Differences to {part.comparison.baseline.label}{suffix}", ""]
        lines += [markdown_table(DIFFERENCE_HEADER, difference_text_rows(part)), ""]
        lines += [differences_caption(part.comparison), ""]
    lines += _markdown_more(part, suffix, study)
    return lines


def _markdown_more(part: Comparable, suffix: str, study: Study) -> list[str]:
    """Tables that not every sweep has: routing, equal cost, published numbers, proposals."""
    lines = []
    if part.routing:
        lines += [f"## What routing changes{suffix}", ""]
        lines += [markdown_table(ROUTING_HEADER, routing_rows(part)), "", ROUTING_CAPTION, ""]
    equal, unknown = equal_cost(matched_losses(part.points, study.sweep.curves))
    if equal or unknown:
        lines += [f"## Loss at equal cost{suffix}", ""]
    if equal:
        lines += [markdown_table(EQUAL_COST_HEADER, equal), "", EQUAL_COST_CAPTION, ""]
    if unknown:
        lines += [*[f"- {sentence}" for sentence in unknown], ""]
    if study.settings.published:
        sentence, rows = published_section(part, study.settings.published)
        lines += [f"## Beside published numbers{suffix}", "", sentence, ""]
        lines += [markdown_table(PUBLISHED_HEADER, rows), ""]
    proposals = [proposal_sentence(proposal) for proposal in propose(part)]
    if proposals:
        lines += [f"## What to run next{suffix}", "", *[f"- {text}" for text in proposals], ""]
    return lines
