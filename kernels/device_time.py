"""GPU time of a call: the sum over its kernels, by the device's own clock.

The time between two events on a stream also holds the gaps in which the GPU waits for the host to
launch the next kernel. A call by itself has many; in a training step, whose host runs ahead, they
vanish. What is summed here is what stays.
"""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

REPEATS = 20

_FLUSH_BYTES = 256 * 2**20
"""Several times the L2 cache of any GPU (60 MB of an H200)."""

_FLUSH_KERNEL = "bitwise_not"
"""In the name of the kernel that flushes the cache, and of no kernel that is measured."""


def device_milliseconds(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Mean GPU time of the kernels, copies and fills of one call, with the L2 cache flushed before.

    Args:
        run: launches on the current CUDA device; compiled and tuned before.
        repeats: calls that are averaged.
    """
    flushed = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        for _ in range(repeats):
            flushed.bitwise_not_()
            run()
        torch.cuda.synchronize()
    microseconds = sum(
        float(event.device_time)
        for event in profiled.events()
        if event.device_type.name == "CUDA" and _FLUSH_KERNEL not in event.name
    )
    return microseconds / repeats / 1e3
