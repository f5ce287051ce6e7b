"""The static figures of a report, all in one house style."""

from dataclasses import replace

from analysis.figures.curves import draw_curves
from analysis.figures.learning_rate import draw_learning_rates
from analysis.figures.pareto import draw_pareto
from analysis.figures.rows import draw_differences
from analysis.figures.scaling import draw_scaling
from analysis.figures.style import Drawing
from analysis.figures.tradeoffs import draw_trade_offs
from analysis.study import Comparable, Study


def draw_all(study: Study) -> list[Drawing]:
    """Every figure that the records allow, in the order of the report."""
    drawings: list[Drawing] = []
    for number, part in enumerate(study.comparables):
        suffix = f"_{number + 1}" if len(study.comparables) > 1 else ""
        drawings += [replace(d, name=f"{d.name}{suffix}") for d in _draw_part(study, part)]
    scaling = draw_scaling(study)
    return [*drawings, scaling] if scaling else drawings


def _draw_part(study: Study, part: Comparable) -> list[Drawing]:
    drawn = [
        draw_pareto(part),
        *draw_learning_rates(part),
        draw_differences(part),
        draw_curves(part, study.sweep.curves),
        draw_trade_offs(part),
    ]
    return [drawing for drawing in drawn if drawing is not None]
