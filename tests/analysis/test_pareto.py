"""Dominance, staircases and areas against known fronts and an independent library."""

import itertools

import moocore
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from analysis import pareto
from analysis.resampling import resample_weights

LOSS_FIRST = (False, True)
P = np.array([(3.0, 100), (2.8, 80), (2.9, 120), (2.7, 50), (2.8, 70)])

PUBLISHED = {
    "Softmax AdamW dense": (81.7, 2.413),
    "Softmax Muon dense": (79.7, 2.349),
    "DeltaNet AdamW hybrid": (87.0, 2.348),
    "DeltaNet AdamW pure": (91.9, 2.382),
    "DeltaNet Muon hybrid": (83.8, 2.299),
    "DeltaNet Muon pure": (89.2, 2.334),
    "GDN AdamW hybrid": (90.5, 2.356),
    "GDN AdamW pure": (100.0, 2.433),
    "GDN Muon hybrid": (89.5, 2.321),
    "GDN Muon pure": (95.0, 2.397),
    "KDA AdamW hybrid": (74.4, 2.328),
    "KDA AdamW pure": (73.6, 2.347),
    "KDA Muon hybrid": (70.9, 2.273),
    "KDA Muon pure": (68.5, 2.290),
    "GDN-2 AdamW hybrid": (83.3, 2.379),
    "GDN-2 AdamW pure": (81.9, 2.452),
    "GDN-2 Muon hybrid": (81.3, 2.345),
    "GDN-2 Muon pure": (80.7, 2.415),
}


@pytest.mark.parametrize(
    ("points", "maximise", "expected"),
    [
        pytest.param(P, LOSS_FIRST, [0, 1, 1, 1, 0], id="min-max"),
        pytest.param(P, (False, False), [0, 0, 0, 1, 0], id="both-minimised-by-mistake"),
        pytest.param([(2.8, 80), (2.8, 90), (2.9, 90)], LOSS_FIRST, [0, 1, 0], id="tie-in-loss"),
        pytest.param([(2.8, 80), (2.8, 80), (3, 100)], LOSS_FIRST, [1, 1, 1], id="duplicates"),
        pytest.param([(2.8, 80)], LOSS_FIRST, [1], id="one-point"),
        pytest.param(np.empty((0, 2)), LOSS_FIRST, [], id="empty"),
        pytest.param([[1, 1], [0, 1], [1, 0], [1, 0]], (False, False), [0, 1, 1, 1], id="min-min"),
        pytest.param([(np.nan, 200), (2.8, 80), (3, 100)], LOSS_FIRST, [0, 1, 1], id="nan-first"),
        pytest.param([(2.8, 80), (np.nan, 90), (3, 100)], LOSS_FIRST, [1, 0, 1], id="nan-middle"),
        pytest.param([(np.inf, 200), (2.8, 80), (3, 100)], LOSS_FIRST, [0, 1, 1], id="infinite"),
    ],
)
def test_fronts(points, maximise, expected):
    mask = pareto.front_mask(np.array(points, dtype=float), maximise)
    assert mask.astype(int).tolist() == expected


def test_a_tie_in_one_axis_does_not_hide_that_a_point_is_dominated():
    both = (True, True)
    assert pareto.front_mask(np.array([(10.0, 100), (5, 100)]), both).tolist() == [True, False]
    copies = np.array([(10.0, 100), (5, 100), (10, 100), (10, 100)])
    assert pareto.front_mask(copies, both).tolist() == [True, False, True, True]


