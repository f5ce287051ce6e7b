"""What a sweep asks for, what the ledger has, so what would run; refuses before anything starts."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from models.accounting import count_parameters, flops_per_token, kv_bytes_per_token, state_bytes
from orchestrator.cells import Cell
from orchestrator.compose import Sweep
from orchestrator.compose.conf_folder import CONF_FOLDER
from orchestrator.config import LossLane, SweepSpec
from orchestrator.data.corpus import DataConfig, MissingSourceError, list_sources, resolve_paths
from orchestrator.data.manifest import locate
from orchestrator.errors import ConfigError
from orchestrator.hardware import Machine, resolve_device, resolve_precision, this_machine
from orchestrator.identity import NON_SEMANTIC_KEYS, canonical_json, replicate_id
from orchestrator.ledger import Ledger, ReplicateState
from orchestrator.provenance import fingerprints
from orchestrator.records import TrialRecord
from orchestrator.store_uri import tracking_uri
from orchestrator.training.schedule import quartiles


@dataclass(frozen=True, slots=True)
class Plan:
    """The desired set against the ledger.

    Attributes:
        sweep: the resolved sweep.
        root: absolute folder that holds every sweep's ledger.
        ledger: this sweep's ledger.
        device: `cpu` or `cuda`.
        precision: `fp32` or `bf16`.
        data: the cells' data set, its paths absolute.
        data_folder: where it is prepared; None where it must be prepared first.
        desired: planned record of each desired replicate, by id, in running order.
        states: the ledger's word on each desired replicate.
        undesired: replicates on disk that the sweep no longer asks for.
        other_code: desired replicates that were trained, in part at least, by other code or other
            versions of packages than this call's.
        notes: sentences worth printing.
        pause_steps: of replicates that are trained to a step for now, which one.
        asks: what a search has decided and not yet written to its journal.
    """

    sweep: Sweep
    root: Path
    ledger: Ledger
    device: str
    precision: str
    data: DataConfig
    data_folder: Path | None
    desired: dict[str, TrialRecord]
    states: dict[str, ReplicateState]
    undesired: list[str]
    other_code: list[str]
    notes: list[str]
    pause_steps: dict[str, int] = field(default_factory=dict)
    asks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def spec(self) -> SweepSpec:
        """The sweep's specification."""
        return self.sweep.spec

    @property
    def threads(self) -> int:
        """Torch threads of every process of a trial."""
        return self.spec.lanes.loss.cpus

    @property
    def ranks(self) -> int:
        """Processes of every trial, which share each step's windows."""
        return self.spec.lanes.loss.ranks(self.device)

    @property
    def is_on_cluster(self) -> bool:
        """Whether trials run on a Ray cluster that is there already."""
        return self.spec.cluster.name == "ray"

    @property
    def to_run(self) -> list[str]:
        """Desired replicates without a result, in running order."""
        return [name for name, state in self.states.items() if not state.is_result]

    @property
    def to_time(self) -> list[str]:
        """Desired, completed replicates without a speed measurement."""
        if not self.spec.lanes.speed.enabled:
            return []
        return [name for name, state in self.states.items() if state.needs_speed]

    def refreshed(self) -> "Plan":
        """The same plan against the ledger as it is now."""
        return replace(self, states=self.ledger.states(self.desired))

    def counts(self) -> dict[str, int]:
        """Desired replicates by status, zeros left out."""
        return dict(Counter(state.status for state in self.states.values()))


