"""What a driver tells MLflow while trials run: every result, also after the store was away."""

import io
import math
from collections import Counter
from types import SimpleNamespace

import pytest
from rich.console import Console

from orchestrator import progress
from orchestrator.journal import Journal
from orchestrator.ledger import Ledger
from orchestrator.progress import Progress
from orchestrator.tracking import TrackingError

END = {"event": "end", "status": "completed"}


class View:
    """Stands in for MLflow: remembers the last status that it was told of each replicate."""

    def __init__(self):
        self.told = {}
        self.tellings = Counter()
        self.largest_call = 0
        self.is_away = False

    def sync(self, ledger, records, states, provenance):
        if self.is_away:
            raise TrackingError("it is away")
        self.largest_call = max(self.largest_call, len(records))
        self.told.update({name: states[name].status for name in records})
        self.tellings.update(records.keys())


@pytest.fixture
def sweep(tmp_path):
    """Five replicates of which none has begun, a view of them and what keeps it up to date."""
    ledger, names = Ledger(tmp_path, "demo"), [f"c1-s{seed}" for seed in range(5)]
    plan = SimpleNamespace(
        ledger=ledger,
        desired={name: SimpleNamespace(replicate_id=name) for name in names},
        states=ledger.states(names),
        spec=SimpleNamespace(max_equal_failures=None),
    )
    view = View()
    console = Console(file=io.StringIO())
    return SimpleNamespace(
        ledger=ledger, names=names, view=view, progress=Progress(plan, view, None, console)
    )


def end(sweep, *names):
    for name in names:
        journal = Journal(sweep.ledger.next_attempt(name))
        journal.append(END)
        journal.close()


def look(sweep, *, is_due, is_over=lambda: False):
    sweep.progress._next_show = 0.0 if is_due else math.inf
    sweep.progress.tick(is_over)


def test_a_result_is_read_once_and_told_when_it_is_due(sweep, monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AT_A_TIME", 2)
    end(sweep, *sweep.names[:3])
    look(sweep, is_due=False)
    assert sweep.view.told == {}

    read = []
    states = Ledger.states
    monkeypatch.setattr(
        Ledger, "states", lambda self, names: states(self, read.extend(names) or names)
    )
    end(sweep, sweep.names[3])
    look(sweep, is_due=True)
    assert read == sweep.names[3:]
    assert sweep.view.told == dict.fromkeys(sweep.names[:4], "completed") | {"c1-s4": "pending"}
    assert sweep.view.largest_call == 2

    sweep.view.told.clear()
    look(sweep, is_due=True)
    assert sweep.view.told == {"c1-s4": "pending"}


def test_results_that_mlflow_could_not_be_told_are_told_later(sweep):
    end(sweep, *sweep.names)
    sweep.view.is_away = True
    look(sweep, is_due=True)
    assert sweep.view.told == {}
    sweep.view.is_away = False
    look(sweep, is_due=True)
    assert sweep.view.told == dict.fromkeys(sweep.names, "completed")


def test_a_look_gives_way_when_trials_are_over_and_the_next_goes_on(sweep, monkeypatch):
    monkeypatch.setattr(progress, "SHOWN_AT_A_TIME", 2)
    end(sweep, *sweep.names)
    look(sweep, is_due=True, is_over=lambda: bool(sweep.view.told))
    assert list(sweep.view.told) == sweep.names[:2]
    look(sweep, is_due=True, is_over=lambda: True)
    assert list(sweep.view.told) == sweep.names[:2]
    look(sweep, is_due=True)
    assert sweep.view.tellings == dict.fromkeys(sweep.names, 1)
    assert sweep.view.told == dict.fromkeys(sweep.names, "completed")


def test_what_a_look_left_is_told_at_the_end(sweep):
    end(sweep, *sweep.names)
    look(sweep, is_due=True, is_over=lambda: True)
    assert sweep.view.told == {}
    sweep.progress.finish()
    assert sweep.view.told == dict.fromkeys(sweep.names, "completed")
