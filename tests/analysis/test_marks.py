"""Joint regions, held-out ghosts, hollow marks and colours, read back from what is drawn."""

import dataclasses

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.patches import Polygon
from scipy import stats as scipy_stats

from analysis.figures.learning_rate import draw_learning_rates
from analysis.figures.pareto import draw_pareto
from analysis.figures.pareto_parts import axis_limits, held_out_shift
from analysis.figures.relative_rate import relative_line
from analysis.figures.scaling import draw_scaling, shown_quantities
from analysis.figures.style import INK, MIXER_COLORS, SPARE_COLORS, readable
from analysis.interactive.learning_rate import rate_figures
from analysis.load import load_sweep
from analysis.samples import joint_region
from analysis.scaling import build_families
from analysis.study import analyse


def make_part(made, folder, rows):
    return analyse(load_sweep(made.write_folder(folder, rows))).comparables[0]


def t_squared(points, center):
    """Hotelling's T² of `points` [n, 2] against `center`."""
    gap = points.mean(axis=0) - center
    return float(len(points) * gap @ np.linalg.solve(np.cov(points.T), gap))


@pytest.mark.parametrize("n", [3, 5, 8])
def test_every_corner_of_a_joint_region_has_hotellings_critical_t_squared(n):
    points = np.random.default_rng(n).multivariate_normal([100, 3], [[4, 0.05], [0.05, 0.01]], n)
    critical = 2 * (n - 1) / (n - 2) * scipy_stats.f.ppf(0.95, 2, n - 2)
    outline = joint_region(points[:, 0], points[:, 1])
    assert np.allclose(outline[0], outline[-1])
    found = [t_squared(points, corner) for corner in outline]
    assert found == pytest.approx([critical] * len(outline), rel=1e-6)


def test_joint_regions_of_five_seeds_cover_the_true_means_in_95_percent():
    rng = np.random.default_rng(5)
    draws = rng.multivariate_normal([0, 0], [[1, 0.7], [0.7, 1]], (2000, 5))
    critical = 2 * 4 / 3 * scipy_stats.f.ppf(0.95, 2, 3)
    inside = np.mean([t_squared(points, np.zeros(2)) <= critical for points in draws])
    # Three standard errors of a share of 0.95 over 2,000 draws.
    assert inside == pytest.approx(0.95, abs=3 * np.sqrt(0.95 * 0.05 / 2000))


def test_a_quantity_that_never_varies_has_a_region_without_width():
    outline = joint_region(np.array([5.0, 5.0, 5.0, 5.0, 5.0]), np.array([1.0, 2, 3, 4, 5]))
    assert np.ptp(outline[:, 0]) == pytest.approx(0.0, abs=1e-9)
    assert np.ptp(outline[:, 1]) > 1


@pytest.mark.parametrize(("seeds", "regions"), [((0, 1, 2, 3), 0), ((0, 1, 2, 3, 4), 2)])
def test_regions_are_drawn_from_five_seeds_and_lie_inside_the_axes(made, tmp_path, seeds, regions):
    plan = made.Plan(
        arms=[("softmax", "pure", "adamw"), ("deltanet", "pure", "adamw")],
        rates=(3e-3,),
        seeds=seeds,
    )
    part = make_part(made, tmp_path, made.make_trials(plan))
    axes = draw_pareto(part).figure.axes[0]
    drawn = [patch for patch in axes.patches if isinstance(patch, Polygon)]
    assert len(drawn) == regions
    (left, right), (low, high), _ = axis_limits(part.drawn)
    for patch in drawn:
        x, y = patch.get_xy().T
        assert left < x.min() < x.max() < right
        assert low < y.min() < y.max() < high


def test_the_ghost_stands_at_the_held_out_loss_and_only_where_choosing_flatters(made, tmp_path):
    plan = made.Plan(
        arms=[("softmax", "pure", "adamw"), ("deltanet", "pure", "adamw")], rates=(1e-3, 3e-3)
    )
    rows = made.make_trials(plan)
    flip = {
        (1e-3, 0): 6.0,
        (1e-3, 1): 6.3,
        (1e-3, 2): 6.2,
        (3e-3, 0): 6.3,
        (3e-3, 1): 6.1,
        (3e-3, 2): 6.2,
    }
    for row in rows:
        if row["mixer"] == "softmax":
            row["val_loss_nats"] = flip[row["lr"], row["seed"]]
    part = make_part(made, tmp_path, rows)
    points = {point.arm.fact("mixer"): point for point in part.drawn}
    assert held_out_shift(points["deltanet"]) is None
    choice = points["softmax"].choice
    axes = draw_pareto(part).figure.axes[0]
    ghosts = [line.get_ydata()[0] for line in axes.lines if line.get_marker() == "_"]
    assert ghosts == [pytest.approx(choice.held_out)]


def test_other_rates_are_ghosts_in_the_arms_own_mark(made, tmp_path):
    plan = made.Plan(arms=[("deltanet", "hybrid", "adamw")], rates=(1e-3, 3e-3, 1e-2))
    part = make_part(made, tmp_path, made.make_trials(plan))
    axes = draw_pareto(part).figure.axes[0]
    ghosts = [
        line for line in axes.lines if line.get_marker() == "s" and len(line.get_xdata()) == 2
    ]
    chosen = part.drawn[0].choice.cell
    others = [cell.mean_loss for cell in part.drawn[0].arm.cells if cell is not chosen]
    assert list(ghosts[0].get_ydata()) == pytest.approx(others)


