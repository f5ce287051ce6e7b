"""Records that look like a sweep's, made from a seed: several arms, rates and seeds, some bad.

The loss of a replicate is a parabola in the logarithm of its rate plus an effect of the seed that
all cells share plus noise of its own; its speed belongs to the architecture.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from orchestrator.records import TrialRecord

UNIGRAM = 6.87
INIT = 8.3
TOKENS = 110_080

SPEEDS = {
    ("softmax", "pure"): 21_000.0,
    ("linear", "pure"): 24_500.0,
    ("deltanet", "pure"): 19_500.0,
    ("deltanet", "hybrid"): 19_900.0,
    ("gated_deltanet", "pure"): 18_600.0,
    ("gated_deltanet", "hybrid"): 19_300.0,
    ("kimi_delta", "pure"): 13_200.0,
    ("kimi_delta", "hybrid"): 15_100.0,
    ("gated_deltanet2", "pure"): 12_100.0,
    ("gated_deltanet2", "hybrid"): 14_300.0,
}
BEST = {
    "softmax": 6.21,
    "linear": 6.33,
    "deltanet": 6.18,
    "gated_deltanet": 6.15,
    "kimi_delta": 6.12,
    "gated_deltanet2": 6.14,
}
OPTIMA = {"adamw": 3e-3, "muon": 1e-3}


@dataclass(kw_only=True)
class Plan:
    """What to make.

    Attributes:
        arms: (mixer, stack, optimizer) of every arm.
        rates: learning rates of every arm.
        seeds: seeds of every cell.
        states: (arm index, rate index, seed) to a status other than completed.
        no_speed: arm indices whose speed is not measured yet.
        noise: standard deviation of a replicate's own noise, in nats.
    """

    arms: list[tuple[str, str, str]]
    rates: tuple[float, ...] = (3e-4, 1e-3, 3e-3, 1e-2)
    seeds: tuple[int, ...] = (0, 1, 2)
    states: dict[tuple[int, int, int], str] = field(default_factory=dict)
    no_speed: tuple[int, ...] = ()
    noise: float = 0.008


def small_plan() -> Plan:
    """Five arms with a diverged, a failed and a pending replicate and one arm without speed."""
    return Plan(
        arms=[
            ("softmax", "pure", "adamw"),
            ("deltanet", "pure", "adamw"),
            ("gated_deltanet", "hybrid", "muon"),
            ("kimi_delta", "pure", "muon"),
            ("linear", "pure", "adamw"),
        ],
        states={(4, 3, 1): "diverged", (0, 0, 2): "failed", (3, 0, 2): "pending"},
        no_speed=(3,),
    )


def wide_plan() -> Plan:
    """Eighteen arms: every mixer, both stacks, both optimizers."""
    arms = [
        (mixer, stack, optimizer)
        for mixer, stack in SPEEDS
        for optimizer in ("adamw", "muon")
        if mixer != "linear"
    ]
    blown = {(5, 3, 0): "diverged", (5, 3, 2): "diverged", (11, 3, 1): "diverged"}
    return Plan(arms=arms, states=blown)


def make_trials(plan: Plan, seed: int = 0) -> list[dict[str, Any]]:
    """Rows of `trials.parquet`."""
    rng = np.random.default_rng(seed)
    shared = {s: float(rng.normal(0, 0.02)) for s in plan.seeds}
    rows = []
    for index, (mixer, stack, optimizer) in enumerate(plan.arms):
        for rate_index, rate in enumerate(plan.rates):
            for s in plan.seeds:
                status = plan.states.get((index, rate_index, s), "completed")
                distance = math.log10(rate / OPTIMA[optimizer])
                loss = BEST[mixer] + 0.16 * distance**2 + shared[s] + rng.normal(0, plan.noise)
                loss -= 0.03 * (stack == "hybrid") + 0.05 * (optimizer == "muon")
                speed = SPEEDS[mixer, stack] * (0.96 if optimizer == "muon" else 1.0)
                speed *= 1 + 0.004 * float(rng.normal())
                timed = None if index in plan.no_speed or status == "pending" else speed
                rows.append(
                    _row(mixer, stack, optimizer, rate, s, status, float(loss), timed).as_row()
                )
    return rows


def _row(
    mixer: str,
    stack: str,
    optimizer: str,
    rate: float,
    seed: int,
    status: str,
    loss: float,
    speed: float | None,
) -> TrialRecord:
    arm = f"{mixer}-{stack}-{optimizer}"
    cell = f"{arm}-{rate:g}"
    done = status == "completed"
    config = {"model": {"mixer": {"name": mixer}, "stack": stack}, "optimizer": {"name": optimizer}}
    return TrialRecord(
        sweep="made",
        cell_id=cell,
        arm_id=arm,
        replicate_id=f"{cell}-s{seed}",
        seed=seed,
        status=status,
        failure_class={"diverged": "diverged", "failed": "node"}.get(status),
        attempts=0 if status == "pending" else 1,
        mixer=mixer,
        stack=stack,
        softmax_every=3 if stack == "hybrid" else None,
        optimizer=optimizer,
        lr=rate,
        adam_lr=3e-3 if optimizer == "muon" else None,
        size="nano",
        match="params",
        data_seed=seed,
        seq_len=256,
        batch_tokens=512,
        tokens=TOKENS if done else TOKENS // 2,
        steps=215 if done else 107,
        params_total=432_000,
        params_non_embedding=170_000,
        flops_per_token=2_600_000,
        init_loss_nats=INIT + 0.01 * seed,
        val_loss_nats=loss if done else None,
        val_loss_se=0.01 if done else None,
        eval_id="eval-1",
        unigram_loss_nats=UNIGRAM,
        tokens_per_second=speed,
        step_seconds_median=None if speed is None else 512 / speed,
        exclusive=None if speed is None else True,
        device_name="one CPU core",
        device_seconds=None if status == "pending" else TOKENS / 15_000,
        wall_seconds=None if status == "pending" else TOKENS / 14_000,
        peak_memory_bytes=None if status == "pending" else 400_000_000 + 1_000_000 * len(arm),
        state_bytes=0 if mixer == "softmax" else 24_576,
        kv_bytes_per_token=768 if mixer == "softmax" else 256 * (stack == "hybrid"),
        kernel_impl="chunked",
        precision="fp32",
        threads=1,
        data_id="data-1",
        git_commit="0123456789abcdef0123456789abcdef01234567",
        git_dirty=False,
        config_json=json.dumps(config),
    )


def make_curves(trials: list[dict[str, Any]], points: int = 20) -> pd.DataFrame:
    """Rows of `curves.parquet`: a power law from the loss at initialisation to the final one."""
    frames = []
    for row in trials:
        if row["status"] == "pending":
            continue
        final = row["val_loss_nats"] if row["val_loss_nats"] is not None else 9.0
        step = np.unique(np.linspace(1, row["steps"], points).astype(int))
        share = step / row["steps"]
        loss = final + (row["init_loss_nats"] - final) * (1 - share) ** 3
        frames.append(
            pd.DataFrame(
                {
                    "sweep": row["sweep"],
                    "replicate_id": row["replicate_id"],
                    "attempt": 1,
                    "step": step,
                    "tokens": step * row["batch_tokens"],
                    "wall_seconds": step * row["batch_tokens"] / 15_000,
                    "lr": row["lr"],
                    "train_loss_nats": loss + 0.05,
                    "grad_norm": 1.0,
                    "val_loss_nats": np.where(np.arange(len(step)) % 4 == 3, loss, np.nan),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def write_folder(
    folder: Path,
    trials: list[dict[str, Any]] | pd.DataFrame,
    curves: pd.DataFrame | None = None,
    spec: dict[str, Any] | None = None,
) -> Path:
    """Writes a sweep's folder and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(trials).to_parquet(folder / "trials.parquet", index=False)
    if curves is not None:
        curves.to_parquet(folder / "curves.parquet", index=False)
    if spec is not None:
        (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    return folder


def fixture_f() -> tuple[np.ndarray, np.ndarray]:
    """Loss and throughput [A…E, four seeds] with known answers."""
    loss = np.array(
        [
            [3.40, 3.42, 3.41, 3.39],
            [3.38, 3.41, 3.39, 3.38],
            [3.44, 3.45, 3.46, 3.43],
            [3.39, 3.42, 3.40, 3.39],
            [3.41, 3.40, 3.42, 3.40],
        ]
    )
    speed = np.array(
        [
            [100.0, 98.0, 101.0, 99.0],
            [92.0, 93.0, 91.0, 92.0],
            [120.0, 118.0, 121.0, 119.0],
            [60.0, 61.0, 59.0, 60.0],
            [100.0, 101.0, 99.0, 100.0],
        ]
    )
    return loss, speed
