"""For all tests: the order of their files, and hypothesis' examples in continuous integration."""

import os

import pytest
from hypothesis import settings

# Without a deadline: a machine that is busy with other work is no fault of the code.
settings.register_profile("unhurried", deadline=None)
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable" if os.environ.get("CI") else "unhurried")

# The longest first: last, one of them would leave all cores but one with nothing to do. Those that
# start a Ray take turns with those that only compute, since Ray waits now and then.
LONGEST = (
    "test_chaos.py",
    "test_interpreter.py",
    "test_sweep.py",
    "test_report.py",
    "test_generate.py",
    "test_cluster.py",
    "test_lm.py",
    "test_search_sweep.py",
    "test_compile_check.py",
    "test_interrupts.py",
    "test_data_dataset.py",
    "test_pilot.py",
    "test_data_preparation.py",
    "test_policies.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they were."""
    rank = {name: position for position, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.path.name, len(LONGEST)))
