"""Sweeps whose driver, workers and Ray are killed at random moments end as if nothing had happened.

The moments come from a generator with a fixed seed, but what they hit depends on the machine, so
every run of this test is another case.
"""

import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

pytestmark = pytest.mark.ray

DIVERGING = {"when": {"seed": 2}, "at_step": 9, "what": "nan"}
MISHAPS = [
    {"when": {"seed": 1}, "attempts": 1, "at_step": 7, "what": "crash"},
    {"when": {"seed": 3}, "at_step": 4, "what": "out_of_gpu_memory", "fits": 10},
    {"when": {"seed": 4}, "attempts": 1, "at_step": 11, "what": "killed"},
    {"when": {"seed": 5}, "attempts": 1, "at_step": 12, "what": "terminated"},
    {"when": {"seed": 6}, "attempts": 1, "at_step": 13, "what": "out_of_host_memory"},
    {"when": {"seed": 7}, "attempts": 1, "at_step": 6, "what": "slow"},
    {"when": {"seed": 8}, "attempts": 1, "at_step": 14, "what": "disk_full"},
]
LIMITS = ("max_equal_failures=null", "lanes.loss.max_minutes=0.05")


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def kill_workers_now_and_then(sweep, generator, stop, mean_seconds):
    while not stop.wait(generator.exponential(mean_seconds)):
        workers = sorted(sweep.workers())
        if workers:
            kill(int(generator.choice(workers)))


@contextmanager
def dying_workers(sweep, generator, mean_seconds):
    """Workers are killed at random moments while the `with` block goes on."""
    stop = threading.Event()
    arguments = (sweep, generator, stop, mean_seconds)
    killer = threading.Thread(target=kill_workers_now_and_then, args=arguments)
    killer.start()
    try:
        yield
    finally:
        stop.set()
        killer.join()


def part_of_ray(driver, name):
    """The process of this name that a driver has started."""
    (found,) = (p for p in psutil.Process(driver.pid).children() if p.name() == name)
    return found


def storm(sweep, generator, deaths, mean_seconds, worker_seconds):
    """Calls until every replicate has its result; the first ones end early, at random moments.

    `deaths` names what is killed in each of those: `driver`, or a process of its Ray. Workers die
    while that is about to happen, and in each later call for some seconds more.
    """
    for call in range(len(deaths) + 6):
        done = results(sweep)
        driver = sweep.start(*LIMITS)
        if call >= len(deaths):
            with dying_workers(sweep, generator, 2 * mean_seconds):
                wait_at_most(driver, worker_seconds)
            code = driver.wait(900)
            assert code in (0, 3), sweep.said
            if code == 0:
                return
            continue
        sweep.wait_for(
            lambda done=done: sum(map(len, sweep.ends().values())) > done + 3, driver, 600
        )
        with dying_workers(sweep, generator, mean_seconds):
            time.sleep(generator.uniform(0, 2 * mean_seconds))
            if deaths[call] == "driver":
                kill(driver.pid)
                driver.wait()
            else:
                part_of_ray(driver, deaths[call]).kill()
                assert driver.wait(120) == 2, sweep.said
    pytest.fail(f"replicates still fail: {sweep.said}")


def results(sweep):
    """How many replicates have a result."""
    return len([1 for ends in sweep.ends().values() for e in ends if e["status"] != "failed"])


def wait_at_most(process, seconds):
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def expected_loss(row):
    return 8.0 - np.log1p(row["step"]) * (1 + 100 * row["lr"]) - 0.001 * row["seed"]


def at_rates(rates):
    """Every mishap at each of some rates, and the divergence of a seed everywhere."""
    each = [m | {"when": {**m["when"], "lr": rate}} for m in MISHAPS for rate in rates]
    return [DIVERGING, *each]


def run_chaos(sweep, descendants, rates, seeds, seed, deaths, worker_seconds):
    mishaps = at_rates(rates[: len(rates) // 5])
    sweep.write(
        rates, list(range(seeds)), steps=20, step_seconds=0.02, checkpoint_every=5, mishaps=mishaps
    )
    generator = np.random.Generator(np.random.PCG64(seed))
    storm(sweep, generator, deaths, mean_seconds=1.5, worker_seconds=worker_seconds)
    sweep.assert_consistent(len(rates) * seeds)
    trials, curves = sweep.trials(), sweep.curves()
    assert set(trials.query("seed == 2")["status"]) == {"diverged"}
    assert set(trials.query("seed != 2")["status"]) == {"completed"}
    lengths = curves.groupby("replicate_id")["step"].agg(["min", "max", "count"])
    whole = lengths.loc[trials.query("seed != 2").index]
    assert (whole == [1, 20, 20]).to_numpy().all()
    finite = curves.dropna(subset="train_loss_nats").drop(columns="lr")
    joined = finite.join(trials[["seed", "lr"]], on="replicate_id")
    np.testing.assert_allclose(joined["train_loss_nats"], expected_loss(joined), rtol=1e-12)
    _, alive = psutil.wait_procs(descendants(sweep.folder), timeout=30)
    assert alive == []
    said = sweep.said
    assert sweep.run(*LIMITS) == 0
    assert "nothing to do" in sweep.said[len(said) :]


def test_sixty_replicates_under_random_kills_are_each_there_once(fake, descendants):
    rates = [0.001 * n for n in range(1, 7)]
    run_chaos(fake, descendants, rates, 10, seed=1, deaths=["driver"], worker_seconds=5)


@pytest.mark.slow
def test_five_hundred_replicates_under_random_kills_are_each_there_once(fake, descendants):
    rates = [0.001 * n for n in range(1, 51)]
    deaths = ["driver", "driver", "raylet", "driver"] * 2
    run_chaos(fake, descendants, rates, 10, seed=2, deaths=deaths, worker_seconds=90)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_a_ray_that_dies_ends_the_sweep_in_a_sentence(fake, descendants, part):
    # No trial ends after the death, and both workers are in one.
    held = {"when": {}, "attempts": 1, "at_step": 7, "what": "slow"}
    fake.write([1e-3], [0, 1, 2, 3], checkpoint_every=5, mishaps=[held])
    driver = fake.start("lanes.speed.enabled=true")
    fake.wait_for(fake.begun, driver)
    part_of_ray(driver, part).kill()
    assert driver.wait(90) == 2, fake.said
    assert f"the sweep's own Ray on this machine has died ({part} ended)" in fake.said
    assert "Traceback" not in fake.said
    assert descendants(fake.folder) == []
    assert {run.info.status for run in (*fake.runs(), *fake.runs("sweep"))} <= {"KILLED", "FAILED"}
    fake.write([1e-3], [0, 1, 2, 3], checkpoint_every=5)
    assert fake.run("lanes.speed.enabled=true") == 0, fake.said
    fake.assert_consistent(4)
    assert set(fake.trials()["status"]) == {"completed"}
