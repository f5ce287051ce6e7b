"""A sweep on a Ray cluster of two nodes, one of which is lost while it runs."""

import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from ray.cluster_utils import Cluster

from orchestrator import cluster
from orchestrator.cluster import Node, RoomWatch
from orchestrator.config import ClusterConfig
from orchestrator.doctor import examine_cluster
from orchestrator.errors import LedgerError
from orchestrator.journal import read_events
from orchestrator.provenance import CHECKOUT
from tests.orchestrator.conftest import TRAINER


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"name": "slurm"}, "must be one of local, ray"),
        ({"name": "ray"}, "ray needs the address"),
        ({"address": "auto"}, "local has none"),
        ({"name": "ray", "address": "ray://head:10001"}, "Ray Client is not supported"),
    ],
    ids=["unknown", "no address", "local", "client"],
)
def test_what_names_no_cluster_is_refused(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        ClusterConfig(**values)


@pytest.mark.ray
def test_a_lost_node_costs_no_replicate(fake, monkeypatch):
    # No trial ends before the loss, however late the second node's worker comes.
    held = {"when": {}, "at_step": 7, "what": "held"}
    fake.write([1e-3, 3e-3], [0, 1, 2], checkpoint_every=5, mishaps=[held])
    for name, value in (
        ("PYTHONPATH", str(CHECKOUT)),
        ("SEEDFRONT_TEST_TRAINER", str(TRAINER)),
        ("SEEDFRONT_TEST_SCRIPT", str(fake.folder / "script.json")),
    ):
        monkeypatch.setenv(name, value)
    two_nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        lost = two_nodes.add_node(num_cpus=1)
        started = [
            info.process
            for node in two_nodes.list_all_nodes()
            for infos in node.all_processes.values()
            for info in infos
        ]
        where = ["device=cpu", "cluster=ray", f"cluster.address={two_nodes.address}"]

        assert fake.call(*where, "lanes.loss.cpus=2") == 2
        assert "a trial needs 2 cores and 0 GPUs, and no node has them" in fake.said

        checks = examine_cluster(fake.folder / "runs", two_nodes.address)
        assert len(checks) == 2 * 9
        assert [check.finding for check in checks if not check.fit] == []

        has_ended = threading.Event()

        def lose():
            fake.wait_for(lambda: has_ended.is_set() or len(fake.workers()) == 2)
            two_nodes.remove_node(lost, allow_graceful=False)
            fake.wait_for(lambda: has_ended.is_set() or len(fake.workers()) == 1)
            (fake.folder / "go").touch()

        with ThreadPoolExecutor(1) as pool:
            losing = pool.submit(lose)
            try:
                code = fake.call(*where)
            finally:
                has_ended.set()
        assert losing.exception() is None
        assert code == 0, fake.said
    finally:
        two_nodes.shutdown()
        for process in started:  # Ray itself never waits for them
            process.wait(30)
    fake.assert_consistent(6)
    ends = [e for path in fake.journals() for e in read_events(path)[0] if e["event"] == "end"]
    assert {e.get("failure_class") for e in ends if e["status"] == "failed"} == {"node"}
    assert not fake.workers()


def test_an_address_where_nobody_answers_is_said(fake):
    fake.write([1e-3], [0])
    overrides = ("device=cpu", "cluster=ray", "cluster.address=127.0.0.1:1")
    assert fake.call(*overrides) == 2, fake.said
    assert "no Ray cluster can be joined there" in fake.said
    assert not fake.journals()


TRIAL = {"cpu": 2, "gpu": 0.5}
LARGE, HERE = (Node(node_id=host, host=host, cpus=8, gpus=n) for host, n in (("a", 1), ("b", 0)))


@pytest.fixture
def watched(monkeypatch):
    """A watch of a cluster whose nodes, head and clock are told; none of them is real."""
    told = SimpleNamespace(now=0.0, nodes=[LARGE, HERE], is_head_silent=False)
    context = SimpleNamespace(gcs_address="head:6379", get_node_id=lambda: HERE.node_id)

    def require_answer(address):
        assert address == "head:6379"
        if told.is_head_silent:
            raise ConnectionRefusedError

    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: told.now))
    monkeypatch.setattr(cluster, "nodes", lambda: told.nodes)
    monkeypatch.setattr(cluster, "_require_answer", require_answer)
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: context)
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
    monkeypatch.setattr(cluster, "living_children", lambda: running)
    watch = RoomWatch(SimpleNamespace(is_on_cluster=False), TRIAL)
    watch.look()
    running.remove(dead)
    with pytest.raises(LedgerError, match=rf"own Ray on this machine has died \({dead} ended\)"):
        watch.look()


def test_a_child_that_was_killed_and_not_waited_for_is_not_living():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert "sleep" in cluster.living_children()
        child.kill()
        deadline = time.monotonic() + 30
        while "sleep" in cluster.living_children():
            assert time.monotonic() < deadline
    finally:
        child.kill()
        child.wait()
