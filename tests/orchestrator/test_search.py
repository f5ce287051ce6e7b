"""Asking for points: new ones only, the same after an interruption, better than chance."""

import math
import statistics

import pytest

from orchestrator.config import SearchConfig
from orchestrator.search import Told, ask
from orchestrator.space import Space

VALUES = {
    "optimizer": ["adamw", "muon"],
    "rate": [
        {"when": {"optimizer": "adamw"}, "low": 1e-4, "high": 1e-1, "log": True},
        {"when": {"optimizer": "muon"}, "low": 1e-4, "high": 1e-1, "log": True},
    ],
    "depth": {"low": 2, "high": 8, "step": 2},
}


def no_base(path):
    raise KeyError(path)


SPACE = Space(VALUES, no_base)


def loss(point):
    """Best for muon at 1e-3; depth changes nothing."""
    return (math.log10(point["rate"]) + 3) ** 2 + 0.5 * (point["optimizer"] == "adamw")


def batch(search, told, count=4, space=SPACE):
    known = [item.point for item in told]

    def is_new(point):
        if point in known:
            return False
        known.append(point)
        return True

    return ask(space, search, told, count, len(told), is_new)


def searched(search, rounds, value=lambda point: (loss(point),)):
    told = []
    for _ in range(rounds):
        told += [Told(point, value(point)) for point in batch(search, told)]
    return told


@pytest.mark.parametrize("sampler", ["tpe", "qmc"])
def test_a_search_goes_on_from_its_results_as_if_never_interrupted(sampler):
    search = SearchConfig(sampler=sampler, startup_trials=4, space=VALUES)
    told = searched(search, 2)
    again = batch(search, list(told))
    assert batch(search, told) == again
    points = [item.point for item in told] + again
    assert all(SPACE.active(point) is not None for point in points)
    assert len({tuple(sorted(p.items())) for p in points}) == len(points) == 12


def test_another_seed_asks_for_other_points():
    first, second = (SearchConfig(seed=seed, space=VALUES) for seed in (0, 1))
    assert batch(first, []) != batch(second, [])


def test_tpe_learns_where_the_loss_is_low():
    told = searched(SearchConfig(startup_trials=8, space=VALUES), 12)
    losses = [loss(item.point) for item in told]
    assert statistics.mean(losses[-12:]) < 0.6 * statistics.mean(losses[:12])


def test_a_gaussian_process_asks_near_the_minimum():
    search = SearchConfig(sampler="gp", startup_trials=4, space=VALUES)
    points = [
        {"optimizer": optimizer, "rate": rate, "depth": 4}
        for optimizer in ("adamw", "muon")
        for rate in (2e-4, 8e-4, 3e-3, 2e-2)
    ]
    told = [Told(point, (loss(point),)) for point in points]
    assert loss(batch(search, told, count=1)[0]) < 0.3


def test_a_front_is_searched_with_two_objectives():
    search = SearchConfig(startup_trials=4, objectives=["loss", "speed"], space=VALUES)
    told = searched(search, 6, value=lambda point: (loss(point), 1.0 / point["depth"]))
    assert statistics.mean(t.point["depth"] for t in told[-12:]) < 5  # fast ones, 5 by chance


def test_points_that_were_stopped_teach_tpe_too():
    """Only rates below 1e-3 go far, so the points to come are there."""
    search = SearchConfig(startup_trials=4, space=VALUES)
    points = [{"optimizer": "muon", "rate": 10 ** (-4 + 3 * k / 19), "depth": 2} for k in range(20)]
    told = [Told(p, (1.0,), None if p["rate"] < 1e-3 else 100) for p in points]
    asked = batch(search, told, count=8)
    assert statistics.median(point["rate"] for point in asked) < 1e-3


def test_sobol_points_spread_evenly_over_conditional_ranges():
    told = searched(SearchConfig(sampler="qmc", space=VALUES), 16)
    rates = sorted(math.log10(t.point["rate"]) for t in told if t.point["optimizer"] == "muon")
    assert len(rates) == 32
    quarters = [sum(-4 + 0.75 * k <= r < -4 + 0.75 * (k + 1) for r in rates) for k in range(4)]
    assert max(quarters) - min(quarters) <= 2


@pytest.mark.parametrize("sampler", ["tpe", "qmc"])
def test_a_space_that_is_used_up_gives_fewer_points(sampler):
    values = {"depth": [2, 4, 6]}
    space = Space(values, no_base)
    search = SearchConfig(sampler=sampler, space=values)
    assert sorted(p["depth"] for p in batch(search, [], 8, space)) == [2, 4, 6]


def test_points_of_an_earlier_wider_space_are_left_out():
    search = SearchConfig(startup_trials=1, space=VALUES)
    told = [Told({"optimizer": "lion", "rate": 1e-3, "depth": 2}, (0.0,))]
    assert len(batch(search, told)) == 4
