"""What a sweep says when the Ray under it dies, and how long it waits before."""

import subprocess
import time
from types import SimpleNamespace

import pytest

from orchestrator import outages
from orchestrator.cluster import Node
from orchestrator.errors import LedgerError
from orchestrator.outages import RoomWatch

TRIAL = {"cpu": 2, "gpu": 0.5}
LARGE, HERE = (Node(node_id=host, host=host, cpus=8, gpus=n) for host, n in (("a", 1), ("b", 0)))


@pytest.fixture
def watched(monkeypatch):
    """A watch of a cluster whose nodes, head and clock are told; none of them is real."""
    told = SimpleNamespace(now=0.0, nodes=[LARGE, HERE], is_head_silent=False)

    def require_answer(address):
        assert address == "head:6379"
        if told.is_head_silent:
            raise ConnectionRefusedError

    monkeypatch.setattr(outages, "time", SimpleNamespace(monotonic=lambda: told.now))
    monkeypatch.setattr(outages, "nodes", lambda: told.nodes)
    monkeypatch.setattr(outages, "require_answer", require_answer)
    monkeypatch.setattr(outages, "head_address", lambda: "head:6379")
    monkeypatch.setattr(outages, "own_node_id", lambda: HERE.node_id)
    spec = SimpleNamespace(cluster=SimpleNamespace(address="auto"))
    told.watch = RoomWatch(SimpleNamespace(is_on_cluster=True, spec=spec), TRIAL)

    def look(*seconds):
        for now in seconds:
            told.now = float(now)
            told.watch.look()

    told.look = look
    return told


def test_a_cluster_may_be_without_room_for_a_while(watched):
    watched.look(10, 20)
    watched.nodes = [HERE]
    watched.look(30, 140)
    watched.nodes = [HERE, LARGE]
    watched.look(150)
    watched.nodes = [HERE]
    watched.look(160, 270)
    with pytest.raises(LedgerError, match=r"no node of the cluster at auto has had room .* 120 s"):
        watched.look(271)


def test_the_head_of_a_cluster_may_be_silent_for_less_than_ray_bears(watched):
    watched.look(10)
    watched.is_head_silent = True
    watched.look(20, 30)
    watched.is_head_silent = False
    watched.look(40)
    watched.is_head_silent = True
    watched.look(50, 60)
    with pytest.raises(LedgerError, match=r"head of the cluster at auto has not answered for 20 s"):
        watched.look(61)


def test_a_cluster_without_the_drivers_own_node_starts_nothing(watched):
    watched.look(10)
    watched.nodes = [LARGE]
    with pytest.raises(LedgerError, match="this machine's own node of the cluster at auto has die"):
        watched.look(20)


@pytest.mark.parametrize("dead", ["raylet", "gcs_server"])
def test_a_ray_of_ones_own_is_dead_at_once_without_one_of_its_processes(monkeypatch, dead):
    running = {"raylet", "gcs_server", "git"}
    monkeypatch.setattr(outages, "living_children", lambda: running)
    watch = RoomWatch(SimpleNamespace(is_on_cluster=False), TRIAL)
    watch.look()
    running.remove(dead)
    with pytest.raises(LedgerError, match=rf"own Ray on this machine has died \({dead} ended\)"):
        watch.look()


def test_a_child_that_was_killed_and_not_waited_for_is_not_living():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert "sleep" in outages.living_children()
        child.kill()
        deadline = time.monotonic() + 30
        while "sleep" in outages.living_children():
            assert time.monotonic() < deadline
    finally:
        child.kill()
        child.wait()
