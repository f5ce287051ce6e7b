"""Where and in which arithmetic a trial runs, and what can be read of the device."""

import contextlib
import ctypes
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
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_MMAP_THRESHOLD = 32 << 20
KEPT_BYTES = 1 << 30


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
        """Sets the number of threads, and puts it back; on a CPU also `keep_freed_memory`."""
        if not self.is_cuda:
            keep_freed_memory()
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


def processor_name() -> str:
    """The CPU's model, or its architecture where the system doesn't say."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
