"""`report.md`, and what both pages say: provenance and findings."""

from analysis import wording
from analysis.figures.learning_rate import loss_limits
from analysis.figures.pareto_parts import pareto_alt, pareto_caption
from analysis.figures.rows import differences_caption
from analysis.load import spec_value
from analysis.next_runs import proposal_sentence, propose
from analysis.published import PUBLISHED_HEADER, published_section
from analysis.rendering import (
    DIFFERENCE_HEADER,
    MAIN_HEADER,
    difference_text_rows,
    main_rows,
    markdown_table,
)
from analysis.scaling import build_families, scaling_sentences
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
    rows.append(
        ("seeds", ", ".join(str(seed) for seed in seeds[:12]) + (" …" if len(seeds) > 12 else ""))
    )
    command = spec_value(sweep.spec, "command", None)
    if command:
        text = " ".join(map(str, command)) if isinstance(command, list) else str(command)
        rows.append(("command", text))
    rows.append(("records", f"sha256 {sweep.digest}"))
    return rows + list(study.settings.context)


def answers(study: Study) -> list[str]:
    """The answer of each comparison, or of the timings where only speed was measured."""
    if study.sweep.purpose == "measure":
        timed = scaling_sentences(build_families(study.sweep.trials))
        return timed or ["No arm is timed at two lengths yet."]
    return [
        (f"{part.name}: " if part.name else "") + wording.headline_sentence(part)
        for part in study.comparables
    ] or ["No replicate is desired: there is nothing to report."]


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
    return sentences


def markdown_page(study: Study) -> str:
    """`report.md`."""
    lines = [f"# {study.title}", ""]
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
        lines += _markdown_part(part, figure, study.settings.published)
    if build_families(study.sweep.trials):
        lines += ["![Training time against context length](figures/scaling.png)", ""]
    lines += [
        "## Provenance",
        "",
        markdown_table(("", ""), [list(row) for row in provenance(study)]),
    ]
    lines += [
        "",
        f"Regenerate: `python -m analysis FOLDER` on the folder of sweep {study.sweep.name}.",
    ]
    return "\n".join(lines) + "\n"


def _markdown_part(part: Comparable, figure: str, published: str | None) -> list[str]:
    suffix = f" ({part.name})" if part.name else ""
    lines = [f"## Arms at their chosen learning rate{suffix}", ""]
    if part.facts:
        lines += [f"All arms: {part.facts}.", ""]
    if part.drawn:
        lines += [f"![{pareto_alt(part)}](figures/pareto{figure}.png)", ""]
        lines += [pareto_caption(part), ""]
    lines += [markdown_table(MAIN_HEADER, main_rows(part)), ""]
    left_out = [point for point in part.points if point.left_out]
    lines += [f"- {wording.front_sentence(point)}" for point in left_out]
    edges = [p for p in part.points if p.choice and p.choice.edge]
    lines += [f"- {wording.choice_sentence(point)}" for point in edges]
    lines += [""] if left_out or edges else []
    if loss_limits(part) is not None:
        lines += [f"![Loss against learning rate](figures/learning_rate{figure}.png)", ""]
    if part.comparison and part.comparison.rows:
        lines += [f"## Differences to {part.comparison.baseline.label}{suffix}", ""]
        lines += [markdown_table(DIFFERENCE_HEADER, difference_text_rows(part)), ""]
        lines += [differences_caption(part.comparison), ""]
    if published:
        sentence, rows = published_section(part, published)
        lines += [f"## Beside published numbers{suffix}", "", sentence, ""]
        lines += [markdown_table(PUBLISHED_HEADER, rows), ""]
    proposals = [proposal_sentence(proposal) for proposal in propose(part)]
    if proposals:
        lines += [f"## What to run next{suffix}", "", *[f"- {text}" for text in proposals], ""]
    return lines
