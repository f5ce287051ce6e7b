"""Windows of a data set as tensors on the model's device."""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.documents import Documents
from orchestrator.data import Batch


class TensorBatch(NamedTuple):
    """The windows of one forward pass, on the model's device.

    Attributes:
        inputs: `[W, T]` int64.
        targets: `[W, T]` int64.
        documents: the parts that the windows are read as; None where every window is one.
        counted: rows of the flattened targets that count in the loss; None for all.
        weight: of its loss in that of the step's part that this rank reads; None for its share of
            the windows.
    """

    inputs: Tensor
    targets: Tensor
    documents: Documents | None = None
    counted: Tensor | None = None
    weight: float | None = None


def on_device(batch: Batch, device: torch.device) -> TensorBatch:
    """The batch as tensors on a device; without waiting for it, where that is a GPU."""

    def moved(array: NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        # Pinned, so that the copy is queued and the host goes on.
        return (tensor.pin_memory() if device.type == "cuda" else tensor).to(
            device, non_blocking=True
        )

    documents, counted = None, None
    if batch.bounds is not None:
        seq_len = batch.inputs.shape[1]
        documents = Documents.of(torch.from_numpy(batch.bounds), seq_len, device)
    if batch.counted is not None:
        counted = moved(np.flatnonzero(batch.counted))
    return TensorBatch(moved(batch.inputs), moved(batch.targets), documents, counted)
