"""The order of windows is a pure function of seed, epoch, step and batch."""

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.data import TrainingBatches, evaluation_windows, share, window_ids
from orchestrator.data.dataset import Dataset
from orchestrator.data.order import epoch_permutation

seeds = st.integers(0, 2**64 - 1)


def steps(first: int, last: int, *, seed: int = 3, batch: int = 6, windows: int = 64) -> list[int]:
    """Window ids of steps `first` … `last` - 1, joined."""
    ids = [window_ids(seed, step, batch, windows) for step in range(first, last)]
    return [int(i) for i in np.concatenate(ids)]


def ids_in_a_fresh_process(seed: int, first: int, last: int, batch: int, windows: int) -> list[int]:
    program = (
        "import json\n"
        "from orchestrator.data.order import window_ids\n"
        f"steps = range({first}, {last})\n"
        f"ids = [window_ids({seed}, s, {batch}, {windows}).tolist() for s in steps]\n"
        "print(json.dumps(sum(ids, [])))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    result: list[int] = json.loads(done.stdout)
    return result


def test_order_of_a_seed_is_pinned() -> None:
    # Published results name a seed: another NumPy that shuffles otherwise must be noticed.
    assert epoch_permutation(0, 0, 16).tolist() == [
        7,
        0,
        6,
        8,
        14,
        1,
        12,
        13,
        3,
        10,
        5,
        9,
        15,
        2,
        4,
        11,
    ]
    assert epoch_permutation(0, 1, 16).tolist() == [
        9,
        8,
        1,
        10,
        7,
        4,
        14,
        15,
        2,
        0,
        12,
        13,
        11,
        5,
        3,
        6,
    ]
    assert epoch_permutation(1, 0, 16).tolist() == [
        0,
        10,
        14,
        1,
        8,
        4,
        13,
        6,
        7,
        9,
        12,
        5,
        2,
        3,
        11,
        15,
    ]


@given(seed=seeds, epoch=st.integers(0, 1000), windows=st.integers(1, 500))
def test_an_epoch_holds_each_window_once(seed: int, epoch: int, windows: int) -> None:
    assert sorted(epoch_permutation(seed, epoch, windows).tolist()) == list(range(windows))


@given(
    seed=seeds,
    batch=st.integers(1, 40),
    windows=st.integers(1, 60),
    first=st.integers(0, 30),
    count=st.integers(1, 10),
)
def test_steps_are_slices_of_the_joined_epochs(
    seed: int, batch: int, windows: int, first: int, count: int
) -> None:
    last = first + count
    epochs = -(-last * batch // windows)
    stream = np.concatenate([epoch_permutation(seed, epoch, windows) for epoch in range(epochs)])
    expected = stream[first * batch : last * batch].tolist()
    assert steps(first, last, seed=seed, batch=batch, windows=windows) == expected


@given(
    seed=seeds,
    micro_windows=st.integers(1, 4),
    layouts=st.lists(st.sampled_from([(1, 1), (4, 3), (8, 2), (2, 12), (24, 1)]), min_size=1),
    step=st.sampled_from([0, 7, 229, 231, 500]),
)
def test_ranks_and_micro_steps_share_a_batch_without_overlap(
    seed: int, micro_windows: int, layouts: list[tuple[int, int]], step: int
) -> None:
    ids = window_ids(seed, step, 48 * micro_windows, 1_000)
    for world_size, num_micro_steps in layouts:
        parts = [
            share(
                ids,
                rank=rank,
                world_size=world_size,
                micro_step=micro_step,
                num_micro_steps=num_micro_steps,
            )
            for micro_step in range(num_micro_steps)
            for rank in range(world_size)
        ]
        assert np.concatenate(parts).tolist() == ids.tolist()


def test_ranks_of_a_micro_step_read_what_one_process_reads_in_it() -> None:
    ids = window_ids(0, 0, 24, 100)
    alone = share(ids, micro_step=1, num_micro_steps=3)
    together = [
        share(ids, rank=rank, world_size=4, micro_step=1, num_micro_steps=3) for rank in range(4)
    ]
    assert np.concatenate(together).tolist() == alone.tolist()


def test_union_of_eight_ranks_over_an_epoch_is_each_window_once() -> None:
    # Ranks that shuffle with seeds of their own overlap: llm.c issue 792.
    seen: list[int] = []
    for step in range(8):
        ids = window_ids(5, step, 16, 128)
        for rank in range(8):
            seen += share(ids, rank=rank, world_size=8).tolist()
    assert sorted(seen) == list(range(128))


def test_three_resumes_equal_the_uninterrupted_run(tiny: Dataset) -> None:
    # A position that is only right after the first resume: torchtitan issue 3907.
    def run(first: int, last: int) -> list[list[int]]:
        batches = TrainingBatches(split=tiny.train, data_seed=11, windows_per_step=24, seq_len=32)
        # 20 steps cross the end of an epoch, else this would show little.
        assert batches.num_windows < 20 * 24 < 3 * batches.num_windows
        return [batches.batch(step)[0].tolist() for step in range(first, last)]

    uninterrupted = run(0, 20)
    resumed = [batch for first in range(0, 20, 5) for batch in run(first, first + 5)]
    assert resumed == uninterrupted


def test_resume_in_the_second_epoch_completes_it_in_a_fresh_process() -> None:
    # Restoring the position without the permutation repeats windows: accelerate issue 4195.
    before = steps(8, 11, batch=8, windows=64)
    after = ids_in_a_fresh_process(seed=3, first=11, last=16, batch=8, windows=64)
    assert sorted(before + after) == list(range(64))
    assert before + after == steps(8, 16, batch=8, windows=64)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    # Without a shuffle of each epoch the validation loss becomes periodic.
    orders = [tuple(epoch_permutation(s, e, 64).tolist()) for s in range(4) for e in range(4)]
    assert len(set(orders)) == 16
    assert tuple(range(64)) not in orders


def test_global_generator_is_neither_read_nor_advanced() -> None:
    before = repr(np.random.get_state())  # noqa: NPY002
    first = window_ids(9, 2, 8, 50).tolist()
    assert repr(np.random.get_state()) == before  # noqa: NPY002
    epoch_permutation.cache_clear()
    assert window_ids(9, 2, 8, 50).tolist() == first


def test_a_cached_order_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        epoch_permutation(0, 0, 8)[0] = 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 0, 4, 16), "data_seed=-1"),
        ((2**64, 0, 4, 16), "data_seed"),
        ((0, -1, 4, 16), "step=-1"),
        ((0, 0, 0, 16), "windows_per_step=0"),
        ((0, 0, 4, 0), "num_windows=0"),
    ],
)
def test_impossible_orders_are_refused(arguments: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        window_ids(*arguments)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank=2"),
        ({"micro_step": 3, "num_micro_steps": 3}, "micro_step=3"),
        ({"world_size": 5}, "12 windows"),
    ],
)
def test_impossible_shares_are_refused(layout: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        share(window_ids(0, 0, 12, 100), **layout)


@settings(max_examples=200)
@given(windows=st.integers(1, 10_000), share_of=st.floats(0, 1))
def test_evaluation_windows_spread_evenly(windows: int, share_of: float) -> None:
    count = max(1, int(windows * share_of))
    ids = evaluation_windows(windows, count)
    assert len(ids) == count
    assert ids[0] == 0
    assert ids[-1] < windows
    gaps = np.diff(np.append(ids, windows))
    assert gaps.min() >= windows // count
    assert gaps.max() <= -(-windows // count)


def test_every_window_is_evaluated_by_default() -> None:
    assert evaluation_windows(7).tolist() == list(range(7))


@pytest.mark.parametrize("count", [0, 8])
def test_more_evaluation_windows_than_there_are_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"eval\.windows={count} .*7 windows"):
        evaluation_windows(7, count)
