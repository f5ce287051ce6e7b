"""`export`: the model that a finished trial kept, written to a folder of the user's."""

import difflib
from pathlib import Path

from rich.console import Console

from orchestrator.errors import ConfigError
from orchestrator.ledger import Ledger
from orchestrator.training.export import Exported, export_model, load_exported

SHOWN_IDS = 3


def run_export(root: Path, sweep: str, replicate_id: str, target: Path, console: Console) -> int:
    """Write a finished replicate's weights as safetensors with its model card.

    Args:
        root: folder of the ledgers.
        sweep: name of the sweep.
        replicate_id: as `status --json` and the records have it.
        target: folder to make; absolute.
        console: for the user.

    Returns:
        The exit code.

    Raises:
        LedgerError: there is no such sweep.
        ConfigError: there is no such replicate, it has not finished or kept no model, or the target
            is there already or cannot be written. Nothing is left at the target.
    """
    if target.exists() or target.is_symlink():
        raise ConfigError(f"{target} is there already; name a folder that is not")
    ledger = Ledger(root, sweep)
    ledger.spec()
    kept = _kept(ledger, replicate_id)
    exported = _read(kept)
    try:
        export_model(
            target,
            exported.model,
            exported.config,
            seed=exported.seed,
            data_folder=kept,  # where its tokenizer lies
            data_id=exported.data_id,
            results=exported.results,
        )
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written ({error.strerror}); make room or give permission there, "
            "or name another folder"
        ) from None
    console.print(f"{target}: model of {replicate_id}, with its card", markup=False)
    return 0


def _kept(ledger: Ledger, replicate_id: str) -> Path:
    """The folder in which a replicate's trial left its model."""
    known = ledger.replicate_ids()
    if replicate_id not in known:
        near = difflib.get_close_matches(replicate_id, known, n=SHOWN_IDS, cutoff=0.0)
        hint = f"nearest: {', '.join(near)}" if near else "it has none yet"
        raise ConfigError(f"sweep {ledger.sweep} has no replicate {replicate_id}; {hint}")
    status = ledger.state(replicate_id).status
    if status == "diverged":
        raise ConfigError(f"{replicate_id} has diverged, and diverged trials keep no model")
    if status != "completed":
        raise ConfigError(
            f"{replicate_id} is {status}: only a completed trial has a model to export; run the "
            "sweep's command again to complete it"
        )
    kept = ledger.replicate_folder(replicate_id) / "model"
    if not kept.is_dir():
        raise ConfigError(
            f"{replicate_id} has no {kept}: a trial's checkpoints go when it has ended, and only "
            "checkpoint.export=true keeps the model, of trials that end from then on; `train` with "
            "this cell, this seed and checkpoint.export=true trains it again and leaves it in "
            f"{kept.parents[3] / 'models' / replicate_id}"
        )
    return kept


def _read(kept: Path) -> Exported:
    try:
        return load_exported(kept)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the model in {kept} cannot be exported: {error}") from None
