"""What a whole sweep does about trials that fail alike, out of memory, or without a disk."""

import errno
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator import driver as driving
from orchestrator.errors import ConfigError
from orchestrator.readiness import require_writable

pytestmark = pytest.mark.ray


def test_equal_bugs_stop_the_sweep_at_once_and_one_is_shown(fake):
    fake.write([1e-3], list(range(12)), mishaps=[{"at_step": 2, "what": "crash"}])
    assert fake.call() == 3, fake.said
    assert "failed alike" in fake.said
    assert "max_equal_failures=3" in fake.said
    assert fake.said.count("RuntimeError: scripted crash\n") <= len(fake.journals()) + 1
    assert "Traceback (most recent call last)" in fake.said
    assert 3 <= len(fake.journals()) < 12
    fake.assert_consistent(12)
    assert {run.info.status for run in fake.runs()} <= {"FAILED", "KILLED"}
    assert [run.info.status for run in fake.runs("sweep")] == ["FAILED"]
    run = next(run for run in fake.runs() if run.data.tags["status"] == "failed")
    paths = [item.path for item in fake.client().list_artifacts(run.info.run_id)]
    assert "output.log" in paths


@pytest.mark.parametrize("place", ["/proc/nowhere", "/dev/null/runs"])
def test_a_root_that_cannot_be_written_is_refused_in_one_sentence(place):
    with pytest.raises(ConfigError, match=f"--root {place} cannot be written") as caught:
        require_writable(Path(place))
    assert "\n" not in str(caught.value)


def test_a_disk_that_fills_up_stops_the_sweep_and_says_how_it_continues(tmp_path, monkeypatch):
    def fill(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(driving, "preparing", lambda plan, console: nullcontext())
    call = SimpleNamespace(plan=SimpleNamespace(root=tmp_path), run=fill)
    lease = SimpleNamespace(lost_to=None)
    said = []
    console = SimpleNamespace(print=lambda text, **options: said.append(text))
    assert driving._reconcile(call, console, lease, "sqlite:///x") == 3
    assert f"nothing can be written to {tmp_path} (No space left on device)" in said[0]
    assert "the same command continues" in said[0]
