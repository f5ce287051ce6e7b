"""Pilots: a few measured steps of each shape of a sweep, and what they say about the rest of it.

A shape is what decides how long a training step takes and how much memory it needs: model, batch
and optimizer, without rates and budget. Its pilot runs once, alone on the device, and is kept under
`pilots/` of the root, by device, shape and code. Pilots give the price of what is left to run, and
the share of a GPU that a trial's memory asks for. This file reads; `orchestrator.sweep` runs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cells import Cell
from orchestrator.config import TrialConfig
from orchestrator.data.dataset import open_dataset
from orchestrator.errors import ConfigError
from orchestrator.hardware import Machine, this_machine
from orchestrator.identity import LEARNING_RATE_KEYS, digest, without
from orchestrator.journal import last_event
from orchestrator.plan import Plan
from orchestrator.provenance import fingerprints

PILOT_STEPS = 20
PILOT_WARMUP_STEPS = 5

SHAPE_KEYS = ("model", "optimizer", "batch", "seq_len", "clip_norm")
"""Parts of a trial that decide its step, besides the size of its vocabulary."""

MEMORY_MARGIN = 1.15
CONTEXT_BYTES = 2**30
"""What a process needs of a GPU beside its tensors: a CUDA context, cuBLAS workspaces, fragments of
the allocator (assumed)."""

EVALUATION_SHARE = (1 / 3, 1.0)
"""Time of an evaluated token over that of a trained one: only the forward, or all of a step."""


@dataclass(frozen=True, slots=True)
class Pilot:
    """What one shape's measured steps came to.

    Attributes:
        step_seconds_lower: first quartile of a step's time.
        step_seconds_upper: third quartile.
        peak_memory_bytes: most memory allocated on the GPU; on a CPU resident in the process.
    """

    step_seconds_lower: float
    step_seconds_upper: float
    peak_memory_bytes: int


@dataclass(frozen=True, slots=True)
class Price:
    """Device-hours of what a plan would run: of whole GPUs, or of the whole machine on a CPU.

    Attributes:
        low_hours: every step at its lower quartile.
        high_hours: every step at its upper quartile, and evaluation as slow as training.
        spent_hours: of the sweep's replicates that have ended.
        unmeasured: pilot folders of shapes without a completed pilot, by the first cell that has
            the shape; they are not in the price.
    """

    low_hours: float
    high_hours: float
    spent_hours: float
    unmeasured: dict[str, Path]


def pilot_folders(plan: Plan) -> dict[str, Path]:
    """The folder of each cell's pilot, by cell id; cells of one shape share theirs."""
    where = {
        "device": _place(plan),
        "precision": plan.precision,
        "threads": plan.threads,
        **({"ranks": plan.ranks} if plan.ranks > 1 else {}),
        **fingerprints(),
    }
    return {
        cell.cell_id: plan.root / "pilots" / f"p{digest({**where, 'shape': _shape(cell)})}"
        for cell in plan.sweep.cells
    }


def _place(plan: Plan) -> str:
    """Whose time a pilot took: a model of GPU, a host, or a cluster, whose nodes are not known."""
    if plan.is_on_cluster:
        return f"cluster {plan.spec.cluster.address} {plan.device}"
    return this_machine().gpus[0] if plan.device == "cuda" else this_machine().host


def _shape(cell: Cell) -> dict[str, Any]:
    values = without(cell.values, LEARNING_RATE_KEYS)
    vocabulary = cell.values["data"]["vocab_size"]
    return {key: values[key] for key in SHAPE_KEYS} | {"vocab_size": vocabulary}


def pilot_journal(folder: Path) -> Path:
    """Where a pilot's measurement is journalled."""
    return folder / "pilot.jsonl"


def read_pilot(folder: Path) -> Pilot | None:
    """A completed pilot; None where there is none."""
    path = pilot_journal(folder)
    end = (last_event(path) or {}) if path.is_file() else {}
    if end.get("event") != "end" or end.get("status") != "completed":
        return None
    return Pilot(
        step_seconds_lower=end["step_seconds_lower"],
        step_seconds_upper=end["step_seconds_upper"],
        peak_memory_bytes=end["peak_memory_bytes"],
    )


def price_of(plan: Plan) -> Price:
    """What is left to run of a plan, priced by the pilots that there are."""
    folders, cells = pilot_folders(plan), {cell.cell_id: cell for cell in plan.sweep.cells}
    pilots = {folder: read_pilot(folder) for folder in set(folders.values())}
    unmeasured: dict[Path, str] = {}
    low = high = 0.0
    for name in (*plan.to_run, *plan.to_time):
        record = plan.desired[name]
        folder = folders[record.cell_id]
        pilot = pilots[folder]
        if pilot is None:
            unmeasured.setdefault(folder, record.cell_id)
            continue
        steps = 0
        if not plan.states[name].is_result:
            steps = plan.pause_steps.get(name, record.steps)
        few, many = _priced_steps(plan, cells[record.cell_id].config, steps)
        low += few * pilot.step_seconds_lower
        high += many * pilot.step_seconds_upper
    spent = sum(float(s.end.get("device_seconds") or 0) for s in plan.states.values())
    to_hours = _devices(plan, this_machine()) / 3600
    spent /= plan.ranks  # the time that a trial's ranks held their devices is summed in its record
    by_cell = {cell: folder for folder, cell in unmeasured.items()}
    return Price(low * to_hours, high * to_hours, spent * to_hours, by_cell)