def make_plan(sweep: Sweep, root: Path, folder: Path, *, joins_ledger: bool = True) -> Plan:
    """The plan of a sweep under a root; reads, starts and writes nothing.

    Args:
        sweep: the resolved sweep.
        root: absolute folder that holds every sweep's ledger.
        folder: the folder that the command was started in.
        joins_ledger: whether results would stand beside those that the ledger has.

    Raises:
        ConfigError: what cannot be run: resources that do not exist, a change that would alter
            existing cells, another device or precision than the ledger's.
    """
    spec, machine = sweep.spec, this_machine()
    notes = list(sweep.notes)
    try:
        device = _resolved_device(spec, machine)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if spec.cluster.name == "local":  # the nodes of a cluster are asked when it is joined
        _refuse_infeasible(spec, device, machine)
    _refuse_unknown_share(spec, device, sweep.cells)
    tracking_uri(spec.tracking.uri, root)
    if spec.device == "auto" and device == "cpu":
        notes.append("device auto: no NVIDIA GPU here, so trials run on the CPU")
    precision = resolve_precision(spec.precision, device)
    cells = [] if spec.purpose == "search" else sweep.cells  # it asks for its points
    desired = planned_records(spec.name, cells, spec.seeds)
    ledger = Ledger(root, spec.name)
    on_disk = ledger.replicate_ids()
    if ledger.exists and joins_ledger:
        _refuse_changed_sweep(ledger.spec(), sweep, device, precision, on_disk, desired)
    undesired = [name for name in on_disk if name not in desired]
    if undesired:
        notes.append(f"{len(undesired)} replicates on disk are no longer asked for; they are kept")
    data, data_folder = find_data(sweep, root, folder)
    if data_folder is None:
        notes.append(unprepared(sweep, data))
    states = ledger.states(desired)
    other_code = _other_code(states)
    if other_code:
        notes += _about_other_code(spec, other_code, states)
    return Plan(
        sweep=sweep,
        root=root,
        ledger=ledger,
        device=device,
        precision=precision,
        data=data,
        data_folder=data_folder,
        desired=desired,
        states=states,
        undesired=undesired,
        other_code=other_code,
        notes=notes,
    )


def _other_code(states: dict[str, ReplicateState]) -> list[str]:
    """Replicates whose last attempt says that other code or packages ran it."""
    now = fingerprints()
    return [
        name
        for name, state in states.items()
        if any(state.start.get(key, value) != value for key, value in now.items())
    ]


def _about_other_code(
    spec: SweepSpec, names: list[str], states: dict[str, ReplicateState]
) -> list[str]:
    """What the policy `other_code` has to say of such replicates.

    Raises:
        ConfigError: the policy is to refuse them.
    """
    start = states[names[0]].start
    commit = start.get("git_commit") or "no commit"
    sentence = (
        f"{len(names)} of {len(states)} replicates were trained by other code or package versions "
        f"(for example {names[0]}: code {start.get('code_id')}, commit {commit[:9]}, torch "
        f"{start.get('torch_version')}) than this call's"
    )
    if spec.other_code == "refuse":
        raise ConfigError(
            f"other_code=refuse: {sentence}; use that code, another sweep name, or other_code=warn"
        )
    return [sentence] if spec.other_code == "warn" else []


def find_data(sweep: Sweep, root: Path, folder: Path) -> tuple[DataConfig, Path | None]:
    """The cells' data set with absolute paths, and where it is prepared, if it is.

    Relative paths are looked for in the folder of a sweep file that is not one of ours, the folder
    that the command was started in, the root and the folder that holds the root, in this order.
    Paths are no part of a cell's identity; what was read is, through the data id.

    Raises:
        ConfigError: prepared data that does not match its manifest, or settings that no data fits.
    """
    config = sweep.cells[0].config.data
    places = [folder, root, root.parent]
    if CONF_FOLDER not in sweep.conf_path.parents:
        places.insert(0, sweep.conf_path.parent)
    try:
        candidates = [resolve_paths(config, place) for place in places]
        for candidate in candidates:
            if has_sources(candidate):
                return candidate, locate(candidate, root)
        prepared = locate(candidates[0], root)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return candidates[0], prepared


def has_sources(config: DataConfig) -> bool:
    """Whether every glob of a data set matches a file."""
    try:
        list_sources(config)
    except MissingSourceError:
        return False
    return True


def planned_records(
    sweep: str, cells: Sequence[Cell], seeds: Sequence[int]
) -> dict[str, TrialRecord]:
    """`planned_record` of every cell with every seed, by replicate, all of a seed together."""
    records = {}
    firsts = [planned_record(sweep, cell, seeds[0]) for cell in cells] if seeds else []
    for seed in seeds:
        for cell, first in zip(cells, firsts, strict=True):
            name = replicate_id(cell.cell_id, seed)
            data_seed = seed if cell.config.data_seed is None else cell.config.data_seed
            records[name] = replace(first, replicate_id=name, seed=seed, data_seed=data_seed)
    return records


