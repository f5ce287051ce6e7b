"""Text to token files, and token files to batches whose order is a pure function of the step.

    DataConfig ── prepare ──► <root>/data/NAME-ID8/ ── open_dataset ──► Dataset
    TrainingBatches(split=dataset.train, …).batch(step)      evaluation_set(dataset, seq_len, count)

Names are imported at first use: composing a configuration needs `orchestrator.data.corpus` alone,
and must not wait for numpy, pyarrow and tokenizers. Nothing here imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.data.batches import EvaluationSet, TrainingBatches, evaluation_set
    from orchestrator.data.corpus import DataConfig, resolve_paths
    from orchestrator.data.dataset import Batch, Dataset, Split, open_dataset
    from orchestrator.data.documents import DocumentRule
    from orchestrator.data.inspection import Verification, info, verify
    from orchestrator.data.manifest import locate
    from orchestrator.data.order import evaluation_windows, share, window_ids
    from orchestrator.data.preparation import Prepared, Progress, prepare

__all__ = [
    "Batch",
    "DataConfig",
    "Dataset",
    "DocumentRule",
    "EvaluationSet",
    "Prepared",
    "Progress",
    "Split",
    "TrainingBatches",
    "Verification",
    "evaluation_set",
    "evaluation_windows",
    "info",
    "locate",
    "open_dataset",
    "prepare",
    "resolve_paths",
    "share",
    "verify",
    "window_ids",
]

_HOMES = {
    "Batch": "dataset",
    "DataConfig": "corpus",
    "Dataset": "dataset",
    "DocumentRule": "documents",
    "EvaluationSet": "batches",
    "Prepared": "preparation",
    "Progress": "preparation",
    "Split": "dataset",
    "TrainingBatches": "batches",
    "Verification": "inspection",
    "evaluation_set": "batches",
    "evaluation_windows": "order",
    "info": "inspection",
    "locate": "manifest",
    "open_dataset": "dataset",
    "prepare": "preparation",
    "resolve_paths": "corpus",
    "share": "order",
    "verify": "inspection",
    "window_ids": "order",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
