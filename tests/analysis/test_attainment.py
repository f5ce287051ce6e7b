"""Attainment functions of repeated fronts."""

import moocore
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from analysis import pareto


@pytest.fixture
def seed_sets(fixture_f):
    loss, speed = fixture_f
    return [np.column_stack([speed[:, s], loss[:, s]]) for s in range(4)]


@pytest.mark.parametrize(
    ("loss", "speed", "share"),
    [(3.40, 100, 0.75), (3.41, 100, 1), (3.45, 118, 0.75), (3.39, 92, 0.5), (3.43, 101, 0.75)],
)
def test_shares_of_seeds_that_reach_a_point(seed_sets, loss, speed, share):
    assert pareto.attainment(seed_sets, (speed, loss)) == share


@pytest.mark.parametrize(
    ("level", "corners"),
    [
        (0.25, [(3.38, 92), (3.39, 99), (3.40, 101), (3.43, 119), (3.44, 120), (3.46, 121)]),
        (0.50, [(3.38, 92), (3.40, 100), (3.41, 101), (3.44, 119), (3.46, 120)]),
        (0.75, [(3.39, 91), (3.40, 100), (3.43, 101), (3.45, 118), (3.46, 119)]),
        (1.00, [(3.40, 91), (3.41, 100), (3.44, 101), (3.46, 118)]),
    ],
)
def test_level_sets_of_the_fixture(seed_sets, level, corners):
    surface = pareto.attainment_surface(seed_sets, level)
    expected = sorted((x, y) for y, x in corners)
    assert surface.tolist() == pytest.approx(np.array(expected))


def test_the_volume_under_the_attainment_function_is_the_mean_area(seed_sets):
    corner = (50.0, 3.60)
    surfaces = [pareto.attainment_surface(seed_sets, k / 4) for k in range(1, 5)]
    volume = np.mean([pareto.hypervolume(surface, corner) for surface in surfaces])
    assert volume == pytest.approx(13.56)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_surfaces_and_volumes_agree_with_moocore(sets):
    down = (False, False)
    arrays = [np.array(points, dtype=float) for points in sets]
    n = len(arrays)
    owners = np.concatenate([np.full(len(a), i + 1) for i, a in enumerate(arrays)])
    levels = [100 * k / n for k in range(1, n + 1)]
    truth = moocore.eaf(np.concatenate(arrays), owners, percentiles=levels)
    for k, percent in enumerate(levels, start=1):
        expected = truth[np.isclose(truth[:, 2], percent), :2]
        surface = pareto.attainment_surface(arrays, k / n, down)
        assert sorted(map(tuple, surface)) == sorted(map(tuple, np.unique(expected, axis=0)))
    areas = [pareto.hypervolume(points, (7.0, 7.0), down) for points in arrays]
    under = [
        pareto.hypervolume(pareto.attainment_surface(arrays, k / n, down), (7.0, 7.0), down)
        for k in range(1, n + 1)
    ]
    assert np.mean(under) == pytest.approx(np.mean(areas))


def test_moocores_own_median_surface():
    data = moocore.get_dataset("input1.dat")
    sets = [data[data[:, 2] == s, :2] for s in np.unique(data[:, 2])]
    surface = pareto.attainment_surface(sets, 0.5, (False, False))
    assert surface[0] == pytest.approx([0.53173087, 9.73244829])
    assert surface[1] == pytest.approx([0.62230271, 9.02211752])


def test_the_mean_front_of_the_fixture(seed_sets):
    level, surface = pareto.mean_front_level(seed_sets, (50.0, 3.60))
    data = np.concatenate(seed_sets) * [-1, 1]
    truth = moocore.vorob_t(data, np.repeat(np.arange(1, 5), 5), ref=[-50.0, 3.60])
    assert truth["avg_hyp"] == pytest.approx(13.56)
    assert np.mean([pareto.hypervolume(s, (50.0, 3.60)) for s in seed_sets]) == pytest.approx(13.56)
    expected = np.array(truth["ve"]) * [-1, 1]
    assert surface.tolist() == pytest.approx(expected[np.argsort(expected[:, 0])])
    assert 0.5 < level <= 0.75


def test_differences_show_where_one_set_of_runs_wins(seed_sets):
    slow = [points * [0.5, 1] for points in seed_sets]
    rows = pareto.attainment_difference(seed_sets, slow)
    assert (rows[:, 2] >= 0).all()
    assert rows[:, 2].max() == 1


def test_a_level_that_too_few_seeds_reach_is_empty():
    sets = [np.array([(1.0, 1.0)]), np.array([(np.nan, np.nan)])]
    assert len(pareto.attainment_surface(sets, 1.0)) == 0
    assert len(pareto.attainment_surface(sets, 0.5)) == 1


def test_levels_outside_their_range_are_refused(seed_sets):
    with pytest.raises(ValueError, match=r"level=0 must lie in \(0, 1\]"):
        pareto.attainment_surface(seed_sets, 0)
