"""The space of a search: what it reads, what it draws, what it refuses."""

import pytest

from orchestrator.axes import AxisError
from orchestrator.space import Range, Space

CONDITIONAL = {
    "rate": [
        {"when": {"optimizer": "adamw"}, "low": 1e-3, "high": 1e-2, "log": True},
        {"when": {"optimizer": "muon"}, "choices": [0.1, 0.2]},
    ],
    "optimizer": ["adamw", "muon", "sgd"],
}


def no_base(path):
    raise KeyError(f"unknown key {path}")


def test_a_condition_is_drawn_before_what_depends_on_it():
    space = Space(CONDITIONAL, no_base)
    assert [d.path for d in space.dimensions] == ["optimizer", "rate"]
    draws = {"optimizer": "muon", "rate {optimizer: muon}": 0.2}
    assert space.draw(lambda p: draws[p.name]) == {"optimizer": "muon", "rate": 0.2}


def test_where_no_entry_holds_the_path_keeps_its_base_value():
    space = Space(CONDITIONAL, no_base)
    assert space.draw(lambda p: "sgd") == {"optimizer": "sgd"}


@pytest.mark.parametrize(
    ("point", "is_inside"),
    [
        ({"optimizer": "adamw", "rate": 5e-3}, True),
        ({"optimizer": "adamw", "rate": 0.1}, False),
        ({"optimizer": "muon", "rate": 0.1}, True),
        ({"optimizer": "muon"}, False),
        ({"optimizer": "sgd"}, True),
        ({"optimizer": "sgd", "rate": 0.1}, False),
        ({"optimizer": "sgd", "depth": 3}, False),
    ],
)
def test_a_space_knows_the_points_that_it_can_give(point, is_inside):
    assert (Space(CONDITIONAL, no_base).active(point) is not None) == is_inside


def test_a_base_value_can_meet_a_condition():
    values = {"rate": [{"when": {"optimizer": "adamw"}, "choices": [1, 2]}]}
    assert Space(values, lambda path: "adamw").draw(lambda p: 2) == {"rate": 2}
    assert Space(values, lambda path: "muon").draw(lambda p: 2) == {}


def test_corners_hold_every_choice_and_both_ends_of_ranges():
    corners, unmet = Space(CONDITIONAL, no_base).corners(100)
    assert unmet == []
    for point in (
        {"optimizer": "adamw", "rate": 1e-3},
        {"optimizer": "adamw", "rate": 1e-2},
        {"optimizer": "muon", "rate": 0.1},
        {"optimizer": "muon", "rate": 0.2},
        {"optimizer": "sgd"},
    ):
        assert corners.count(point) == 1
    assert len(corners) == 5


def test_a_condition_that_nothing_meets_is_named():
    values = {"optimizer": ["adamw"], "rate": [{"when": {"optimizer": "lion"}, "choices": [1]}]}
    assert Space(values, no_base).corners(9)[1] == ["rate {optimizer: lion}"]


def test_corners_of_a_large_space_are_thinned():
    values = {f"axis{number}": list(range(10)) for number in range(6)}
    corners, _ = Space(values, no_base).corners(64)
    assert len(corners) <= 64
    assert {point["axis0"] for point in corners} == set(range(10))


@pytest.mark.parametrize(
    ("values", "positions"),
    [
        (Range(2, 6, step=2), {0.0: 2, 0.4: 4, 0.999: 6}),
        (Range(2, 7, step=2), {0.999: 6}),
        (Range(1, 3), {0.0: 1, 0.5: 2, 0.999: 3}),
        (Range(1.0, 3.0), {0.0: 1.0, 0.5: 2.0}),
        (Range(1e-4, 1e-2, is_log=True), {0.0: 1e-4, 0.5: 1e-3}),
    ],
)
def test_a_position_gives_the_value_at_that_part_of_the_range(values, positions):
    for position, value in positions.items():
        found = values.at(position)
        assert found == pytest.approx(value, rel=1e-12)
        assert found in values
        assert isinstance(found, type(value))


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (3, "is one value; give a list of choices"),
        ([], "needs|one value|choices"),
        ([1, 1], "holds 1 twice"),
        ({"low": 1}, "needs a number as high, got None"),
        ({"low": 2, "high": 1}, "low=2 must be less than high=1"),
        ({"low": 0, "high": 1, "log": True}, "low=0 must be positive with log: true"),
        ({"low": 1, "high": 2, "log": True, "step": 1}, "has log and step"),
        ({"low": 1, "high": 2, "step": 0.5}, "step=0.5 must be whole"),
        ({"low": 1, "high": 2, "step": 3}, "at most 1"),
        ({"low": 1, "high": 2, "hihg": 2}, "has hihg; an entry knows when, choices"),
        ({"choices": [1], "low": 2}, "has choices and a range"),
    ],
)
def test_an_entry_that_cannot_be_drawn_from_is_refused(value, sentence):
    with pytest.raises(AxisError, match=sentence):
        Space({"depth": value}, no_base)


def test_conditions_in_a_circle_are_refused():
    values = {
        "a": [{"when": {"b": 1}, "choices": [1, 2]}],
        "b": [{"when": {"a": 1}, "choices": [1, 2]}],
    }
    with pytest.raises(AxisError, match="circle"):
        Space(values, no_base)
