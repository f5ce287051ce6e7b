"""A sweep on a Ray cluster of two nodes, one of which is lost while it runs."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray.cluster_utils import Cluster

from orchestrator.config import ClusterConfig
from orchestrator.doctor import examine_cluster
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