def planned_record(sweep: str, cell: Cell, seed: int) -> TrialRecord:
    """The row of a replicate as far as its configuration decides it."""
    config, model = cell.config, cell.config.model
    parameters = count_parameters(model, config.data.vocab_size)
    return TrialRecord(
        sweep=sweep,
        cell_id=cell.cell_id,
        arm_id=cell.arm_id,
        replicate_id=replicate_id(cell.cell_id, seed),
        seed=seed,
        mixer=model.mixer.name,
        stack=model.stack,
        softmax_every=model.softmax_every,
        routing=model.routing.kind,
        residual=model.routing.residual if model.routing.routes_error else None,
        dt_init=getattr(model.mixer, "dt_init", None),
        optimizer=config.optimizer.name,
        optimizer_variant=getattr(config.optimizer, "variant", None),
        lr=config.optimizer.lr,
        adam_lr=getattr(config.optimizer, "adam_lr", None),
        size=config.size,
        match=config.match,
        data_seed=seed if config.data_seed is None else config.data_seed,
        mask_documents=config.data.mask_documents,
        first_token_loss=config.data.first_token_loss,
        seq_len=config.seq_len,
        batch_tokens=config.batch.tokens,
        tokens=config.num_steps * config.batch.tokens,
        steps=config.num_steps,
        params_total=parameters.total,
        params_non_embedding=parameters.non_embedding,
        flops_per_token=flops_per_token(model, config.data.vocab_size, config.seq_len),
        state_bytes=state_bytes(model),
        kv_bytes_per_token=kv_bytes_per_token(model),
        config_json=canonical_json(cell.values),
    )


def unprepared(sweep: Sweep, data: DataConfig) -> str:
    """What to say about data that is not prepared."""
    if data.is_embedded:
        return f"data {data.name} is not prepared yet; the sweep prepares it first"
    if not has_sources(data):
        return (
            f"data {data.name} is not prepared, and there are no files {', '.join(data.sources)}; "
            "put them there or give data.sources"
        )
    return (
        f"data {data.name} is not prepared yet; run "
        f"`python -m orchestrator data prepare conf={sweep.conf_path}` first"
    )


def _refuse_infeasible(spec: SweepSpec, device: str, machine: Machine) -> None:
    need, have = spec.lanes.loss, machine
    ranks = need.ranks(device)
    cpus = need.cpus * ranks
    if cpus > have.cpus:
        several = f" for its {ranks} processes" if ranks > 1 else ""
        raise ConfigError(
            f"lanes.loss.cpus={need.cpus}: a trial needs {cpus} cores{several}, but "
            f"{have.host} has {have.cpus}"
        )
    if (need.gpus > 1 or device == "cuda") and need.gpus > len(have.gpus):
        raise ConfigError(
            f"lanes.loss.gpus={need.gpus:g}: a trial needs {need.gpus:g} GPUs, but "
            f"{have.host} has {len(have.gpus)}"
        )


def _refuse_unknown_share(spec: SweepSpec, device: str, cells: Sequence[Cell]) -> None:
    if device == "cuda" and spec.lanes.loss.gpus == 0:
        raise ConfigError("lanes.loss.gpus=0 with device cuda: give a trial a share of a GPU")
    for cell in cells:
        try:
            cell.config.check_ranks(spec.lanes.loss.ranks(device))
        except ValueError as error:
            raise ConfigError(f"{error} (cell {cell.cell_id})") from None


def _resolved_device(spec: SweepSpec, machine: Machine) -> str:
    """`cpu` or `cuda`.

    Raises:
        ValueError: a device that is not there; `auto` on a cluster, whose nodes may differ.
    """
    if spec.cluster.name == "local":
        return resolve_device(spec.device, machine)
    if spec.device == "auto":
        raise ValueError("device=auto on a cluster, whose nodes may differ; use device=cuda or cpu")
    return spec.device


