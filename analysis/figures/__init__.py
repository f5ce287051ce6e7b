"""The static figures of a report, all in one house style."""

from dataclasses import replace

from analysis.figures.learning_rate import draw_learning_rates
from analysis.figures.pareto import draw_pareto
from analysis.figures.rows import draw_differences
from analysis.figures.style import Drawing
from analysis.study import Comparable, Study


def draw_all(study: Study) -> list[Drawing]:
    """Every figure that the records allow, in the order of the report."""
    drawings = []
    for number, part in enumerate(study.comparables):
        suffix = f"_{number + 1}" if len(study.comparables) > 1 else ""
        drawings += [replace(d, name=f"{d.name}{suffix}") for d in draw_part(part)]
    return drawings


def draw_part(part: Comparable) -> list[Drawing]:
    """The figures of one comparison."""
    drawn = [draw_pareto(part), *draw_learning_rates(part), draw_differences(part)]
    return [drawing for drawing in drawn if drawing is not None]
