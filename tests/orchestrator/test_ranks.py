"""Trials that span several devices, from the sweep file to the record."""

import signal

import numpy as np
import psutil
import pytest

from orchestrator import plan as planning
from orchestrator.compose import load_sweep
from orchestrator.config import LossLane, trial_from_dict
from orchestrator.errors import ConfigError
from orchestrator.hardware import Machine
from orchestrator.journal import opening
from orchestrator.parallel import runtimes_of
from orchestrator.plan import make_plan
from orchestrator.training.runtime import Runtime
from orchestrator.trial import ListJournal, run_trial

SMALL = """
name: small
base: {size: nano, data: sotu, budget.tokens: 10240, batch.tokens: 1024}
axes: {optimizer.lr: [1e-3, 3e-3]}
seeds: [0]
"""
TWO_GPUS = Machine(host="node", cpus=16, memory_bytes=2**36, gpus=("H200", "H200"))
FOUR_CORES = Machine(host="node", cpus=4, memory_bytes=2**34, gpus=())


@pytest.fixture
def plan(tmp_path, monkeypatch):
    def run(*overrides, machine=TWO_GPUS):
        (tmp_path / "small.yaml").write_text(SMALL)
        monkeypatch.setattr(planning, "this_machine", lambda: machine)
        sweep = load_sweep("small.yaml", list(overrides), tmp_path)
        return make_plan(sweep, tmp_path / "runs", tmp_path)

    return run


def test_gpus_above_one_are_ranks_and_shares_are_not():
    assert [LossLane(gpus=g).ranks("cuda") for g in (0.25, 1, 2, 8)] == [1, 1, 2, 8]
    assert [LossLane(gpus=8, cpu_ranks=n).ranks("cpu") for n in (1, 2)] == [1, 2]
    with pytest.raises(ValueError, match=r"lanes\.loss\.cpu_ranks=0 must be at least 1"):
        LossLane(cpu_ranks=0)


def test_each_rank_of_gpus_has_its_own():
    assert [r.device for r in runtimes_of("cuda", "bf16", 2, 3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [r.device for r in runtimes_of("cuda", "bf16", 2, 1)] == ["cuda"]
    assert [r.device for r in runtimes_of("cpu", "fp32", 2, 2)] == ["cpu", "cpu"]


def test_a_plan_says_how_many_processes_a_trial_has(plan):
    assert plan("lanes.loss.gpus=2").ranks == 2
    assert plan("lanes.loss.gpus=0.25").ranks == 1
    assert plan("lanes.loss.cpu_ranks=4", machine=FOUR_CORES).ranks == 4


@pytest.mark.parametrize(
    ("overrides", "machine", "sentence"),
    [
        (["lanes.loss.gpus=3"], TWO_GPUS, "needs 3 GPUs, but node has 2"),
        (["lanes.loss.gpus=2", "lanes.loss.cpus=9"], TWO_GPUS, "needs 18 cores for its 2 proc"),
        (["lanes.loss.cpu_ranks=5"], FOUR_CORES, "needs 5 cores for its 5 processes, but node has"),
        (["lanes.loss.cpu_ranks=3"], FOUR_CORES, "the 4 windows of a step do not divide evenly ov"),
        (
            ["lanes.loss.cpu_ranks=2", "batch.micro_windows=4"],
            FOUR_CORES,
            r"micro_windows=4 \(cell",
        ),
    ],
)
def test_ranks_that_cannot_be_had_are_refused_in_the_plan(plan, overrides, machine, sentence):
    with pytest.raises(ConfigError, match=sentence):
        plan(*overrides, machine=machine)


def test_one_sweep_has_trials_of_one_number_of_ranks(plan):
    first = plan("lanes.loss.gpus=2")
    first.ledger.describe(first.desired[next(iter(first.desired))])
    facts = {"device": "cuda", "precision": first.precision, "threads": first.threads}
    spec = {"base": first.spec.base, "axes": first.spec.axes, "match": first.spec.match}
    lanes = {"loss": {"gpus": 2.0, "cpus": 1, "cpu_ranks": 1, "max_minutes": None}}
    first.ledger.write_spec({**spec, **facts, "lanes": lanes})
    assert plan("lanes.loss.gpus=2").ranks == 2
    with pytest.raises(ConfigError, match="replicates with ranks=2, but this call would use rank"):
        plan("lanes.loss.gpus=1")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.skipif(psutil.cpu_count() < 2, reason="needs two cores")
def test_a_sweep_of_two_ranks_gives_the_curve_of_one_also_after_its_worker_was_killed(fake):
    """Real trials: what takes a trial's place in other tests cannot span processes."""
    fake.write([1e-3], [0], steps=30)
    two = ("lanes.loss.cpu_ranks=2", "log.every_steps=1", "checkpoint.every_steps=5")
    driver = fake.start(*two)
    fake.wait_for(lambda: any('"checkpoint"' in p.read_text() for p in fake.journals()), driver)
    claim = opening(fake.journals()[0])
    ranks = [
        child
        for child in psutil.Process(claim["pid"]).children()
        if "spawn_main" in " ".join(child.cmdline())
    ]
    assert len(ranks) == 1
    psutil.Process(claim["pid"]).send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(ranks, timeout=30)
    assert alive == []
    assert driver.wait(500) == 0, fake.said
    trial = fake.trials().iloc[0]
    assert (trial["status"], trial["attempts"]) == ("completed", 2)
    starts = [opening(path) for path in fake.journals()]
    assert [start["ranks"] for start in starts] == [2, 2]
    assert starts[1]["resumed_from_step"] >= 5

    planned = load_sweep("fake.yaml", list(two), fake.folder).cells[0]
    journal = ListJournal()
    alone = run_trial(
        trial_from_dict(planned.values),
        seed=0,
        data_folder=next((fake.folder / "runs" / "data").glob("files-*")),
        runtime=Runtime(),
        journal=journal,
    )
    curve = fake.curves().sort_values("step")
    assert curve["step"].tolist() == list(range(1, 31))
    wanted = [event["train_loss_nats"] for event in journal.of("step")]
    np.testing.assert_allclose(curve["train_loss_nats"], wanted, rtol=2e-5)
    np.testing.assert_allclose(trial["val_loss_nats"], alone.val_loss_nats, rtol=2e-5)
