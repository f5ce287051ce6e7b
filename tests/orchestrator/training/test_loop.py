"""Steps and runs of steps: accumulation, clipping, cadence, divergence, what is read when."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from models.configs import MIXER_CONFIGS
from orchestrator.config import BatchConfig, EvalConfig, LogConfig, TrialConfig
from orchestrator.training.evaluate import Evaluation
from orchestrator.training.loop import (
    fit,
    load_micro_batches,
    set_rates,
    train_step,
    windows_per_pass,
)
from orchestrator.training.optim.configs import (
    MATRIX_STEPS,
    OPTIMIZER_CONFIGS,
    AdamWConfig,
    MuonConfig,
)
from orchestrator.training.runtime import Runtime
from orchestrator.training.schedule import ScheduleConfig
from orchestrator.training.session import Session, open_session
from orchestrator.training.windows import TensorBatch

FAST = {"adamw": AdamWConfig(lr=0.02), "muon": MuonConfig(lr=0.02, adam_lr=0.02)}


def open_tiny(config, data_folder, seed: int = 0) -> Session:
    return open_session(config, seed=seed, data_folder=data_folder, runtime=Runtime())


def run_fit(session: Session, **changes: Any) -> list[Any]:
    options: dict[str, Any] = {"evaluate_now": session.evaluate}
    return list(
        fit(
            session.model,
            session.optimizer,
            session.batches,
            session.config,
            session.runtime,
            **(options | changes),
        )
    )


def gradients_after_step(config, data_folder) -> tuple[float, float, dict[str, torch.Tensor]]:
    session = open_tiny(config, data_folder)
    set_rates(session.optimizer, config, 0)
    micro_batches = load_micro_batches(session.batches, config, 0, session.runtime)
    loss, norm = train_step(session.model, session.optimizer, micro_batches, 1e9, session.runtime)
    gradients = {n: p.grad for n, p in session.model.named_parameters()}
    return loss.item(), norm.item(), gradients


@pytest.mark.parametrize("micro_windows", [1, 2])
def test_accumulated_parts_equal_the_whole_batch(tiny_trial, data_folder, micro_windows):
    whole = gradients_after_step(tiny_trial(), data_folder)
    parts = gradients_after_step(
        tiny_trial(batch=BatchConfig(tokens=64, micro_windows=micro_windows)), data_folder
    )
    assert parts[0] == pytest.approx(whole[0], rel=1e-6)
    assert parts[1] == pytest.approx(whole[1], rel=1e-5)
    for name, gradient in whole[2].items():
        scale = gradient.abs().max()
        assert torch.allclose(parts[2][name], gradient, rtol=0, atol=1e-5 * scale.item()), name


def test_parts_of_unequal_size_weigh_by_their_windows(tiny_trial, data_folder):
    session = open_tiny(tiny_trial(), data_folder)
    (batch,) = load_micro_batches(session.batches, session.config, 0, session.runtime)
    inputs, targets = batch.inputs, batch.targets
    with torch.no_grad():
        expected = session.model.token_losses(inputs, targets).mean().item()
    parts = [TensorBatch(inputs[part], targets[part]) for part in (slice(1), slice(1, None))]
    loss, _ = train_step(session.model, session.optimizer, parts, 1.0, session.runtime)
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_a_step_without_windows_is_refused(tiny_trial, data_folder):
    session = open_tiny(tiny_trial(), data_folder)
    with pytest.raises(ValueError, match="at least one micro batch"):
        train_step(session.model, session.optimizer, [], 1.0, session.runtime)


def test_gradients_above_the_norm_are_scaled_down_to_it(tiny_trial, data_folder):
    session = open_tiny(tiny_trial(), data_folder)
    micro_batches = list(load_micro_batches(session.batches, session.config, 0, session.runtime))
    _, norm = train_step(session.model, session.optimizer, micro_batches, 0.01, session.runtime)
    gradients = [p.grad.flatten() for p in session.model.parameters()]
    assert norm.item() > 0.1
    assert torch.cat(gradients).norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZER_CONFIGS)
@pytest.mark.parametrize("mixer", MIXER_CONFIGS)
def test_every_mixer_with_every_optimizer_learns_one_batch_by_heart(
    tiny_trial, data_folder, mixer, optimizer
):
    losses = losses_on_one_batch(
        tiny_trial(mixer=mixer, steps=40, optimizer=FAST[optimizer]), data_folder
    )
    assert losses[0] == pytest.approx(math.log(300), abs=0.3)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("variant", MATRIX_STEPS)
@pytest.mark.parametrize("split", ["blocks", "fused"])
def test_every_variant_of_muon_learns_one_batch_by_heart(tiny_trial, data_folder, variant, split):
    optimizer = MuonConfig(lr=0.02, adam_lr=0.02, variant=variant, split=split)
    losses = losses_on_one_batch(tiny_trial(steps=40, optimizer=optimizer), data_folder)
    assert losses[-1] < 0.5 * losses[0]


def losses_on_one_batch(config: TrialConfig, data_folder: Path) -> list[float]:
    """Losses of 30 steps on the first batch again and again."""
    session = open_tiny(config, data_folder)
    micro_batches = list(load_micro_batches(session.batches, config, 0, session.runtime))
    losses = []
    for index in range(30):
        set_rates(session.optimizer, config, index)
        loss, _ = train_step(session.model, session.optimizer, micro_batches, 1.0, session.runtime)
        losses.append(loss.item())
    return losses


def test_every_step_is_yielded_once_with_its_rates(tiny_trial, data_folder):
    config = tiny_trial(schedule=ScheduleConfig(warmup_fraction=0.25, decay_fraction=0.25))
    metrics = run_fit(open_tiny(config, data_folder))
    assert [m.step for m in metrics] == list(range(1, 13))
    assert [m.tokens for m in metrics] == [64 * step for step in range(1, 13)]
    rates = [m.lr["adam"] for m in metrics]
    assert rates[0] == 0.0
    assert rates[3:9] == [0.02] * 6
    assert rates[-1] == pytest.approx(0.002)
    assert all(m.lr["adam_no_decay"] == m.lr["adam"] for m in metrics)


def test_a_first_update_at_rate_zero_changes_no_weight(tiny_trial, data_folder):
    session = open_tiny(tiny_trial(optimizer=MuonConfig(lr=0.1, adam_lr=0.1)), data_folder)
    before = {n: t.clone() for n, t in session.model.state_dict().items()}
    steps = fit(
        session.model,
        session.optimizer,
        session.batches,
        session.config,
        session.runtime,
        evaluate_now=session.evaluate,
    )
    assert next(steps).lr["matrix"] == 0.0
    assert all(torch.equal(t, before[n]) for n, t in session.model.state_dict().items())


def test_a_constant_adam_group_keeps_its_peak_while_the_matrices_decay(tiny_trial, data_folder):
    optimizer = MuonConfig(lr=0.01, adam_lr=0.02, adam_schedule="constant")
    metrics = run_fit(open_tiny(tiny_trial(optimizer=optimizer), data_folder))
    assert metrics[-1].lr == {
        "matrix": pytest.approx(0.001),
        "adam": 0.02,
        "adam_no_decay": 0.02,
    }


def test_evaluations_come_at_their_cadence_and_at_the_end(tiny_trial, data_folder):
    session = open_tiny(tiny_trial(eval=EvalConfig(windows=4, every_steps=5)), data_folder)
    evaluated = [m.step for m in run_fit(session) if m.evaluation is not None]
    assert evaluated == [5, 10, 12]


def test_the_run_ends_with_its_budget_wherever_it_starts(tiny_trial, data_folder):
    metrics = run_fit(open_tiny(tiny_trial(), data_folder), start_step=9, start_seconds=100.0)
    assert [m.step for m in metrics] == [10, 11, 12]
    assert all(100.0 < m.seconds < 160.0 for m in metrics)


def test_a_loss_above_the_cap_ends_the_run_at_once(tiny_trial, data_folder):
    metrics = run_fit(open_tiny(tiny_trial(diverged_above_nats=1.0), data_folder))
    assert [m.step for m in metrics] == [1]
    assert "above diverged_above_nats=1" in metrics[0].diverged_because


def test_a_loss_that_is_no_number_ends_the_run_at_once(tiny_trial, data_folder):
    """The first update, at an absurd rate, ruins every weight; the second step shows it."""
    config = tiny_trial(
        optimizer=AdamWConfig(lr=3e38),
        schedule=ScheduleConfig(kind="constant", warmup_fraction=0.0),
    )
    metrics = run_fit(open_tiny(config, data_folder))
    assert [m.step for m in metrics] == [1, 2]
    assert metrics[0].diverged_because is None
    assert not math.isfinite(metrics[1].train_loss_nats)
    assert metrics[1].diverged_because.startswith("the training loss is ")


def test_an_evaluation_that_is_no_number_is_a_divergence(tiny_trial, data_folder):
    nothing = Evaluation(loss_nats=math.nan, standard_error=None, bits_per_byte=math.nan, tokens=1)
    metrics = run_fit(open_tiny(tiny_trial(), data_folder), evaluate_now=lambda: nothing)
    assert metrics[-1].step == 12
    assert metrics[-1].diverged_because == "the evaluation loss is nan"


class QueueingRuntime(Runtime):
    """A CPU that is treated like a device whose results come late."""

    __slots__ = ()

    @property
    def is_cuda(self) -> bool:
        return True


@pytest.fixture
def queueing(monkeypatch) -> Runtime:
    # Pinned memory needs a GPU; everything else of the late reading does not.
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return QueueingRuntime()


def test_a_device_that_runs_ahead_is_read_only_where_something_depends_on_it(
    tiny_trial, data_folder, queueing, monkeypatch
):
    config = tiny_trial(log=LogConfig(every_steps=5))
    straight = run_fit(open_tiny(config, data_folder))
    reads = []
    to_list = torch.Tensor.tolist
    monkeypatch.setattr(
        torch.Tensor, "tolist", lambda tensor: reads.append(len(tensor)) or to_list(tensor)
    )
    session = open_tiny(config, data_folder)
    late = list(
        fit(
            session.model,
            session.optimizer,
            session.batches,
            config,
            queueing,
            evaluate_now=session.evaluate,
        )
    )
    assert reads == [1, 4, 5, 2]
    assert [m.train_loss_nats for m in late] == [m.train_loss_nats for m in straight]
    assert [m.grad_norm for m in late] == [m.grad_norm for m in straight]
    assert [m.step for m in late if m.seconds is not None] == [1, 5, 10, 12]


def test_a_divergence_that_is_read_late_is_dated_to_its_step(tiny_trial, data_folder, queueing):
    config = tiny_trial(
        optimizer=AdamWConfig(lr=3e38),
        schedule=ScheduleConfig(kind="constant", warmup_fraction=0.0),
        log=LogConfig(every_steps=6),
    )
    session = open_tiny(config, data_folder)
    evaluations = []
    late = list(
        fit(
            session.model,
            session.optimizer,
            session.batches,
            config,
            queueing,
            evaluate_now=lambda: evaluations.append(1) or session.evaluate(),
        )
    )
    assert [m.step for m in late] == [1, 2]
    assert late[-1].diverged_because is not None
    assert evaluations == []


def test_a_pass_takes_the_whole_step_unless_told_otherwise(tiny_trial):
    assert windows_per_pass(tiny_trial()) == 4
    assert windows_per_pass(tiny_trial(batch=BatchConfig(tokens=64, micro_windows=2))) == 2
