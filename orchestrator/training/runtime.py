"""Where and in which arithmetic a trial runs, and what can be read of the device."""

import contextlib
import ctypes
import functools
import mmap
import platform
import re
import resource
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

PRECISIONS = ("fp32", "bf16")

# Names and values of glibc's <malloc.h>; 32 MiB is the largest threshold that it takes.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST_MMAP_THRESHOLD = 32 << 20
DEFAULT_TOP_PAD = 128 << 10
KEPT_BYTES = 1 << 30

HUGE_PAGE_BYTES = 2 << 20
"""Of x86 and of most ARM kernels; others round what they are asked for to their own."""
HUGE_HEAP_BYTES = 256 << 20
"""Memory that `use_huge_pages` asks for at once; a nano trial uses 140 MiB of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Runtime:
    """Device, arithmetic and threads of one trial.

    Attributes:
        device: `cpu`, `cuda` or `cuda:INDEX`.
        precision: `fp32`, or `bf16` for products in bfloat16 with weights and optimizer state in
            fp32 (autocast).
        threads: torch threads on the host.
    """

    device: str = "cpu"
    precision: str = "fp32"
    threads: int = 1

    def __post_init__(self) -> None:
        if not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise ValueError(f"device={self.device!r} must be cpu, cuda or cuda:INDEX")
        if self.precision not in PRECISIONS:
            raise ValueError(f"precision={self.precision!r} must be one of {', '.join(PRECISIONS)}")
        if self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1")

    @property
    def torch_device(self) -> torch.device:
        """The device.

        Raises:
            ValueError: a CUDA device where torch sees none of that index.
        """
        device = torch.device(self.device)
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(
                f"device={self.device!r}, but torch sees {torch.cuda.device_count()} CUDA devices"
            )
        return device

    @property
    def is_cuda(self) -> bool:
        """Whether work is queued on a GPU, so that reading a value waits for it."""
        return self.device.startswith("cuda")

    def autocast(self) -> AbstractContextManager[object]:
        """The arithmetic of forward passes."""
        return torch.autocast(
            self.torch_device.type, torch.bfloat16, enabled=self.precision == "bf16"
        )

    def synchronize(self) -> None:
        """Waits until the device has done what was asked of it."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def device_name(self) -> str:
        """The GPU's name, or the processor's."""
        if self.is_cuda:
            return str(torch.cuda.get_device_name(self.torch_device))
        return processor_name()

    def reset_peak_memory(self) -> None:
        """Starts a new measurement of `peak_memory_bytes`.

        On Linux this resets the process's own high-water mark. Where the system has no such reset,
        the peak stays that of the process since it started.
        """
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.torch_device)
            return
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

    def peak_memory_bytes(self) -> int:
        """Largest memory allocated on the GPU; on a CPU the process's largest resident memory."""
        if self.is_cuda:
            return int(torch.cuda.max_memory_allocated(self.torch_device))
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """Sets the number of threads, and puts it back.

        On a CPU also `keep_freed_memory` and `use_huge_pages`, which last as long as the process.
        """
        if not self.is_cuda:
            keep_freed_memory()
            use_huge_pages()
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def keep_freed_memory() -> None:
    """Lets this process keep up to 1 GiB that its tensors free; does nothing without glibc.

    Otherwise glibc hands the end of its heap back whenever a step's tensors are freed, and the next
    step faults it in again page by page: some 300 faults and 1.3 ms of a nano step.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_MMAP_THRESHOLD)
        libc.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)


@functools.cache
def use_huge_pages() -> None:
    """Grows glibc's heap once by memory in pages of 2 MiB, where Linux gives these on request.

    Rows of logits lie 16 kB apart, each on a page of its own, and what a step touches is more than
    a processor remembers the places of, a virtual one above all: see docs/log.md for what that
    costs. The pages are taken when they are first written to. Call `keep_freed_memory` before, or
    glibc hands them back. It does nothing without glibc, or where the system gives no such pages.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    before = libc.sbrk(0)
    libc.mallopt(M_TOP_PAD, HUGE_HEAP_BYTES)
    # The largest block that comes from the heap, so that the heap has to grow for it.
    libc.free(libc.malloc(LARGEST_MMAP_THRESHOLD - mmap.PAGESIZE))
    libc.mallopt(M_TOP_PAD, DEFAULT_TOP_PAD)
    first = -(-before // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    if (size := libc.sbrk(0) - first) > 0:
        libc.madvise(first, size, mmap.MADV_HUGEPAGE)


def processor_name() -> str:
    """The CPU's model, or its architecture where the system doesn't say."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
