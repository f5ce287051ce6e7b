"""Data that has to be prepared does not hold up what can start without it."""

import threading
from types import SimpleNamespace

import pytest

from orchestrator import readiness
from orchestrator.errors import ConfigError
from orchestrator.readiness import preparing


def plan(*, is_embedded, data_folder=None):
    return SimpleNamespace(data=SimpleNamespace(is_embedded=is_embedded), data_folder=data_folder)


def test_embedded_data_is_prepared_while_the_block_goes_on(monkeypatch):
    has_begun = threading.Event()

    def wait_for_the_block(plan, console):
        assert has_begun.wait(30)
        return "the plan with its data"

    monkeypatch.setattr(readiness, "with_data", wait_for_the_block)
    with preparing(plan(is_embedded=True), None) as wait_for_data:
        has_begun.set()
        assert wait_for_data() == "the plan with its data"


def test_a_preparation_that_fails_says_so_to_whom_waits_for_it(monkeypatch):
    def fail(plan, console):
        raise ConfigError("too short for a window")

    monkeypatch.setattr(readiness, "with_data", fail)
    with (
        pytest.raises(ConfigError, match="too short"),
        preparing(plan(is_embedded=True), None) as wait_for_data,
    ):
        wait_for_data()


@pytest.mark.parametrize(
    ("is_embedded", "folder"), [(True, "data"), (False, None)], ids=["prepared", "files"]
)
def test_other_data_is_looked_at_before_anything_starts(monkeypatch, is_embedded, folder):
    def fail(plan, console):
        raise ConfigError("not prepared")

    monkeypatch.setattr(readiness, "with_data", fail)
    begun = []
    with (
        pytest.raises(ConfigError, match="not prepared"),
        preparing(plan(is_embedded=is_embedded, data_folder=folder), None),
    ):
        begun.append("the block")
    assert begun == []


def test_a_plan_refuses_more_windows_than_prepared_data_has(fake):
    fake.write([1e-3], [0])
    assert fake.call(verb="plan") == 0
    assert fake.call("eval.windows=1_000_000", verb="plan") == 2
    assert "eval.windows=1000000 must be between 1 and" in fake.said
    assert not (fake.folder / "runs" / "fake").exists()
