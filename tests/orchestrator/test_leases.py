"""One driver at a time, told from a dead one by locks, heartbeats and starts, not by clocks."""

import json
import multiprocessing
import os
import signal
import socket
import time

import pytest

from orchestrator import leases
from orchestrator.errors import LedgerError
from orchestrator.leases import DriverLease, is_alive, living, process_facts
from orchestrator.readiness import interruptible


def _hold(folder, taken):
    with DriverLease(folder):
        taken.set()
        signal.pause()


@pytest.fixture
def holder(tmp_path):
    """Another process of this host that holds the lease."""
    context = multiprocessing.get_context("spawn")
    taken = context.Event()
    process = context.Process(target=_hold, args=(tmp_path, taken))
    process.start()
    assert taken.wait(60)
    yield process
    process.kill()
    process.join()


def test_a_second_driver_that_does_not_wait_is_told_who_holds_the_lease(holder, tmp_path):
    with pytest.raises(LedgerError, match=f"pid {holder.pid}"), DriverLease(tmp_path):
        pass


def test_a_killed_driver_frees_its_lease_at_once(holder, tmp_path):
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    with DriverLease(tmp_path):
        pass


def test_a_second_driver_waits_for_the_first(holder, tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.05)
    told = []

    def say_and_end_it(name):
        told.append(name)
        holder.terminate()

    with DriverLease(tmp_path, say_and_end_it):
        pass
    assert told == [f"{socket.gethostname()} pid {holder.pid}"]


def elsewhere(folder, beats):
    facts = {"host": "another host", "pid": 7, "process_started": "b:1", "beats": beats}
    (folder / "driver.lock").write_text(json.dumps(facts))


def test_a_heartbeat_on_another_host_holds_the_lease_though_its_lock_is_not_seen(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(leases, "LEASE_SECONDS", 30.0)
    elsewhere(tmp_path, 1)

    def beat(seconds):
        elsewhere(tmp_path, 2)

    monkeypatch.setattr(leases.time, "sleep", beat)
    with pytest.raises(LedgerError, match="another host pid 7"), DriverLease(tmp_path):
        pass


def test_without_heartbeats_another_hosts_lease_runs_out_whatever_the_clock_says(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(leases, "LEASE_SECONDS", 0.3)
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.05)
    monkeypatch.setattr(time, "time", lambda: 0.0)
    elsewhere(tmp_path, 1)
    began = time.monotonic()
    with DriverLease(tmp_path):
        assert time.monotonic() - began >= 0.3
        assert json.loads((tmp_path / "driver.lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "driver.lock").read_text() == ""


def test_a_driver_that_was_taken_over_is_interrupted(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "HEARTBEAT_SECONDS", 0.05)
    lease = DriverLease(tmp_path)

    def be_taken_over():
        with interruptible(), lease:
            elsewhere(tmp_path, 1)
            time.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        be_taken_over()
    assert lease.lost_to == "another host pid 7"
    assert "another host" in (tmp_path / "driver.lock").read_text()


def test_a_process_is_known_by_its_start_and_not_by_its_pid_or_the_wall_clock(monkeypatch):
    facts = process_facts()
    assert is_alive(facts)
    assert not is_alive({**facts, "process_started": "another boot:1"})
    assert not is_alive({**facts, "host": "another host"})
    assert not is_alive({})
    monkeypatch.setattr(time, "time", lambda: 0.0)
    assert process_facts() == facts
    assert [process.pid for process in living([facts, {}])] == [os.getpid()]


def test_a_process_that_ended_is_not_alive_even_before_its_parent_has_noticed():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    deadline = time.monotonic() + 30
    while leases.process_started(pid) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.waitpid(pid, 0)
