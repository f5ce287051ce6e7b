"""Writes a sweep's report: pages, figures, tables and claims, the same bytes every time."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from analysis.answers import answers
from analysis.claims import claims_text
from analysis.cost_tables import csv_tables
from analysis.figures import draw_all
from analysis.figures.style import house_style, png_bytes, svg_bytes
from analysis.formats import latex_table
from analysis.load import load_sweep
from analysis.markdown import findings, markdown_page, provenance
from analysis.page import html_page
from analysis.rendering import MAIN_HEADER, main_rows
from analysis.run_links import find_run_links
from analysis.study import Settings, Study, analyse


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


FILE_LIST = "files.txt"
"""What a report wrote, one path a line, so that the next one removes these and nothing else."""


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
        ValueError: the records are unreadable or cannot be compared, see `load_sweep`, or the
            report's folder cannot be written.
    """
    sweep = load_sweep(folder, compare_within=compare_within)
    study = analyse(sweep, _with_words(settings or Settings(), title, context))
    place = out or folder / "report"
    links = find_run_links(folder, place)
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
    texts["index.html"] = html_page(study, provenance(study), findings(study), links)
    texts[FILE_LIST] = "".join(f"{name}\n" for name in sorted({*contents, *texts, FILE_LIST}))
    contents |= {name: text.encode("utf-8") for name, text in texts.items()}
    return ReportResult(
        folder=place,
        files=_write(place, contents),
        headline=headline(study),
        study=study,
    )


def _with_words(settings: Settings, title: str | None, context: dict[str, str] | None) -> Settings:
    return replace(
        settings,
        title=title if title is not None else settings.title,
        context=tuple((str(k), str(v)) for k, v in context.items())
        if context
        else settings.context,
    )


def _source(study: Study) -> str:
    return f"sweep {study.sweep.name}, records sha256 {study.sweep.digest}"


def _write(place: Path, contents: dict[str, bytes]) -> tuple[Path, ...]:
    """Replaces the report's own files in `place`; what is not a report's file stays."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        return _replace(place, contents)
    except OSError as error:
        raise ValueError(f"{place} cannot be written: {error.strerror or error}") from error


def _replace(place: Path, contents: dict[str, bytes]) -> tuple[Path, ...]:
    for old in _listed(place) - contents.keys():
        (place / old).unlink(missing_ok=True)
    for name, content in contents.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tuple(Path(name) for name in sorted(contents))


def _listed(place: Path) -> set[str]:
    """Figures and tables that an earlier report in `place` wrote, by its own list."""
    path = place / FILE_LIST
    names = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    # Whatever the list has become, nothing outside these two folders is removed.
    return {name for name in names if re.fullmatch(r"(figures|tables)/[^/]+", name)}


def headline(study: Study) -> dict[str, float | str]:
    """Numbers that stand for the sweep; those of the first comparison where there are several."""
    numbers: dict[str, float | str] = {
        f"replicates_{state}": float(count) for state, count in study.sweep.accounting.rows()
    }
    numbers["answer"] = answers(study)[0]
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
    }
    if part.hypervolume:
        numbers["hypervolume"] = part.hypervolume.of_means
    return numbers


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
