"""Pilots, the price that they give, its limit, and the share of a GPU that memory asks for."""

import json

import pytest

from orchestrator.hardware import this_machine
from orchestrator.pilot import CONTEXT_BYTES, MEMORY_MARGIN, Pilot, gpu_share

GIB = 2**30


def needing(*gibibytes):
    return [Pilot(0.1, 0.1, int(x * GIB)) for x in gibibytes]


@pytest.mark.parametrize(
    ("asked", "pilots", "memory", "expected"),
    [
        (0.25, needing(2, 10), 100 * GIB, 0.25),
        (0.25, needing(2, 60), 100 * GIB, 0.60 * MEMORY_MARGIN + CONTEXT_BYTES / (100 * GIB)),
        (0.25, needing(99), 100 * GIB, 1.0),
        (0.25, [], 100 * GIB, 0.25),
        (0.25, needing(60), 0, 0.25),
        (1, needing(99), 100 * GIB, 1),
        (2, needing(60), 100 * GIB, 2),
    ],
    ids=["fits", "largest decides", "alone", "unknown need", "unknown GPU", "whole", "several"],
)
def test_a_trial_takes_the_share_that_its_memory_needs(asked, pilots, memory, expected):
    assert gpu_share(asked, pilots, memory) == pytest.approx(expected)


@pytest.mark.ray
def test_a_sweep_is_priced_by_pilots_and_refused_beyond_its_limit(fake):
    """The first pilot's process is killed, which says nothing about its shape: it is run again."""
    fake.write([1e-3, 3e-3], [0, 1], killed_measurements=1)
    limit = "price.max_gpu_hours=1e-5"
    assert fake.call(verb="plan") == 0
    assert "1 shape is not measured yet" in fake.said

    assert fake.call(limit) == 2, fake.said
    assert "more than price.max_gpu_hours=1e-05; raise it, ask for less, or" in fake.said
    assert not fake.journals()
    assert not (fake.sweep / "spec.json").exists()
    pilots = list((fake.folder / "runs" / "pilots").glob("*/pilot.jsonl"))
    assert len(pilots) == 1  # two rates, one shape
    before = pilots[0].read_bytes()

    # Known by now, so that nothing is started for it.
    assert fake.call(limit) == 2, fake.said
    assert fake.call(verb="pilot") == 0, fake.said
    assert "hours of this machine, by pilots of every shape" in fake.said
    assert pilots[0].read_bytes() == before

    assert fake.call("--json", verb="plan") == 0
    price = json.loads(fake.said.splitlines()[-1])["price"]
    # 4 trials of 20 steps, 4 windows evaluated of 20 a step; a step takes 0.09 to 0.12 s.
    hours = 1 / this_machine().cpus / 3600
    assert price["low_hours"] == pytest.approx(4 * (20 + 0.2 / 3) * 0.09 * hours)
    assert price["high_hours"] == pytest.approx(4 * 20.2 * 0.12 * hours)
    assert price["unmeasured_shapes"] == 0
