"""What a report says first: the answer, ties with the best arm, routing, and what is missing."""

import json

import numpy as np
import pytest

from analysis.answers import answers, doubt_sentence, part_answers, question
from analysis.load import load_sweep
from analysis.study import analyse


def make_study(made, folder, rows, spec=None):
    return analyse(load_sweep(made.write_folder(folder, rows, None, spec)))


def test_the_answer_is_three_sentences_with_their_doubt(made, tmp_path):
    study = make_study(made, tmp_path, made.make_trials(made.small_plan()))
    sentences = answers(study)
    assert question(study).startswith("Which of 5 arms reaches the lowest loss")
    assert len(sentences) == 3
    assert sentences[0].startswith("The front has 4 of 4 arms")
    assert sentences[2].startswith("How sure: each mean stands on 3 seeds")
    assert "1 of 58 replicates diverged" in sentences[2]


def test_a_clear_winner_is_called_better_and_an_equal_one_tied(made, tmp_path):
    plan = made.Plan(
        arms=[
            ("softmax", "pure", "adamw"),
            ("linear", "pure", "adamw"),
            ("deltanet", "pure", "adamw"),
        ],
        rates=(3e-3,),
        seeds=(0, 1, 2, 3),
    )
    rows = made.make_trials(plan)
    noise = dict(zip(range(4), (0.0, 0.002, -0.001, 0.001), strict=True))
    for row in rows:
        base = {"softmax": 6.0, "linear": 6.2, "deltanet": 6.003}[row["mixer"]]
        sign = -1 if row["mixer"] == "deltanet" else 1
        row["val_loss_nats"] = base + 0.05 * row["seed"] + sign * noise[row["seed"]]
    part = make_study(made, tmp_path, rows).comparables[0]
    assert part.against_best == {
        "softmax-pure-adamw": "best",
        "linear-pure-adamw": "worse",
        "deltanet-pure-adamw": "tied",
    }
    assert "DeltaNet cannot be told from it" in part_answers(part)[1]


def test_one_seed_is_no_evidence_against_the_best(made, tmp_path):
    plan = made.Plan(
        arms=[("softmax", "pure", "adamw"), ("linear", "pure", "adamw")], rates=(3e-3,), seeds=(0,)
    )
    part = make_study(made, tmp_path, made.make_trials(plan)).comparables[0]
    assert sorted(part.against_best.values()) == ["best", "not tested"]
    assert "too few seeds are common to test it" in part_answers(part)[1]
    assert "each mean stands on 1 seed;" in doubt_sentence(part)


def routed_rows(made, changes):
    """Two arms and the same with routing, whose losses differ by `changes` per seed."""
    plan = made.Plan(
        arms=[("softmax", "pure", "muon"), ("deltanet", "pure", "muon")],
        rates=(1e-3,),
        seeds=tuple(range(len(changes))),
    )
    rows = made.make_trials(plan)
    for row in rows:
        row["routing"] = "none"
    for row in [dict(row) for row in rows]:
        row["routing"] = "cler"
        row["config_json"] = json.dumps({**json.loads(row["config_json"]), "routing": "cler"})
        for key in ("arm_id", "cell_id", "replicate_id"):
            row[key] += "-cler"
        row["val_loss_nats"] += changes[row["seed"]]
        rows.append(row)
    return rows


def test_routing_is_compared_with_the_twin_that_lacks_it(made, tmp_path):
    changes = (-0.020, -0.022, -0.018, -0.021)
    part = make_study(made, tmp_path, routed_rows(made, changes)).comparables[0]
    assert len(part.routing) == 2
    for delta in part.routing:
        assert delta.twin.arm.arm_id + "-cler" == delta.point.arm.arm_id
        assert delta.difference.loss_gap == pytest.approx(np.mean(changes))
        assert delta.difference.verdict == "better"


def test_an_arm_without_routing_or_without_a_twin_has_no_delta(made, tmp_path):
    rows = routed_rows(made, (0.0, 0.1))
    alone = [r for r in rows if r["mixer"] == "softmax" or r["routing"] == "cler"]
    part = make_study(made, tmp_path, alone).comparables[0]
    assert [delta.point.arm.fact("mixer") for delta in part.routing] == ["softmax"]


def test_cells_without_any_row_are_missing_when_the_sweep_says_how_many_it_asked_for(
    made, tmp_path
):
    rows = made.make_trials(made.small_plan())
    kept = [row for row in rows if row["cell_id"] != rows[0]["cell_id"]]
    spec = {"name": "s", "seeds": [0, 1, 2], "replicates": len(rows)}
    accounting = make_study(made, tmp_path, kept, spec).sweep.accounting
    assert (accounting.expected, accounting.found, accounting.missing) == (60, 57, 3)
