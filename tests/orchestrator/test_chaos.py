"""Sweeps whose driver and workers are killed at random moments end as if nothing had happened.

The moments come from a generator with a fixed seed, but what they hit depends on the machine, so
every run of this test is another case.
"""

import os
import signal
import threading
import time

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


def storm(sweep, generator, driver_kills, mean_seconds):
    """Calls until every replicate has its result; the first ones are killed at random moments."""
    for call in range(driver_kills + 6):
        done = len([1 for ends in sweep.ends().values() for e in ends if e["status"] != "failed"])
        driver = sweep.start(*LIMITS)
        if call >= driver_kills:
            code = driver.wait(900)
            assert code in (0, 3), sweep.said
            if code == 0:
                return
            continue
        sweep.wait_for(
            lambda done=done: sum(map(len, sweep.ends().values())) > done + 3, driver, 600
        )
        stop = threading.Event()
        killer = threading.Thread(
            target=kill_workers_now_and_then, args=(sweep, generator, stop, mean_seconds)
        )
        killer.start()
        time.sleep(generator.uniform(0, 2 * mean_seconds))
        kill(driver.pid)
        driver.wait()
        stop.set()
        killer.join()
    pytest.fail(f"replicates still fail: {sweep.said}")


def expected_loss(row):
    return 8.0 - np.log1p(row["step"]) * (1 + 100 * row["lr"]) - 0.001 * row["seed"]


def at_rates(rates):
    """Every mishap at each of some rates, and the divergence of a seed everywhere."""
    each = [m | {"when": {**m["when"], "lr": rate}} for m in MISHAPS for rate in rates]
    return [DIVERGING, *each]


def run_chaos(sweep, descendants, rates, seeds, mishaps, seed, driver_kills):
    sweep.write(
        rates, list(range(seeds)), steps=20, step_seconds=0.02, checkpoint_every=5, mishaps=mishaps
    )
    storm(sweep, np.random.Generator(np.random.PCG64(seed)), driver_kills, mean_seconds=1.5)
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
    run_chaos(fake, descendants, rates, 10, at_rates(rates[:1]), seed=1, driver_kills=1)


@pytest.mark.slow
def test_five_hundred_replicates_under_random_kills_are_each_there_once(fake, descendants):
    rates = [0.001 * n for n in range(1, 51)]
    run_chaos(fake, descendants, rates, 10, at_rates(rates[:10]), seed=2, driver_kills=8)
