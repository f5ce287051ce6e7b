"""Which windows a step reads: a pure function of (seed, epoch, step, windows per step).

Nothing here has a state. Resuming at step `s` means asking for step `s`, however often a run was
interrupted before and however many ranks or micro steps share its batch:

    epoch e of n windows     P_e = Generator(Philox(key=[seed, e])).permutation(n)
    all epochs, joined       P_0 ‖ P_1 ‖ P_2 ‖ …
    step s of G windows      positions s·G … (s + 1)·G − 1 of that

Philox is counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), so
every epoch's key starts a stream of its own. The seed is the data seed: initialisation has its own,
and all arms of a comparison see the same windows in the same order.
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

WindowIds = NDArray[np.int64]


@lru_cache(maxsize=4)
def epoch_permutation(data_seed: int, epoch: int, num_windows: int) -> WindowIds:
    """The order of an epoch's windows, read-only; 8 bytes a window, 0.1 s a million, once.

    Raises:
        ValueError: a seed or epoch that is no unsigned 64-bit number, or no windows.
    """
    for name, value in (("data_seed", data_seed), ("epoch", epoch)):
        if not 0 <= value < 2**64:
            raise ValueError(f"{name}={value} must be between 0 and 2**64 - 1")
    if num_windows < 1:
        raise ValueError(f"{num_windows=} must be at least 1")
    key = np.array([data_seed, epoch], np.uint64)
    order = np.random.Generator(np.random.Philox(key=key)).permutation(num_windows)
    order.flags.writeable = False
    return order


def window_ids(data_seed: int, step: int, windows_per_step: int, num_windows: int) -> WindowIds:
    """The windows of one step, over all ranks and micro steps.

    Args:
        data_seed: seed of the order, at least 0.
        step: 0-based optimizer step.
        windows_per_step: G; may exceed an epoch, whose windows then come again in new orders.
        num_windows: windows of the training part.

    Returns:
        `[G]` ids between 0 and `num_windows` - 1.

    Raises:
        ValueError: a negative step or seed, or a count below 1.
    """
    if step < 0:
        raise ValueError(f"{step=} must not be negative")
    if windows_per_step < 1:
        raise ValueError(f"{windows_per_step=} must be at least 1")
    if num_windows < 1:
        raise ValueError(f"{num_windows=} must be at least 1")
    parts = []
    position, end = step * windows_per_step, (step + 1) * windows_per_step
    while position < end:
        epoch, first = divmod(position, num_windows)
        count = min(num_windows - first, end - position)
        parts.append(epoch_permutation(data_seed, epoch, num_windows)[first : first + count])
        position += count
    return np.concatenate(parts)


def share(
    ids: WindowIds,
    *,
    rank: int = 0,
    world_size: int = 1,
    micro_step: int = 0,
    num_micro_steps: int = 1,
) -> WindowIds:
    """The part of a step's windows that one rank reads in one micro step.

    Micro steps are the outer cut: whatever the number of ranks, the ranks of micro step `a`
    together read what a single process reads in it.

    Raises:
        ValueError: windows that do not divide evenly, or a rank or micro step out of range.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"{rank=} must be between 0 and world_size - 1 = {world_size - 1}")
    if not 0 <= micro_step < num_micro_steps:
        raise ValueError(
            f"{micro_step=} must be between 0 and num_micro_steps - 1 = {num_micro_steps - 1}"
        )
    if len(ids) % (world_size * num_micro_steps):
        raise ValueError(
            f"{len(ids)} windows of a step do not divide evenly over {world_size=} and "
            f"{num_micro_steps=}"
        )
    part: WindowIds = ids.reshape(num_micro_steps, world_size, -1)[micro_step, rank]
    return part


def evaluation_windows(num_windows: int, count: int | None = None) -> WindowIds:
    """`count` windows spread evenly over a split, ascending; every window for None.

    They depend on no seed, so all replicates of all cells are judged by the same text.

    Raises:
        ValueError: a count below 1 or above `num_windows`.
    """
    if count is None:
        count = num_windows
    if not 1 <= count <= num_windows:
        raise ValueError(
            f"eval.windows={count} must be between 1 and the {num_windows} windows that the "
            "validation part has"
        )
    ids: WindowIds = np.arange(count, dtype=np.int64) * num_windows // count
    return ids