def _priced_steps(plan: Plan, config: TrialConfig, steps: int) -> tuple[float, float]:
    """Steps that a replicate costs at least and at most, evaluation and its timing included."""
    timed = 0
    if plan.spec.lanes.speed.enabled:
        timed = plan.spec.lanes.speed.warmup_steps + plan.spec.lanes.speed.steps
    if steps == 0:
        return timed, timed
    every = config.eval.every_steps
    evaluations = 1 + (0 if every is None else (steps - 1) // every)
    evaluated = evaluations * _evaluated_windows(plan, config) / config.windows_per_step
    few, many = (steps + share * evaluated + timed for share in EVALUATION_SHARE)
    return few, many


def _evaluated_windows(plan: Plan, config: TrialConfig) -> int:
    """Windows of one evaluation; of every one there is, none are counted before there are data."""
    if config.eval.windows is not None or plan.data_folder is None:
        return config.eval.windows or 0
    return open_dataset(plan.data_folder).val.num_windows(config.seq_len)


def _devices(plan: Plan, machine: Machine) -> float:
    """Devices that one trial is priced as; what shares a GPU works no less for it."""
    if plan.device == "cuda":
        return max(1.0, plan.spec.lanes.loss.gpus)
    return plan.threads * plan.ranks / machine.cpus


def refuse_costly(plan: Plan, price: Price, *, is_overruled: bool) -> None:
    """Refuses a sweep whose price is beyond `price.max_gpu_hours`, or could not be told.

    Raises:
        ConfigError: the price, the limit, and what can be done.
    """
    limit = plan.spec.price.max_gpu_hours
    if limit is None or is_overruled:
        return
    if price.unmeasured:
        cell, folder = next(iter(price.unmeasured.items()))
        raise ConfigError(
            f"price.max_gpu_hours={limit:g} cannot be checked: the pilots of "
            f"{len(price.unmeasured)} shapes failed, the first that of cell {cell} (see {folder}); "
            "mend them, or overrule the limit with --yes"
        )
    if price.spent_hours + price.high_hours > limit:
        raise ConfigError(
            f"{plan.spec.name} would take {in_words(plan, price)}, more than "
            f"price.max_gpu_hours={limit:g}; raise it, ask for less, or overrule it with --yes"
        )


def in_words(plan: Plan, price: Price) -> str:
    """The range of a price, and what the sweep has taken already."""
    unit = "GPU-hours" if plan.device == "cuda" else "hours of this machine"
    spent = f" beside {price.spent_hours:.3g} already taken" if price.spent_hours else ""
    return f"{price.low_hours:.3g} to {price.high_hours:.3g} {unit}{spent}"


def price_line(plan: Plan, price: Price) -> str:
    """One sentence for `plan`: the price, as far as it is known."""
    if not plan.to_run and not plan.to_time:
        return "price: nothing is left to run"
    count = len(price.unmeasured)
    if not count:
        return f"price: {in_words(plan, price)}, by pilots of every shape"
    known = f"; the others: {in_words(plan, price)}" if price.high_hours else ""
    what = "1 shape is" if count == 1 else f"{count} shapes are"
    return (
        f"price: {what} not measured yet ({PILOT_WARMUP_STEPS + PILOT_STEPS} steps "
        f"each); `python -m orchestrator pilot conf={plan.sweep.conf_path}` measures them{known}"
    )


def price_json(plan: Plan, price: Price) -> dict[str, Any]:
    """The price as `plan --json` has it."""
    return {
        "device": plan.device,
        "low_hours": price.low_hours,
        "high_hours": price.high_hours,
        "spent_hours": price.spent_hours,
        "unmeasured_shapes": len(price.unmeasured),
        "max_gpu_hours": plan.spec.price.max_gpu_hours,
    }


def needs_pilots(plan: Plan) -> bool:
    """Whether a sweep's own rules ask for pilots: a limit on its price, or trials on one GPU."""
    is_shared = plan.device == "cuda" and plan.spec.lanes.loss.gpus < 1
    return plan.spec.price.max_gpu_hours is not None or is_shared


def loss_share(plan: Plan) -> float:
    """The share of a GPU that each loss trial of a plan takes; 0 on a CPU."""
    if plan.device != "cuda":
        return 0.0
    folders = pilot_folders(plan)
    cells = {plan.desired[name].cell_id for name in plan.to_run}
    pilots = [read_pilot(folder) for folder in {folders[cell] for cell in cells}]
    memory = min(this_machine().gpu_memory_bytes, default=0)
    return gpu_share(plan.spec.lanes.loss.gpus, [p for p in pilots if p is not None], memory)


def gpu_share(asked: float, pilots: Sequence[Pilot], memory_bytes: int) -> float:
    """The share of a GPU that each trial takes: what was asked for, or more for its memory.

    All trials of the lane take the same, so that their processes can be reused; a trial for whose
    memory there is no room waits for its turn.

    Args:
        asked: `lanes.loss.gpus`.
        pilots: of the cells that are left to run.
        memory_bytes: of the smallest GPU.
    """
    if asked >= 1 or not pilots or not memory_bytes:
        return asked
    peak = max(pilot.peak_memory_bytes for pilot in pilots)
    needed = (peak * MEMORY_MARGIN + CONTEXT_BYTES) / memory_bytes
    return min(1.0, max(asked, needed))