@pytest.mark.parametrize("maximise", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("position", range(4))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_blown_up_point_is_never_best_and_removes_nobody(maximise, position, bad):
    good = np.array([(1.0, 5.0), (2.0, 4.0), (3.0, 6.0)])
    alone = pareto.front_mask(good, maximise)
    for row in [(bad, 5.0), (2.0, bad), (bad, bad)]:
        mask = pareto.front_mask(np.insert(good, position, row, axis=0), maximise)
        assert not mask[position]
        assert np.delete(mask, position).tolist() == alone.tolist()


def test_ranks_peel_front_after_front():
    assert pareto.front_ranks(P, LOSS_FIRST).tolist() == [1, 0, 0, 0, 1]
    assert pareto.front_ranks(np.array([(np.nan, 1.0), (1.0, 1.0)])).tolist() == [-1, 0]


def test_the_published_front_of_eighteen_runs():
    mask = pareto.front_mask(np.array(list(PUBLISHED.values())))
    assert {name for name, member in zip(PUBLISHED, mask, strict=True) if member} == {
        "GDN AdamW pure",
        "GDN Muon pure",
        "DeltaNet AdamW pure",
        "GDN AdamW hybrid",
        "GDN Muon hybrid",
        "DeltaNet Muon hybrid",
        "KDA Muon hybrid",
    }


points_strategy = st.lists(
    st.tuples(st.integers(0, 8).map(float), st.integers(0, 8).map(float)), min_size=1, max_size=14
)


@given(points_strategy)
def test_fronts_and_areas_agree_with_moocore(points):
    array = np.array(points)
    for maximise in itertools.product([True, False], repeat=2):
        truth = moocore.is_nondominated(array, maximise=list(maximise), keep_weakly=True)
        assert pareto.front_mask(array, maximise).tolist() == truth.tolist()
        reference = [-1.0 if up else 9.0 for up in maximise]
        area = moocore.hypervolume(array, ref=reference, maximise=list(maximise))
        assert pareto.hypervolume(array, tuple(reference), maximise) == pytest.approx(area)


@given(points_strategy, st.randoms())
def test_order_does_not_matter(points, random):
    array = np.array(points)
    order = list(range(len(points)))
    random.shuffle(order)
    assert pareto.front_mask(array)[order].tolist() == pareto.front_mask(array[order]).tolist()


@given(points_strategy)
def test_every_corner_of_a_staircase_was_reached(points):
    array = np.array(points)
    for maximise in itertools.product([True, False], repeat=2):
        front = array[pareto.front_mask(array, maximise)]
        line = pareto.staircase(array, maximise)
        sign = np.where(np.array(maximise), -1, 1)
        for corner in line:
            assert (front * sign <= corner * sign).all(axis=1).any()
        assert (np.diff(line[:, 0]) >= 0).all()
        assert line[0].tolist() in front.tolist()
        assert line[-1].tolist() in front.tolist()


def test_the_staircase_of_the_fixture(fixture_f):
    loss, speed = fixture_f
    means = np.column_stack([speed.mean(axis=1), loss.mean(axis=1)])
    assert pareto.front_mask(means).tolist() == [True, True, True, False, True]
    for throughput, expected in [(92, 3.39), (99.5, 3.405), (100, 3.4075), (119.5, 3.445)]:
        assert pareto.attained_loss(means, throughput) == pytest.approx(expected)
        assert pareto.attained_loss(means, throughput - 0.4) == pytest.approx(expected)
    assert pareto.attained_loss(means, 119.6) is None
    line = pareto.staircase(means)
    assert line[0] == pytest.approx([92, 3.39])
    assert line[-1] == pytest.approx([119.5, 3.445])
    assert line[1] == pytest.approx([92, 3.405])


def test_means_that_differ_by_rounding_are_equal():
    tied = np.array([(1.0, 0.1 + 0.2), (1.0, 0.3)])
    assert pareto.front_mask(tied).tolist() == [True, True]


def test_near_front_members_are_within_the_tolerance(fixture_f):
    loss, speed = fixture_f
    means = np.column_stack([speed.mean(axis=1), loss.mean(axis=1)])
    assert pareto.near_front_mask(means, (1.0, 0.005)).tolist() == [True, True, True, False, True]
    assert pareto.near_front_mask(means, (1.0, 0.02)).all()


def draw_means(loss, speed):
    weights, probabilities = resample_weights(loss.shape[1])
    return weights @ speed.T / 4, weights @ loss.T / 4, probabilities


def test_front_probabilities_of_the_fixture_are_exact(fixture_f):
    shares = pareto.front_probability(*draw_means(*fixture_f))
    assert shares == pytest.approx([189 / 256, 243 / 256, 1, 0, 166 / 256])


def test_unpaired_draws_would_put_an_always_dominated_arm_on_the_front(fixture_f):
    loss, speed = fixture_f
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(4000):
        picks = rng.integers(0, 4, size=(5, 4))
        means = [(speed[i, picks[i]].mean(), loss[i, picks[i]].mean()) for i in range(5)]
        hits += pareto.front_mask(np.array(means))[3]
    # Four standard errors of a share of 0.09 over 4,000 draws are 0.018.
    assert hits / 4000 == pytest.approx(0.089, abs=0.018)


def test_fronts_seed_by_seed(fixture_f):
    loss, speed = fixture_f
    masks = [pareto.front_mask(np.column_stack([speed[:, s], loss[:, s]])) for s in range(4)]
    rows = ["".join(str(int(m)) for m in mask) for mask in masks]
    assert rows == ["11100", "00101", "11100", "11101"]


@pytest.mark.parametrize(
    ("points", "reference", "maximise", "area"),
    [
        ([[5, 5], [4, 6], [2, 7], [7, 4]], (10, 10), (False, False), 38.0),
        ([[5, 5], [4, 6], [2, 7], [7, 4]], (0, 0), (True, True), 39.0),
        (P, (3.5, 40), LOSS_FIRST, 53.0),
        ([(i, 6 - i) for i in range(7)], (7, 7), (False, False), 49 - 21),
        ([[1, 1]], (1, 2), (False, False), 0.0),
        (np.empty((0, 2)), (1, 1), (False, False), 0.0),
    ],
)
def test_areas(points, reference, maximise, area):
    array = np.array(points, dtype=float)
    assert pareto.hypervolume(array, reference, maximise) == pytest.approx(area)
    doubled = np.concatenate([array.reshape(-1, 2)] * 2)
    assert pareto.hypervolume(doubled, reference, maximise) == pytest.approx(area)


def test_area_contributions():
    contributions = pareto.hypervolume_contributions(P, (3.5, 40), LOSS_FIRST)
    assert contributions == pytest.approx([0, 3, 24, 1, 0])


def test_areas_of_a_history():
    bad = (np.nan, np.nan)
    history = np.array([(1.5, 1.5), (0.75, 0.75), bad, (0.5, 0.5), (0.75, 0.25), (0, 0)])
    areas = [pareto.hypervolume(history[:k], (1, 1), (False, False)) for k in range(1, 7)]
    assert areas == pytest.approx([0, 0.0625, 0.0625, 0.25, 0.3125, 1])


def test_areas_of_the_fixture(fixture_f):
    loss, speed = fixture_f
    corner = (50.0, 3.60)
    areas = [
        pareto.hypervolume(np.column_stack([speed[:, s], loss[:, s]]), corner) for s in range(4)
    ]
    assert areas == pytest.approx([14.04, 12.75, 13.31, 14.14])
    assert np.mean(areas) == pytest.approx(13.56)
    means = np.column_stack([speed.mean(axis=1), loss.mean(axis=1)])
    assert pareto.hypervolume(means, corner) == pytest.approx(13.40125)
    contributions = pareto.hypervolume_contributions(means, corner)
    assert contributions == pytest.approx([0.01875, 0.63, 3.0225, 0, 0.01875])


def test_a_reference_must_be_finite():
    with pytest.raises(ValueError, match="must be finite"):
        pareto.hypervolume(P, (np.nan, 1.0))


def test_moocores_own_data():
    data = moocore.get_dataset("input1.dat")
    points, corner = data[:, :2], (10.0, 10.0)
    down = (False, False)
    assert pareto.hypervolume(points, corner, down) == pytest.approx(93.55331425585321)
    kept = points[pareto.front_mask(points, down)]
    assert len(kept) == 6
    assert pareto.hypervolume(kept, corner, down) == pytest.approx(93.55331425585321)
