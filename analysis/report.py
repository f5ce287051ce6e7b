"""Writes a sweep's report: pages, figures, tables and claims, the same bytes every time."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from analysis import wording
from analysis.claims import claims_text
from analysis.cost_tables import csv_tables
from analysis.figures import draw_all
from analysis.figures.rows import differences_caption
from analysis.figures.style import Drawing, house_style, png_bytes, svg_bytes
from analysis.load import load_sweep, spec_value
from analysis.page import html_page
from analysis.rendering import (
    DIFFERENCE_HEADER,
    MAIN_HEADER,
    difference_text_rows,
    latex_table,
    main_rows,
    markdown_table,
)
from analysis.study import Comparable, Settings, Study, analyse


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportResult:
    """What was written.

    Attributes:
        folder: the report's folder.
        files: every file, relative to `folder`, in order.
        headline: the numbers that stand for the sweep, by name.
        study: the numbers behind the report.
    """

    folder: Path
    files: tuple[Path, ...]
    headline: dict[str, float | str]
    study: Study


def write_report(
    folder: Path,
    out: Path | None = None,
    *,
    title: str | None = None,
    context: dict[str, str] | None = None,
    settings: Settings | None = None,
    compare_within: tuple[str, ...] | None = None,
) -> ReportResult:
    """Writes the report on the records in `folder`.

    Args:
        folder: holds `trials.parquet`, and `curves.parquet` and `spec.json` where there are any.
        out: the report's folder, `report` in `folder` by default; files of an earlier report that
            this one does not have are removed.
        title: heading of the pages.
        context: further rows of the provenance table, by name.
        settings: baseline, margin and reference; `title` and `context` win over its own.
        compare_within: axes across which nothing is compared; those of `spec.json` by default.

    Raises:
        ValueError: the records are unreadable or cannot be compared, see `load_sweep`.
    """
    sweep = load_sweep(folder, compare_within=compare_within)
    study = analyse(sweep, _with_words(settings or Settings(), title, context))
    place = out or folder / "report"
    drawings = draw_all(study)
    contents: dict[str, bytes] = {}
    with house_style():
        for drawing in drawings:
            contents[f"figures/{drawing.name}.png"] = png_bytes(drawing.figure, _source(study))
            contents[f"figures/{drawing.name}.svg"] = svg_bytes(drawing.figure, _source(study))
    texts = {f"tables/{name}": text for name, text in csv_tables(study).items()}
    texts["tables/main.tex"] = _latex(study)
    texts["claims.json"] = claims_text(study)
    texts["report.md"] = markdown_page(study)
    texts["index.html"] = html_page(study, provenance(study), findings(study))
    contents |= {name: text.encode("utf-8") for name, text in texts.items()}
    return ReportResult(
        folder=place,
        files=_write(place, contents),
        headline=headline(study),
        study=study,
    )


def _with_words(settings: Settings, title: str | None, context: dict[str, str] | None) -> Settings:
    return Settings(
        baseline=settings.baseline,
        margin_nats=settings.margin_nats,
        reference_loss_nats=settings.reference_loss_nats,
        title=title if title is not None else settings.title,
        context=tuple((str(k), str(v)) for k, v in context.items())
        if context
        else settings.context,
    )


def _source(study: Study) -> str:
    return f"sweep {study.sweep.name}, records sha256 {study.sweep.digest}"


def _write(place: Path, contents: dict[str, bytes]) -> tuple[Path, ...]:
    """Replaces the report's own files in `place`; what is not a report's file stays."""
    for name in ("figures", "tables"):
        if (place / name).is_dir():
            shutil.rmtree(place / name)
    for name, content in contents.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tuple(Path(name) for name in sorted(contents))


def headline(study: Study) -> dict[str, float | str]:
    """Numbers that stand for the sweep; those of the first comparison where there are several."""
    numbers: dict[str, float | str] = {
        f"replicates_{state}": float(count) for state, count in study.sweep.accounting.rows()
    }
    part = next((part for part in study.comparables if part.front), None)
    if part is None:
        return numbers
    fast, good = part.front[0], part.front[-1]
    numbers |= {
        "arms": float(len(part.points)),
        "front_arms": float(len(part.front)),
        "best_loss_nats": good.loss,
        "best_loss_arm": good.arm.label,
        "fastest_tokens_per_second": fast.speed,
        "fastest_arm": fast.arm.label,
        "answer": wording.headline_sentence(part),
    }
    if part.hypervolume:
        numbers["hypervolume"] = part.hypervolume.of_means
    return numbers


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


def findings(study: Study) -> list[str]:
    """What the report concludes, one sentence each, every one a claim's statement."""
    sentences = []
    for part in study.comparables:
        prefix = f"{part.name}: " if part.name else ""
        sentences.append(prefix + wording.headline_sentence(part))
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
    for part in study.comparables:
        lines += _markdown_part(part, len(study.comparables) > 1)
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


def _markdown_part(part: Comparable, is_named: bool) -> list[str]:  # noqa: FBT001
    suffix = f" ({part.name})" if is_named else ""
    lines = [f"## Arms at their chosen learning rate{suffix}", ""]
    if part.facts:
        lines += [f"All arms: {part.facts}.", ""]
    lines += [markdown_table(MAIN_HEADER, main_rows(part)), ""]
    left_out = [point for point in part.points if point.left_out]
    lines += [f"- {wording.front_sentence(point)}" for point in left_out]
    edges = [p for p in part.points if p.choice and p.choice.edge]
    lines += [f"- {wording.choice_sentence(point)}" for point in edges]
    lines += [""] if left_out or edges else []
    if part.comparison and part.comparison.rows:
        lines += [f"## Differences to {part.comparison.baseline.label}{suffix}", ""]
        lines += [markdown_table(DIFFERENCE_HEADER, difference_text_rows(part)), ""]
        lines += [differences_caption(part.comparison), ""]
    return lines


def _latex(study: Study) -> str:
    tables = [
        latex_table(
            MAIN_HEADER,
            main_rows(part),
            f"{study.title}: arms at their chosen learning rate"
            + (f", {part.name}" if part.name else "")
            + ". Mean over seeds, half width of the 95 % t interval.",
        )
        for part in study.comparables
    ]
    return "\n".join(tables)


__all__ = ["Drawing", "ReportResult", "headline", "markdown_page", "write_report"]
