"""From records to fronts: choosing, dominance, probabilities, what is left out."""

import math

import numpy as np
import pandas as pd
import pytest

from analysis.choice import choose
from analysis.load import load_sweep
from analysis.naming import COLUMNS, name_arms, shortened
from analysis.pareto import staircase
from analysis.study import Settings, analyse

NAMES = "ABCDE"


@pytest.fixture
def rows_of_f(made, fixture_f):
    """Fixture F as records: five arms with one rate and four seeds."""
    loss, speed = fixture_f
    plan = made.Plan(arms=[("softmax", "pure", "adamw")], rates=(1e-3,), seeds=(0, 1, 2, 3))
    template = made.make_trials(plan)[0]
    return [
        template
        | {
            "arm_id": name,
            "mixer": name,
            "cell_id": f"{name}-cell",
            "replicate_id": f"{name}-{s}",
            "seed": s,
            "val_loss_nats": float(loss[i, s]),
            "tokens_per_second": float(speed[i, s]) * 1000,
        }
        for i, name in enumerate(NAMES)
        for s in range(4)
    ]


def study(made, folder, rows, **settings):
    sweep = load_sweep(made.write_folder(folder, rows))
    return analyse(sweep, Settings(**settings))


def by_arm(result):
    return {point.arm.arm_id: point for point in result.points}


def test_the_front_of_the_fixture_and_its_probabilities(made, tmp_path, rows_of_f):
    points = by_arm(study(made, tmp_path, rows_of_f))
    assert {name for name, point in points.items() if point.on_front} == set("ABCE")
    shares = [points[name].front_probability for name in NAMES]
    assert shares == pytest.approx([189 / 256, 243 / 256, 1, 0, 166 / 256])


def test_the_area_is_measured_from_a_given_loss(made, tmp_path, rows_of_f):
    part = study(made, tmp_path, rows_of_f, reference_loss_nats=3.60).comparables[0]
    assert part.hypervolume is not None
    assert part.hypervolume.reference_loss_nats == 3.60
    # From a throughput of 0 the 50 k below the reference of the fixture come on top.
    expected = 13.40125e3 + 50e3 * (3.60 - 3.39)
    assert part.hypervolume.of_means == pytest.approx(expected)
    assert part.hypervolume.per_seed is not None
    assert part.hypervolume.per_seed.n == 4


def test_without_a_unigram_loss_there_is_no_area_to_measure(made, tmp_path, rows_of_f):
    for row in rows_of_f:
        row["unigram_loss_nats"] = None
    assert study(made, tmp_path, rows_of_f).comparables[0].hypervolume is None


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 7, 20])
def test_a_blown_up_arm_is_diverged_and_changes_nothing_else(
    made, tmp_path, rows_of_f, bad, position
):
    blown = rows_of_f[0] | {
        "arm_id": "X",
        "mixer": "X",
        "cell_id": "X-cell",
        "replicate_id": "X-0",
        "val_loss_nats": bad,
        "tokens_per_second": 1e9,
    }
    rows = [*rows_of_f[:position], blown, *rows_of_f[position:]]
    points = by_arm(study(made, tmp_path, rows))
    assert {name for name, point in points.items() if point.on_front} == set("ABCE")
    assert not points["X"].on_front
    assert "1 of 1 replicates diverged" in points["X"].left_out


def test_highlighted_arms_are_named_by_id_whatever_the_order(made, tmp_path, rows_of_f):
    failed = rows_of_f[0] | {
        "arm_id": "0",
        "mixer": "0",
        "cell_id": "0-cell",
        "replicate_id": "0-0",
        "status": "failed",
        "val_loss_nats": None,
    }
    for number, rows in enumerate(([failed, *rows_of_f], [*reversed(rows_of_f), failed])):
        points = by_arm(study(made, tmp_path / str(number), rows))
        assert {name for name, point in points.items() if point.on_front} == set("ABCE")
        assert points["0"].left_out


def test_the_ranking_follows_the_mean_and_not_a_lucky_seed(made, tmp_path, rows_of_f):
    for row in rows_of_f:
        if row["arm_id"] == "D" and row["seed"] == 2:
            row["val_loss_nats"] = 3.30
        if row["arm_id"] == "D" and row["seed"] == 3:
            row["val_loss_nats"] = 3.80
    points = by_arm(study(made, tmp_path, rows_of_f))
    assert not points["D"].on_front
    assert min(points["D"].choice.cell.losses) < min(points["B"].choice.cell.losses)
    assert points["D"].n == 4


