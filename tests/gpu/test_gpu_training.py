"""Whole trials on a GPU: bf16 against fp32, late reading, resuming, two GPUs as one."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.configs import MIXER_CONFIGS, HeadLayout, ModelConfig
from orchestrator.config import (
    BatchConfig,
    BudgetConfig,
    CheckpointConfig,
    EvalConfig,
    LogConfig,
    TrialConfig,
)
from orchestrator.data import DataConfig, prepare
from orchestrator.parallel import run_trial_on
from orchestrator.training.optim.configs import AdamWConfig, MuonConfig
from orchestrator.training.runtime import Runtime
from orchestrator.training.schedule import ScheduleConfig
from orchestrator.trial import ListJournal, TrialOutcome, measure_speed, run_trial

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIMIZERS = {"adamw": AdamWConfig(lr=5e-3), "muon": MuonConfig(lr=5e-3, adam_lr=5e-3)}


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("gpu-data")
    generator = np.random.Generator(np.random.Philox(key=11))
    words = ["".join(generator.choice(list("abcdefghij"), size=4)) for _ in range(30)]
    for document in range(40):
        start = int(generator.integers(30))
        text = " ".join(words[(start + 7 * i) % 30] for i in range(400))
        (root / f"{document:02d}.txt").write_text(text, encoding="utf-8")
    config = DataConfig(
        name="chains", sources=[str(root / "*.txt")], split="last:0.2", vocab_size=300
    )
    return prepare(config, root).folder


def trial(mixer: str, optimizer: str = "adamw", **changes: Any) -> TrialConfig:
    fields: dict[str, Any] = {
        "seq_len": 128,
        "model": ModelConfig(
            mixer=MIXER_CONFIGS[mixer](),
            num_layers=2,
            d_model=64,
            ffn_dim=128,
            heads=HeadLayout(),
        ),
        "optimizer": OPTIMIZERS[optimizer],
        "budget": BudgetConfig(tokens=1024 * 30),
        "batch": BatchConfig(tokens=1024),
        "eval": EvalConfig(windows=16),
        "log": LogConfig(every_steps=7),
        "checkpoint": CheckpointConfig(every_steps=None),
    }
    return TrialConfig(**(fields | changes))


def run(config: TrialConfig, folder: Path, **changes: Any) -> TrialOutcome:
    options: dict[str, Any] = {
        "seed": 0,
        "data_folder": folder,
        "runtime": Runtime(device="cuda", precision="bf16"),
        "journal": ListJournal(),
    }
    return run_trial(config, **(options | changes))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("mixer", MIXER_CONFIGS)
def test_every_mixer_learns_as_on_the_cpu(mixer: str, optimizer: str, data_folder: Path) -> None:
    """bf16 products and Muon's bf16 iteration cost little of what was learned."""
    config = trial(mixer, optimizer)
    on_gpu = run(config, data_folder)
    on_cpu = run(config, data_folder, runtime=Runtime())
    assert on_gpu.val_loss_nats is not None
    assert on_cpu.val_loss_nats is not None
    learned = on_cpu.init_loss_nats - on_cpu.val_loss_nats
    assert learned > 0.5
    assert on_gpu.init_loss_nats == pytest.approx(on_cpu.init_loss_nats, abs=5e-3)
    assert on_gpu.val_loss_nats == pytest.approx(on_cpu.val_loss_nats, abs=0.1 * learned)


def test_curve_points_and_peak_memory_are_measured(data_folder: Path) -> None:
    journal = ListJournal()
    outcome = run(trial("softmax"), data_folder, journal=journal)
    assert [event["step"] for event in journal.of("step")] == [1, 7, 14, 21, 28, 30]
    assert journal.events[0]["optimizer_choices"] == {}
    assert 1e6 < outcome.peak_memory_bytes < 1e10


def test_a_divergence_that_is_read_late_ends_the_trial(data_folder: Path) -> None:
    config = trial(
        "softmax",
        optimizer="adamw",
        schedule=ScheduleConfig(kind="constant", warmup_fraction=0.0),
    )
    config.optimizer = AdamWConfig(lr=3e38)
    outcome = run(config, data_folder)
    assert (outcome.status, outcome.steps) == ("diverged", 2)


def test_a_continued_trial_ends_near_an_uninterrupted_one(
    data_folder: Path, tmp_path: Path
) -> None:
    config = trial("softmax", "muon", checkpoint=CheckpointConfig(every_steps=10))
    expected = run(config, data_folder)
    asked = iter(range(2))
    run(
        config,
        data_folder,
        checkpoint_folder=tmp_path,
        should_stop=lambda: next(asked, None) is None,
    )
    journal = ListJournal()
    outcome = run(config, data_folder, checkpoint_folder=tmp_path, journal=journal)
    assert journal.events[0]["resumed_from_step"] > 0
    assert outcome.init_loss_nats == expected.init_loss_nats
    assert outcome.val_loss_nats == pytest.approx(expected.val_loss_nats, abs=0.05)


def test_speed_is_measured_on_an_idle_device(data_folder: Path) -> None:
    outcome = measure_speed(
        trial("softmax", "muon"),
        seed=0,
        data_folder=data_folder,
        runtime=Runtime(device="cuda", precision="bf16"),
        steps=10,
        warmup_steps=5,
    )
    assert outcome.device_name == torch.cuda.get_device_name()
    assert 0 < outcome.optimizer_seconds_median < outcome.step_seconds_median


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_as_one(data_folder: Path) -> None:
    config = trial("softmax", "muon")
    alone = run(config, data_folder)
    runtimes = [Runtime(device=f"cuda:{rank}", precision="bf16") for rank in range(2)]
    together = run_trial_on(
        runtimes, config, seed=0, data_folder=data_folder, journal=ListJournal()
    )
    assert together.init_loss_nats == pytest.approx(alone.init_loss_nats, abs=1e-3)
    assert together.val_loss_nats == pytest.approx(alone.val_loss_nats, abs=0.05)
