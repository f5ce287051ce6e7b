"""Text to token files, and token files to batches whose order is a pure function of the step.

    DataConfig ── prepare ──► <root>/data/NAME-ID8/ ── open_dataset ──► Dataset
    TrainingBatches(split=dataset.train, …).batch(step)      evaluation_set(dataset, seq_len, count)

Names are imported at first use: composing a configuration needs `orchestrator.data.corpus` alone,
and must not wait for numpy, pyarrow and tokenizers. Nothing here imports torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.data.corpus import DataConfig, resolve_paths
    from orchestrator.data.dataset import (
        Batch,
        Dataset,
        EvaluationSet,
        Split,
        TrainingBatches,
        Verification,
        evaluation_set,
        info,
        open_dataset,
        verify,
    )
    from orchestrator.data.manifest import locate
    from orchestrator.data.order import evaluation_windows, share, window_ids
    from orchestrator.data.preparation import Prepared, Progress, prepare

_HOMES = {
    "DataConfig": "corpus",
    "resolve_paths": "corpus",
    "Batch": "dataset",
    "Dataset": "dataset",
    "EvaluationSet": "dataset",
    "Split": "dataset",
    "TrainingBatches": "dataset",
    "Verification": "dataset",
    "evaluation_set": "dataset",
    "info": "dataset",
    "open_dataset": "dataset",
    "verify": "dataset",
    "locate": "manifest",
    "evaluation_windows": "order",
    "share": "order",
    "window_ids": "order",
    "Prepared": "preparation",
    "Progress": "preparation",
    "prepare": "preparation",
}

__all__ = [
    "Batch",
    "DataConfig",
    "Dataset",
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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
