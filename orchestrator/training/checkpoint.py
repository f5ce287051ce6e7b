"""Checkpoints that continue a trial bit for bit: written whole or not at all, read back checked.

    FOLDER/step-00000040/tensors.safetensors   weights as `model/NAME`, state as `optimizer/NAME`
    FOLDER/step-00000040/state.json            step, facts, identity, and the tensors' sha256

A checkpoint is written under a temporary name, flushed to disk, and renamed. `load_newest` takes
the newest one whose tensors have the hash that `state.json` states; others are skipped with a note.
The order of the data is a function of the step, so the step is the data's position.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

FORMAT = 1
KEPT = 2
"""The newest, and one more in case the newest turns out damaged."""

TENSORS_FILE = "tensors.safetensors"
STATE_FILE = "state.json"
STEP_FOLDER = re.compile(r"step-(\d{8,})")

# These decide when a trial writes, where text was found, whose tokens have an id of their own, or
# how many windows are read at once; none changes what is computed.
KEYS_FREE_TO_CHANGE = (
    "config.log.",
    "config.checkpoint.",
    "config.data.",
    "config.batch.micro_windows",
)


class CheckpointMismatchError(ValueError):
    """The checkpoint belongs to another trial; the message names what differs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A trial's state after some step.

    Attributes:
        step: optimizer steps done.
        tensors: on the CPU, by `model/NAME` and `optimizer/NAME`.
        facts: plain values that the trial carries along, as it saved them.
        notes: one sentence for each newer checkpoint that could not be used.
    """

    step: int
    tensors: dict[str, Tensor]
    facts: dict[str, Any]
    notes: tuple[str, ...] = ()

    def part(self, prefix: str) -> dict[str, Tensor]:
        """The tensors below `PREFIX/`, without it."""
        start = f"{prefix}/"
        return {n.removeprefix(start): t for n, t in self.tensors.items() if n.startswith(start)}


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
    identity: Mapping[str, Any],
) -> Path:
    """Writes a checkpoint and removes all but the newest `KEPT`; returns its folder.

    Args:
        folder: of all checkpoints of the trial; made if missing.
        step: optimizer steps done.
        tensors: everything to continue from, as `Checkpoint.tensors` names it.
        facts: JSON-ready values to carry along.
        identity: nested JSON-ready values that a trial must share to continue from here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _remove_partial(folder)
    final = folder / f"step-{step:08d}"
    partial = folder / f".{final.name}.partial"
    partial.mkdir()
    save_file(
        {n: t.detach().cpu().contiguous() for n, t in tensors.items()}, partial / TENSORS_FILE
    )
    state = {
        "format": FORMAT,
        "step": step,
        "tensors_sha256": _sha256(partial / TENSORS_FILE),
        "facts": dict(facts),
        "identity": dict(identity),
    }
    (partial / STATE_FILE).write_text(json.dumps(state, indent=1), encoding="utf-8")
    for path in (partial / TENSORS_FILE, partial / STATE_FILE, partial):
        _sync(path)
    if final.exists():
        # Left by an earlier attempt and skipped as damaged, or this step would not be trained anew.
        shutil.rmtree(final)
    partial.rename(final)
    _sync(folder)
    for _, old in _found(folder)[:-KEPT]:
        shutil.rmtree(old)
    return final


def load_newest(folder: Path, identity: Mapping[str, Any]) -> Checkpoint | None:
    """The newest complete checkpoint in a folder, or None where there is none.

    Args:
        folder: may be missing.
        identity: of the trial that wants to continue.

    Raises:
        CheckpointMismatchError: the checkpoint was made by a trial of another identity.
    """
    notes: list[str] = []
    for step, path in reversed(_found(folder)):
        try:
            state = _read_state(path, step)
        except (OSError, ValueError, KeyError, TypeError) as error:
            notes.append(f"skipped {path.name}: {error}")
            continue
        _check_identity(path, state["identity"], identity)
        try:
            tensors = _read_tensors(path, state["tensors_sha256"])
        except (OSError, ValueError, SafetensorError) as error:
            notes.append(f"skipped {path.name}: {error}")
            continue
        return Checkpoint(step=step, tensors=tensors, facts=state["facts"], notes=tuple(notes))
    return None


def differing_keys(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> list[str]:
    """Dotted paths at which two nested mappings differ, in order."""
    flat_ours, flat_theirs = _flat(ours), _flat(theirs)
    absent = object()
    return sorted(
        key
        for key in flat_ours.keys() | flat_theirs.keys()
        if flat_ours.get(key, absent) != flat_theirs.get(key, absent)
    )


def differing_values(
    there: Mapping[str, Any], here: Mapping[str, Any], *, free: tuple[str, ...] = ()
) -> str:
    """What differs between a saved mapping and one of now, in words; empty for nothing.

    Args:
        there: nested values as they were saved.
        here: nested values as they are wanted.
        free: beginnings of dotted paths that may differ.
    """
    # Through JSON, so that a tuple here equals the list that it was saved as.
    here = json.loads(json.dumps(here))
    flat_there, flat_here = _flat(there), _flat(here)
    return "; ".join(
        f"{key} is {flat_there.get(key)!r} there and {flat_here.get(key)!r} here"
        for key in differing_keys(there, here)
        if not key.startswith(free)
    )


def _check_identity(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    if difference := differing_values(saved, wanted, free=KEYS_FREE_TO_CHANGE):
        raise CheckpointMismatchError(
            f"checkpoint {path} belongs to another trial: {difference}; continue with the same "
            "configuration, or remove the checkpoint"
        )


def _read_state(path: Path, step: int) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((path / STATE_FILE).read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise ValueError(f"its format is {state['format']}, this version reads {FORMAT}")
    if state["step"] != step:
        raise ValueError(f"{STATE_FILE} is of step {state['step']}")
    return {key: state[key] for key in ("tensors_sha256", "facts", "identity")}


def _read_tensors(path: Path, sha256: str) -> dict[str, Tensor]:
    if _sha256(path / TENSORS_FILE) != sha256:
        raise ValueError(
            f"{TENSORS_FILE} is damaged or incomplete: its sha256 is not the stated one"
        )
    tensors: dict[str, Tensor] = load_file(path / TENSORS_FILE)
    return tensors


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of everything that is named as a checkpoint, oldest first."""
    if not folder.is_dir():
        return []
    matches = [(STEP_FOLDER.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted((int(match[1]), path) for match, path in matches if match)


def _remove_partial(folder: Path) -> None:
    for path in folder.glob(".step-*.partial"):
        shutil.rmtree(path)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
