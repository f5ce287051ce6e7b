"""Ranks of a data-parallel trial: what they must agree on, and the one rank that is alone.

Every rank holds the whole model and optimizer, drawn from the same generators, and reads its share
of each step's windows. Gradients and losses are averaged over ranks before clipping, so every rank
then makes the same update from the same bits, and weights never have to be exchanged. The global
batch and its order don't depend on the number of ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

BUCKET_NUMEL = 2**24
"""Numbers that are averaged in one call: large enough to fill a link, 64 MB of copy in fp32."""


class Ranks(ABC):
    """One rank among those that train together.

    Attributes:
        rank: from 0.
        world_size: number of ranks.
    """

    rank: int
    world_size: int

    @abstractmethod
    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its mean over ranks; all ranks get the same bits."""

    @abstractmethod
    def total(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over ranks."""

    @abstractmethod
    def any(self, flag: bool) -> bool:  # noqa: FBT001 - the flag is the value, not an option
        """Whether the flag is true on some rank."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes journals and checkpoints."""
        return self.rank == 0


class Alone(Ranks):
    """The only rank: nothing to agree on."""

    rank = 0
    world_size = 1

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Leaves the tensors as they are."""

    def total(self, tensor: Tensor) -> None:
        """Leaves the tensor as it is."""

    def any(self, flag: bool) -> bool:  # noqa: FBT001
        """The flag."""
        return flag


class ProcessGroup(Ranks):
    """A rank of torch's default process group, which must have been made before."""

    def __init__(self, device: torch.device) -> None:
        """Joins the group.

        Args:
            device: where the tensors of this rank live; NCCL's must be a CUDA device.
        """
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self._device = device

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replaces each tensor by its mean over ranks, in buckets of equal type."""
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket])
            dist.all_reduce(flat)
            flat /= self.world_size
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.view_as(tensor))

    def total(self, tensor: Tensor) -> None:
        """Replaces a tensor by its sum over ranks."""
        dist.all_reduce(tensor)

    def any(self, flag: bool) -> bool:  # noqa: FBT001
        """Whether the flag is true on some rank."""
        count = torch.tensor(int(flag), device=self._device)
        dist.all_reduce(count)
        return bool(count.item())


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """The tensors in order, cut where the type changes or a bucket is full."""
    buckets: list[list[Tensor]] = []
    numel = 0
    for tensor in tensors:
        is_full = numel + tensor.numel() > BUCKET_NUMEL
        if not buckets or is_full or buckets[-1][-1].dtype != tensor.dtype:
            buckets.append([])
            numel = 0
        buckets[-1].append(tensor)
        numel += tensor.numel()
    return buckets


ALONE = Alone()
"""Shared by everything that trains in one process; it has no state."""
