"""Which trial a free worker gets, and how many trials run at a time."""

from types import SimpleNamespace

import pytest
from ray.tune.experiment import Trial

from orchestrator.cluster import Node, places
from orchestrator.sweep import StartsSpared


def chosen(statuses, room):
    """Index of the trial that is chosen among trials of these statuses."""
    trials = [
        SimpleNamespace(trial_id=f"a_{number:05d}", status=status)
        for number, status in enumerate(statuses)
    ]
    # Tune gives a set, whose order says nothing.
    controller = SimpleNamespace(get_live_trials=lambda: reversed(trials))
    trial = StartsSpared(room).choose_trial_to_run(controller)
    return None if trial is None else trials.index(trial)


WAITS, RUNS = Trial.PENDING, Trial.RUNNING


@pytest.mark.parametrize(
    ("statuses", "room", "index"),
    [
        ([WAITS] * 5, 1, 0),  # the one worker is free
        ([WAITS] * 5, 2, 1),  # one is free, the first trial's is starting
        ([WAITS] * 5, 4, 3),
        ([WAITS] * 5, 9, 4),  # all are starting: one start is in vain
        ([RUNS, WAITS, WAITS], 2, 1),  # one runs, the other is free
        ([WAITS, RUNS, WAITS, WAITS], 3, 2),  # one runs, one is free, the first trial's is starting
        ([RUNS, RUNS, WAITS, WAITS], 1, 2),  # more than there was room for when the round began
        ([RUNS, RUNS], 2, None),
        ([], 2, None),
    ],
)
def test_a_free_worker_takes_the_oldest_trial_whose_own_is_not_starting(statuses, room, index):
    assert chosen(statuses, room) == index


@pytest.mark.parametrize(
    ("nodes", "resources", "number"),
    [
        ([(2, 0)], {"cpu": 1, "gpu": 0}, 2),
        ([(16, 1)], {"cpu": 1, "gpu": 0.1}, 10),
        ([(16, 1)], {"cpu": 1, "gpu": 0.3}, 3),
        ([(4, 8)], {"cpu": 1, "gpu": 0.25}, 4),
        ([(3, 0), (3, 0)], {"cpu": 2, "gpu": 0}, 2),  # a trial does not span nodes
        ([(2, 0)], {"cpu": 4, "gpu": 0}, 0),
    ],
)
def test_places_are_counted_node_by_node(nodes, resources, number):
    found = [Node(node_id=str(n), host="h", cpus=c, gpus=g) for n, (c, g) in enumerate(nodes)]
    assert places(found, resources) == number