def test_the_second_row_puts_every_optimizers_best_at_one_and_zero(made, tmp_path):
    plan = made.Plan(arms=[("softmax", "pure", "adamw"), ("softmax", "pure", "muon")])
    part = make_part(made, tmp_path, made.make_trials(plan))
    for point in part.points:
        best = point.choice.cell
        line = relative_line(point)
        assert (1.0, 0.0, 3) in line
        for (ratio, rise, n), cell in zip(line, point.arm.cells, strict=True):
            assert ratio == pytest.approx(cell.lr / best.lr)
            assert rise == pytest.approx(cell.mean_loss - best.mean_loss)
            assert n == cell.n
    drawing = draw_learning_rates(part)[0]
    assert len(drawing.figure.axes) == 2
    assert "Second rows" in drawing.caption


def test_one_optimizer_has_no_second_row(made, tmp_path):
    plan = made.Plan(arms=[("softmax", "pure", "adamw"), ("linear", "pure", "adamw")])
    drawing = draw_learning_rates(make_part(made, tmp_path, made.make_trials(plan)))[0]
    assert len(drawing.figure.axes) == 2
    assert "Second rows" not in drawing.caption


def length_rows(made, seeds):
    rows = []
    for length in (1024, 2048, 4096):
        plan = made.Plan(
            arms=[("softmax", "pure", "adamw"), ("deltanet", "pure", "adamw")],
            rates=(1e-3,),
            seeds=seeds,
        )
        for row in made.make_trials(plan):
            row["seq_len"] = length
            for key in ("arm_id", "cell_id", "replicate_id"):
                row[key] += f"-{length}"
            row["decode_tokens_per_second"] = 1e6 / length
            rows.append(row)
            if length == 4096 and row["mixer"] == "softmax":
                row.update(status="failed", failure_class="oom_gpu", tokens_per_second=None)
    return rows


@pytest.mark.parametrize(("seeds", "is_hollow"), [((0,), True), ((0, 1), False)])
def test_marks_against_length_are_hollow_for_one_seed_and_nothing_else(
    made, tmp_path, seeds, is_hollow
):
    folder = made.write_folder(
        tmp_path, length_rows(made, seeds), None, {"name": "l", "compare_within": ["seq_len"]}
    )
    study = analyse(load_sweep(folder))
    drawing = draw_scaling(study)
    faces = {
        line.get_markerfacecolor() == "white"
        for axes in drawing.figure.axes
        for line in axes.lines
        if line.get_marker() in ("o", "s", "^", "D")
    }
    carets = [
        line
        for axes in drawing.figure.axes
        for line in axes.lines
        if line.get_transform() == axes.get_xaxis_transform()
    ]
    assert faces == {is_hollow}
    assert len(carets) == 2
    assert "did not fit in memory" in drawing.caption


def test_state_and_cache_grow_with_length_and_decoding_is_drawn(made, tmp_path):
    folder = made.write_folder(
        tmp_path, length_rows(made, (0,)), None, {"name": "l", "compare_within": ["seq_len"]}
    )
    families = {f.mixer: f for f in build_families(load_sweep(folder).trials)}
    soft, delta = families["softmax"], families["deltanet"]
    assert soft.measures["held_bytes"] == pytest.approx(768 * soft.lengths)
    assert delta.measures["held_bytes"] == pytest.approx([24_576] * 3)
    names = [quantity.attribute for quantity in shown_quantities(tuple(families.values()))]
    assert names == ["peak_memory_bytes", "held_bytes", "decode_tokens_per_second"]


def contrast(first, second):
    def luminance(color):
        linear = [
            v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in to_rgb(color)
        ]
        return float(np.dot((0.2126, 0.7152, 0.0722), linear))

    light, dark = sorted((luminance(first), luminance(second)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("paper", ["#ffffff", "#14171b"])
def test_text_in_an_arms_colour_can_be_read(paper):
    for color in (*MIXER_COLORS.values(), *SPARE_COLORS):
        assert contrast(readable(color, paper), paper) >= 4.5
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert readable(INK) == INK


def test_the_page_has_the_rates_over_the_best_where_the_figure_has(made, tmp_path):
    arms = [("softmax", "pure", "adamw"), ("softmax", "pure", "muon"), ("linear", "pure", "adamw")]
    folder = made.write_folder(tmp_path, made.make_trials(made.Plan(arms=arms)))
    part = analyse(load_sweep(folder)).comparables[0]
    relative = {name: figure for name, _, figure in rate_figures(part)}
    assert [len(figure["data"]) for figure in relative.values()] == [2, 1]
    for trace in relative["Softmax"]["data"]:
        best = trace["x"].index(1.0)
        assert trace["y"][best] == 0.0 == min(y for y in trace["y"] if y is not None)
    alone = [point for point in part.points if point.arm.fact("optimizer") == "adamw"]
    single = rate_figures(dataclasses.replace(part, points=tuple(alone)))
    assert [figure for _, _, figure in single] == [None, None]
