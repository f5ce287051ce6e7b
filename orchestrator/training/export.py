"""A trained model as a folder that needs no ledger: weights, configuration, tokenizer, model card.

    FOLDER/model.safetensors   fp32 weights by the names of `named_parameters`
    FOLDER/config.json         the trial's configuration, data id, vocabulary, seed, results
    FOLDER/tokenizer.json      where the data has one of its own
    FOLDER/README.md           the model card

The folder is written under a temporary name and renamed, so that it is whole or not there.
`load_exported` rebuilds the model from the configuration in it, and refuses weights that another
architecture has or a data set that they were not trained on.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from models.configs import ModelConfig
from models.lm import LanguageModel
from orchestrator.config import TrialConfig, trial_from_dict, trial_to_dict
from orchestrator.training.checkpoint import CheckpointMismatchError, differing_values
from orchestrator.training.model_card import model_card

FORMAT = 1
WEIGHTS_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
CARD_FILE = "README.md"
TOKENIZER_FILE = "tokenizer.json"

# How a model computes, not what: free to differ between training and loading.
COMPUTED_HOW = ("model.impl", "model.recompute", "model.compile")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A model that was read back.

    Attributes:
        model: on the CPU.
        config: of its trial.
        seed: of its trial.
        data_id: of the tokens that it was trained on.
        results: what its trial measured, by the columns of the records.
        tokenizer: path of its tokenizer; None where the folder has none.
    """

    model: LanguageModel
    config: TrialConfig
    seed: int
    data_id: str
    results: dict[str, Any]
    tokenizer: Path | None


def export_model(
    folder: Path,
    model: LanguageModel,
    config: TrialConfig,
    *,
    seed: int,
    data_folder: Path,
    data_id: str,
    results: Mapping[str, Any],
) -> Path:
    """Writes a trained model; returns its folder, which is replaced if it is there.

    Args:
        folder: of this model alone.
        model: after its last step.
        config: of its trial.
        seed: of its trial.
        data_folder: the prepared data, for its tokenizer.
        data_id: of the data.
        results: JSON-ready measurements by the columns of the records.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        _write(partial, model, config, seed, data_folder, data_id, results)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return folder


def _write(
    partial: Path,
    model: LanguageModel,
    config: TrialConfig,
    seed: int,
    data_folder: Path,
    data_id: str,
    results: Mapping[str, Any],
) -> None:
    weights = {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}
    save_file(weights, partial / WEIGHTS_FILE, metadata={"format": "pt"})
    facts = {
        "format": FORMAT,
        "weights_sha256": _sha256(partial / WEIGHTS_FILE),
        "trial": trial_to_dict(config),
        "vocab_size": model.vocab_size,
        "seed": seed,
        "data_id": data_id,
        "results": dict(results),
    }
    (partial / CONFIG_FILE).write_text(json.dumps(facts, indent=1), encoding="utf-8")
    parameters = sum(weight.numel() for weight in weights.values())
    (partial / CARD_FILE).write_text(model_card(config, facts, parameters), encoding="utf-8")
    # safetensors leaves its file to its owner alone; a model is as readable as its card.
    shutil.copymode(partial / CARD_FILE, partial / WEIGHTS_FILE)
    if (data_folder / TOKENIZER_FILE).is_file():
        shutil.copy(data_folder / TOKENIZER_FILE, partial / TOKENIZER_FILE)


def load_exported(
    folder: Path, *, expected: ModelConfig | None = None, data_id: str | None = None
) -> Exported:
    """Reads a model back, in evaluation mode on the CPU.

    Args:
        folder: what `export_model` wrote.
        expected: the architecture that the caller means to load into; None takes the folder's.
        data_id: of the tokens that the caller has; None takes any.

    Raises:
        CheckpointMismatchError: another architecture or data id, with each difference.
        ValueError: no such folder, another format, or damaged weights.
    """
    facts = _read_facts(folder)
    config = trial_from_dict(facts["trial"])
    ours: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if expected is not None:
        ours["model"], theirs["model"] = asdict(expected), asdict(config.model)
    if data_id is not None:
        ours["data_id"], theirs["data_id"] = data_id, facts["data_id"]
    if difference := differing_values(theirs, ours, free=COMPUTED_HOW):
        raise CheckpointMismatchError(
            f"{folder} holds another model: {difference}; load it as what it is"
        )
    if _sha256(folder / WEIGHTS_FILE) != facts["weights_sha256"]:
        raise ValueError(f"{folder / WEIGHTS_FILE} is damaged: its sha256 is not the stated one")
    model = LanguageModel(config.model if expected is None else expected, facts["vocab_size"])
    model.load_state_dict(load_file(folder / WEIGHTS_FILE))
    tokenizer = folder / TOKENIZER_FILE
    return Exported(
        model=model.eval(),
        config=config,
        seed=facts["seed"],
        data_id=facts["data_id"],
        results=facts["results"],
        tokenizer=tokenizer if tokenizer.is_file() else None,
    )


def _read_facts(folder: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} is no exported model: {error}") from None
    if facts.get("format") != FORMAT:
        raise ValueError(
            f"{folder} has format {facts.get('format')}, this version reads {FORMAT}; export the "
            "model again"
        )
    return facts


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
