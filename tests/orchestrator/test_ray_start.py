"""Ray on a machine that is busy: started once more, then refused in a sentence."""

import pytest

from orchestrator import cluster
from orchestrator.errors import ConfigError

TOO_BUSY = "The current node timed out during startup. This could happen because"


@pytest.fixture
def starts(monkeypatch):
    """Makes the starts of Ray go as told, one after another; returns what was done."""

    def script(*errors):
        done, left = [], list(errors)

        def start(plan):
            done.append("start")
            error = left.pop(0)
            if error is not None:
                raise error

        monkeypatch.setattr(cluster, "_start_once", start)
        monkeypatch.setattr(cluster.ray, "shutdown", lambda: done.append("shutdown"))
        return done

    return script


def test_a_start_that_was_too_slow_is_tried_once_more(starts):
    done = starts(Exception(TOO_BUSY), None)
    cluster._start(None)
    assert done == ["start", "shutdown", "start"]


def test_a_machine_that_is_too_busy_twice_is_said_in_one_sentence(starts):
    done = starts(Exception(TOO_BUSY), Exception(TOO_BUSY))
    with pytest.raises(ConfigError, match=r"Ray did not start on this machine within 30 s, twice"):
        cluster._start(None)
    assert done == ["start", "shutdown"] * 2


def test_another_error_of_rays_start_is_not_hidden(starts):
    done = starts(RuntimeError("no such address"))
    with pytest.raises(RuntimeError, match="no such address"):
        cluster._start(None)
    assert done == ["start"]