def test_one_seed_changes_the_interval(made, tmp_path, rows_of_f):
    before = by_arm(study(made, tmp_path / "a", rows_of_f))["A"].loss_interval
    rows_of_f[0]["val_loss_nats"] += 0.05
    after = by_arm(study(made, tmp_path / "b", rows_of_f))["A"].loss_interval
    assert after.half_width > before.half_width


def test_the_staircase_of_the_study_ends_at_the_fastest_member(made, tmp_path, rows_of_f):
    part = study(made, tmp_path, rows_of_f).comparables[0]
    line = staircase(np.array([(point.speed, point.loss) for point in part.drawn]))
    assert line[-1] == pytest.approx([119.5e3, 3.445])


def test_an_arm_whose_speed_is_missing_is_left_out_and_says_so(made, small_folder):
    result = analyse(load_sweep(small_folder))
    point = by_arm(result)["kimi_delta-pure-muon"]
    assert point.left_out == "speed not measured yet at the chosen rate"
    assert point.front_probability is None
    assert not point.on_front
    assert not math.isnan(point.loss)


def test_a_cell_with_a_diverged_seed_is_not_chosen(made, tmp_path):
    plan = made.small_plan()
    plan.states = {(4, 2, 1): "diverged"}
    rows = made.make_trials(plan)
    point = by_arm(study(made, tmp_path, rows))["linear-pure-adamw"]
    assert point.choice.cell.lr != 3e-3
    assert point.arm.num_diverged == 1


def test_cells_with_other_seeds_are_compared_fairly(made, tmp_path):
    plan = made.Plan(arms=[("softmax", "pure", "adamw")], rates=(1e-3, 3e-3), noise=0.0)
    rows = made.make_trials(plan)
    for row in rows:
        row["val_loss_nats"] = (6.0 if row["lr"] == 1e-3 else 6.1) + 0.5 * row["seed"]
    # The better rate has only the hard seed left, so its plain mean is the larger one.
    rows = [row for row in rows if row["lr"] == 3e-3 or row["seed"] == 2]
    arm_choice = by_arm(study(made, tmp_path, rows))["softmax-pure-adamw"].choice
    assert arm_choice.cell.lr == 1e-3
    assert not arm_choice.is_balanced


def test_a_pair_of_common_seeds_is_needed_for_a_probability(made, tmp_path):
    rows = [row for row in made.make_trials(made.small_plan()) if row["seed"] == 0]
    points = study(made, tmp_path, rows).points
    assert all(point.front_probability is None for point in points)
    assert all(point.loss_interval is None for point in points)


def test_the_rate_is_chosen_anew_in_every_draw(made, tmp_path):
    plan = made.Plan(
        arms=[("softmax", "pure", "adamw"), ("deltanet", "pure", "adamw")], rates=(1e-3, 3e-3)
    )
    rows = made.make_trials(plan)
    # The first arm's rates win at different seeds; at a fixed rate it would lose draws of seed 2.
    losses = {1e-3: (5.0, 5.0, 6.2), 3e-3: (6.2, 6.2, 5.0)}
    for row in rows:
        first = row["mixer"] == "softmax"
        row["val_loss_nats"] = losses[row["lr"]][row["seed"]] if first else 5.9
        row["tokens_per_second"] = 100.0
    points = by_arm(study(made, tmp_path, rows))
    # With any fixed rate the draw (2, 2, 2), or (0, 0, 0), loses: a share below 1.
    assert points["softmax-pure-adamw"].front_probability == pytest.approx(1.0)


def test_more_seeds_than_can_be_enumerated_are_sampled_and_repeatable(made, tmp_path):
    plan = made.small_plan()
    plan.seeds = tuple(range(10))
    plan.states = {}
    sweep = load_sweep(made.write_folder(tmp_path, made.make_trials(plan)))
    first, again = analyse(sweep), analyse(sweep)
    other = analyse(sweep, rng=np.random.default_rng(5))
    shares = [[p.front_probability for p in s.points] for s in (first, again, other)]
    assert shares[0] == shares[1]
    measured = [share for share in shares[0] if share is not None]
    assert all(0 <= share <= 1 for share in measured)
    assert len(measured) == 4


def test_a_baseline_must_be_an_arm(made, tmp_path, rows_of_f):
    with pytest.raises(ValueError, match="baseline='Z' is no arm of this sweep; its arms are A"):
        study(made, tmp_path, rows_of_f, baseline="Z")


def test_a_margin_must_be_positive():
    with pytest.raises(ValueError, match="margin_nats=0 must be a positive number"):
        Settings(margin_nats=0)


def choice_of(made, tmp_path, change):
    rows = made.make_trials(made.Plan(arms=[("softmax", "pure", "adamw")]))
    kept = [row for row in rows if change(row) is not False]
    sweep = load_sweep(made.write_folder(tmp_path, kept))
    return analyse(sweep).points[0].choice