def _refuse_changed_sweep(
    old: dict[str, Any],
    sweep: Sweep,
    device: str,
    precision: str,
    on_disk: list[str],
    desired: dict[str, TrialRecord],
) -> None:
    """Refuse what would make rows under one sweep name incomparable."""
    spec = sweep.spec
    if not on_disk:
        return
    known = LossLane(**old["lanes"]["loss"]) if "lanes" in old else LossLane()
    facts = {
        "device": (old["device"], device),
        "precision": (old["precision"], precision),
        "threads": (old["threads"], spec.lanes.loss.cpus),
        "ranks": (known.ranks(old["device"]), spec.lanes.loss.ranks(device)),
    }
    for key, (before, now) in facts.items():
        if before != now:
            raise ConfigError(
                f"sweep {spec.name} has {len(on_disk)} replicates with {key}={before}, but this "
                f"call would use {key}={now}; use the same, or another name"
            )
    changed = _changed_base(old, spec)
    lost = [name for name in on_disk if name not in desired]
    if changed and lost:
        shown = "; ".join(f"{key}: {before} → {now}" for key, (before, now) in changed.items())
        raise ConfigError(
            f"sweep {spec.name} already has {len(on_disk)} replicates with another base "
            f"({shown}); {len(lost)} of them would change, so use another name"
        )


def _changed_base(old: dict[str, Any], spec: SweepSpec) -> dict[str, tuple[Any, Any]]:
    """Semantic base keys whose value differs and which neither sweep varies: old and new value."""
    absent = "the default"
    swept = {
        part.strip()
        for axes in (old["axes"], spec.axes)
        for name in axes
        for part in name.split(",")
    }
    before = {**old["base"], "match": old["match"]}
    now = {**spec.base, "match": spec.match}
    return {
        key: (before.get(key, absent), now.get(key, absent))
        for key in sorted(before.keys() | now.keys())
        if before.get(key, absent) != now.get(key, absent)
        and key not in swept
        and not any(key == path or key.startswith(f"{path}.") for path in NON_SEMANTIC_KEYS)
    }


# What `plan` shows -------------------------------------------------------------------------------


def plan_json(plan: Plan) -> dict[str, Any]:
    """The plan as one JSON-ready object: `cells` with the columns of `trials.parquet` known now."""
    cells = []
    for cell in plan.sweep.cells:
        names = [replicate_id(cell.cell_id, seed) for seed in plan.spec.seeds]
        row = plan.desired[names[0]].as_row()
        for key in ("replicate_id", "seed", "data_seed", "status", "attempts", "config_json"):
            row.pop(key)
        row["seeds"] = plan.spec.seeds
        row["replicates"] = {name: plan.states[name].status for name in names}
        row["assignment"] = cell.assignment
        row["config"] = json.loads(canonical_json(cell.values))
        cells.append(row)
    return {
        "sweep": plan.spec.name,
        "purpose": plan.spec.purpose,
        "match": plan.spec.match,
        "device": plan.device,
        "precision": plan.precision,
        "data_prepared": plan.data_folder is not None,
        "cells": cells,
        "replicates": len(plan.desired),
        "counts": plan.counts(),
        "to_run": plan.to_run,
        "to_time": plan.to_time,
        "excluded": [
            {"rule": rule, "cells": count}
            for rule, count in zip(plan.spec.exclude, plan.sweep.excluded, strict=True)
        ],
        "undesired": plan.undesired,
        "other_code": plan.other_code,
        "notes": plan.notes,
    }


def total_flops(plan: Plan) -> float:
    """Training FLOPs of the replicates that would run."""
    records = (plan.desired[name] for name in plan.to_run)
    return float(sum(record.tokens * (record.flops_per_token or 0) for record in records))


def rate_ratios(cell: Cell) -> list[tuple[str, tuple[float, ...]]]:
    """Each schedule's rate at 0, 25, 50, 75 and 100 % of the steps, as shares of its peak.

    Returns:
        The schedule of the trial, and that of the Adam group by its option where it is another.
    """
    config = cell.config
    found = [("", quartiles(config.schedule, config.num_steps))]
    if getattr(config.optimizer, "adam_schedule", "decayed") == "constant":
        constant = quartiles(config.schedule, config.num_steps, is_decayed=False)
        found.append((" (optimizer.adam_schedule: constant)", constant))
    return found
