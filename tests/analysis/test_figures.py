"""What the figures draw: corners, marks, bars and words, read back from the pictures."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from analysis.figures.curves import build_curves
from analysis.figures.learning_rate import draw_learning_rates
from analysis.figures.pareto import draw_pareto
from analysis.figures.pareto_parts import axis_limits, diverged_marks, pareto_caption
from analysis.figures.placement import place_labels
from analysis.figures.rows import differences_caption, drawn_interval
from analysis.figures.style import MARKS, byte_ticks
from analysis.interactive.learning_rate import rate_figures
from analysis.interactive.pareto import pareto_figure
from analysis.load import load_sweep
from analysis.pareto import staircase
from analysis.study import analyse


@pytest.fixture(scope="module")
def part(small_folder):
    return analyse(load_sweep(small_folder)).comparables[0]


def make_part(made, folder, rows):
    return analyse(load_sweep(made.write_folder(folder, rows))).comparables[0]


def texts_of(axes):
    return [text.get_text() for text in axes.texts]


def test_the_drawn_front_is_the_staircase(part):
    axes = draw_pareto(part).figure.axes[0]
    line = staircase(np.array([(point.speed, point.loss) for point in part.drawn]))
    drawn = [each.get_xydata() for each in axes.lines if len(each.get_xydata()) == len(line)]
    assert any(np.allclose(xy, line) for xy in drawn)


def test_every_drawn_arm_is_named_and_no_names_overlap(part):
    drawing = draw_pareto(part)
    axes = drawing.figure.axes[0]
    labels = {point.arm.label for point in part.drawn}
    assert labels <= set(texts_of(axes))
    boxes = [text.get_window_extent() for text in axes.texts if text.get_text() in labels]
    for i, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])


def test_diverged_arms_are_marked_with_k_of_n(part):
    marks = {point.arm.arm_id: text for point, _, text in diverged_marks(part)}
    assert marks == {"linear-pure-adamw": "1/3"}
    axes = draw_pareto(part).figure.axes[0]
    assert "1/3" in texts_of(axes)
    assert any(line.get_marker() == "x" for line in axes.lines)


def test_an_arm_that_always_diverged_is_named_at_its_cross(made, tmp_path):
    rows = made.make_trials(made.small_plan())
    for row in rows:
        if row["mixer"] == "linear":
            row.update(status="diverged", val_loss_nats=None)
    part = make_part(made, tmp_path, rows)
    assert "Linear attention · pure · AdamW diverged 12/12" in [t for *_, t in diverged_marks(part)]


def test_a_distant_unigram_line_is_said_and_does_not_squeeze_the_data(part):
    axes = draw_pareto(part).figure.axes[0]
    assert axes.get_ylim()[1] < 6.6
    assert "unigram cross-entropy 6.87 nats, ↑ above this axis" in texts_of(axes)


def test_a_near_unigram_line_is_drawn(made, tmp_path):
    rows = made.make_trials(made.small_plan())
    for row in rows:
        row["unigram_loss_nats"] = 6.30
    axes = draw_pareto(make_part(made, tmp_path, rows)).figure.axes[0]
    assert "unigram 6.30" in texts_of(axes)


def test_speeds_of_other_magnitudes_take_a_logarithmic_axis(made, tmp_path):
    rows = made.make_trials(made.small_plan())
    for row in rows:
        if row["mixer"] == "softmax":
            row["tokens_per_second"] *= 20
    part = make_part(made, tmp_path, rows)
    (low, high), _, is_log = axis_limits(part.drawn)
    assert is_log
    assert 0 < low < high
    assert draw_pareto(part).figure.axes[0].get_xscale() == "log"


def test_a_bar_that_reaches_below_zero_ends_at_the_floor_of_a_logarithmic_axis(made, tmp_path):
    rows = made.make_trials(made.small_plan())
    wild = {0: 1.0, 1: 90.0, 2: 200.0}
    for row in rows:
        if row["mixer"] == "softmax":
            row["tokens_per_second"] = wild[row["seed"]]
    part = make_part(made, tmp_path, rows)
    point = next(p for p in part.drawn if p.arm.fact("mixer") == "softmax")
    assert point.speed_interval.low < 0
    axes = draw_pareto(part).figure.axes[0]
    segments = [s for c in axes.collections if hasattr(c, "get_segments") for s in c.get_segments()]
    across = [s for s in segments if np.allclose(s[:, 1], point.loss) and len(s) == 2]
    floor = axes.get_xlim()[0]
    assert min(s[:, 0].min() for s in across) == pytest.approx(floor)
    assert floor > 0


@pytest.mark.parametrize(
    ("seeds", "hollow", "bars"), [((0,), True, 0), ((0, 1), False, 0), ((0, 1, 2), False, 2)]
)
def test_few_seeds_never_look_certain(made, tmp_path, seeds, hollow, bars):
    plan = made.Plan(arms=[("softmax", "pure", "adamw")], rates=(1e-3,), seeds=seeds)
    part = make_part(made, tmp_path, made.make_trials(plan))
    axes = draw_pareto(part).figure.axes[0]
    marks = [line for line in axes.lines if line.get_marker() == MARKS["adamw", "pure"]]
    assert (marks[0].get_markerfacecolor() == "white") is hollow
    segments = [s for c in axes.collections if hasattr(c, "get_segments") for s in c.get_segments()]
    assert len(segments) == bars
    named = [text for text in texts_of(axes) if text.startswith("Softmax")]
    assert named == ["Softmax · AdamW" + (f"  n={len(seeds)}" if len(seeds) < 3 else "")]


def test_one_seed_among_three_breaks_the_band_and_is_hollow(made, tmp_path):
    plan = made.Plan(arms=[("softmax", "pure", "adamw")], rates=(1e-3, 3e-3, 1e-2))
    rows = [r for r in made.make_trials(plan) if r["lr"] != 3e-3 or r["seed"] == 0]
    part = make_part(made, tmp_path, rows)
    axes = draw_learning_rates(part)[0].figure.axes[0]
    faces = {
        float(x): line.get_markerfacecolor()
        for line in axes.lines
        if line.get_marker() == "o" and line.get_linestyle() == "None"
        for x in line.get_xdata()
    }
    assert faces[3e-3] == "white"
    assert faces[1e-3] != "white"
    trace = rate_figures(part)[0][1]["data"][0]
    assert trace["error_y"]["array"][1] == 0.0
    assert trace["error_y"]["array"][0] > 0


def test_a_rate_of_zero_is_named_under_the_figure(made, tmp_path):
    rows = made.make_trials(made.small_plan())
    for row in rows:
        if row["mixer"] == "softmax" and row["lr"] == 3e-4:
            row.update(lr=0.0)
    drawing = draw_learning_rates(make_part(made, tmp_path, rows))[0]
    assert "1 cell at a rate of 0 has no place on this axis" in drawing.caption
    assert all(axes.get_xlim()[0] > 0 for axes in drawing.figure.axes if axes.lines)


def test_captions_say_how_the_rate_was_chosen_and_what_is_missing(part):
    caption = pareto_caption(part)
    assert "smallest mean loss over its seeds (3 seeds)" in caption
    assert "95 % t intervals" in caption
    assert "Speed not measured yet, so not drawn: Kimi Delta · pure · Muon" in caption
    words = differences_caption(part.comparison)
    assert "Holm" in words
    assert "±0.01 nats" in words


def test_intervals_of_pairs_are_drawn_from_three_seeds(part):
    for row in part.comparison.rows:
        assert (drawn_interval(row) is not None) == (
            row.loss.method == "blocked ANOVA" or row.pairs > 2
        )


def test_curves_are_validation_losses_of_the_chosen_rates(small_folder, part):
    curves = build_curves(part, load_sweep(small_folder).curves)
    assert {curve.quantity for curve in curves} == {"validation"}
    for curve in curves:
        assert curve.mean[-1] == pytest.approx(curve.point.loss)
        assert curve.losses.shape[1] == curve.point.n


def test_the_page_draws_the_same_numbers(part):
    figure = pareto_figure(part)
    texts = {label["text"]: (label["x"], label["y"]) for label in figure["labels"]}
    for point in part.drawn:
        assert texts[point.arm.label] == (point.speed, point.loss)
    front = next(
        t for t in figure["data"] if t["mode"] == "lines" and t["line"].get("width") == 1.6
    )
    line = staircase(np.array([(point.speed, point.loss) for point in part.drawn]))
    assert front["x"] == pytest.approx(line[:, 0], rel=1e-6)


def test_page_figures_are_valid_plotly(part):
    from plotly.graph_objects import Figure  # noqa: PLC0415

    figure = pareto_figure(part)
    colors = {"INK": "#000000", "FAINT": "#777777", "PAPER": "#ffffff"}

    def fill(value):
        if isinstance(value, dict):
            return {key: fill(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [fill(inner) for inner in value]
        return colors.get(value, value) if isinstance(value, str) else value

    panels = [each for _, *pair in rate_figures(part) for each in pair if each]
    for each in [figure, *panels]:
        Figure(data=fill(each["data"]), layout=fill(each["layout"]))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(60, 940), st.floats(60, 640)), min_size=1, max_size=12))
@example([(87.0, 87.0), (61.0, 87.0)])
def test_labels_stay_inside_and_apart(points):
    anchors = np.array(points)
    sizes = np.full((len(points), 2), (90.0, 14.0))
    boxes = place_labels(anchors, sizes, np.empty((0, 4)), (0.0, 0.0, 1000.0, 700.0))
    assert (boxes[:, :2] >= -1e-9).all()
    assert (boxes[:, 2] <= 1000 + 1e-9).all()
    assert (boxes[:, 3] <= 700 + 1e-9).all()
    for i in range(len(boxes)):
        for j in range(i):
            width = min(boxes[i, 2], boxes[j, 2]) - max(boxes[i, 0], boxes[j, 0])
            height = min(boxes[i, 3], boxes[j, 3]) - max(boxes[i, 1], boxes[j, 1])
            assert min(width, height) <= 1e-9


def test_byte_ticks_are_round():
    assert byte_ticks(0, 24_576) == [0, 5120, 10240, 15360, 20480]
    assert byte_ticks(-100, 1000)[0] <= 0
    assert all(math.isfinite(tick) for tick in byte_ticks(5.0, 5.0))