@pytest.mark.parametrize(
    ("keep", "edge"),
    [
        (lambda lr: True, ""),
        (lambda lr: lr >= 3e-3, "at the lowest rate tried"),
        (lambda lr: lr <= 3e-3, "at the highest rate tried"),
        (lambda lr: lr == 3e-3, "only one rate tried"),
    ],
)
def test_a_best_rate_at_the_edge_is_flagged(made, tmp_path, keep, edge):
    assert choice_of(made, tmp_path, lambda row: keep(row["lr"])).edge == edge


def test_a_neighbour_without_a_result_is_a_gap_but_a_diverged_one_is_a_bracket(made, tmp_path):
    def fail(status):
        def change(row):
            if row["lr"] == 1e-2:
                row.update(status=status, val_loss_nats=None)

        return change

    gap = choice_of(made, tmp_path / "a", fail("failed"))
    bracket = choice_of(made, tmp_path / "b", fail("diverged"))
    assert gap.edge == "neighbouring rate 0.01 has no result"
    assert bracket.edge == ""


def test_the_choice_states_its_selection_effect(made, tmp_path):
    m = [[3.02, 2.98, 3.00], [2.99, 3.03, 2.97], [3.00, 2.96, 3.05]]
    rates = (1e-3, 3e-3, 1e-2)
    rows = made.make_trials(made.Plan(arms=[("softmax", "pure", "adamw")], rates=rates))
    for row in rows:
        row["val_loss_nats"] = m[rates.index(row["lr"])][row["seed"]]
    choice = analyse(load_sweep(made.write_folder(tmp_path, rows))).points[0].choice
    assert choice.naive == pytest.approx(2.996667, abs=1e-6)
    assert choice.held_out == pytest.approx(3.033333, abs=1e-6)
    assert choice.selection_effect == pytest.approx(0.036667, abs=1e-6)
    shares = [choice.probabilities[f"softmax-pure-adamw-{rate:g}"] for rate in rates]
    assert shares == pytest.approx([1 / 9, 0.629630, 0.259259], abs=1e-6)


def test_an_arm_without_results_has_no_choice(made, tmp_path):
    rows = made.make_trials(made.Plan(arms=[("softmax", "pure", "adamw")]))
    for row in rows:
        row.update(status="running", val_loss_nats=None)
    sweep = load_sweep(made.write_folder(tmp_path, rows))
    assert choose(analyse(sweep).points[0].arm) is None


def test_the_adam_rate_is_chosen_with_the_other_where_both_are_swept(made, tmp_path):
    base = made.make_trials(made.Plan(arms=[("softmax", "pure", "muon")], rates=(3e-4, 1e-3, 3e-3)))
    rows = []
    for adam in (1e-3, 3e-3, 1e-2):
        for row in base:
            penalty = 0.1 * math.log10(adam / 3e-3) ** 2
            rows.append(
                row
                | {
                    "adam_lr": adam,
                    "cell_id": f"{row['cell_id']}-{adam}",
                    "replicate_id": f"{row['replicate_id']}-{adam}",
                    "val_loss_nats": row["val_loss_nats"] + penalty,
                }
            )
    for largest, edge in ((1e-2, ""), (3e-3, "Adam rate at the highest rate tried")):
        kept = pd.DataFrame([row for row in rows if row["adam_lr"] <= largest])
        sweep = load_sweep(made.write_folder(tmp_path / f"{len(kept)}", kept))
        choice = analyse(sweep).points[0].choice
        assert (choice.cell.lr, choice.cell.adam_lr) == (1e-3, 3e-3)
        assert choice.edge == edge


def test_long_names_are_shortened_and_stay_distinct():
    long = "a" * 200
    frame = pd.DataFrame(
        dict.fromkeys(COLUMNS) | {"arm_id": [long + "1" + long, long + "2" + long]}
    )
    frame["config_json"] = None
    labels = list(name_arms(frame).values())
    assert len(set(labels)) == 2
    assert all(len(label) < 100 for label in labels)
    assert shortened("two\n lines") == "two lines"


def test_tokens_of_a_run_that_diverged_are_no_other_budget_to_name(made, tmp_path):
    blown = {(1, rate, 0): "diverged" for rate in range(2)}
    arms = [("softmax", "pure", "adamw"), ("deltanet", "pure", "adamw")]
    plan = made.Plan(arms=arms, rates=(1e-3, 3e-3), states=blown)
    part = study(made, tmp_path, made.make_trials(plan)).comparables[0]
    assert [point.arm.label for point in part.points] == ["Softmax", "DeltaNet"]
    assert f"{made.TOKENS:,} tokens" in part.facts
