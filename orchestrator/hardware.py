"""What this machine has, read without importing torch."""

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from functools import cache

import psutil

GLANCE_SECONDS = 5.0
"""How long a look at the GPUs' use may take."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One node's resources.

    Attributes:
        host: its name.
        cpus: cores that this process may use.
        memory_bytes: host memory.
        gpus: name of each visible NVIDIA GPU.
        gpu_memory_bytes: memory of each of them; 0 where the driver does not say.
    """

    host: str
    cpus: int
    memory_bytes: int
    gpus: tuple[str, ...]
    gpu_memory_bytes: tuple[int, ...] = ()


@cache
def this_machine() -> Machine:
    """The machine that this process runs on."""
    found = _gpus()
    return Machine(
        host=socket.gethostname(),
        cpus=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory_bytes=psutil.virtual_memory().total,
        gpus=tuple(name for name, _ in found),
        gpu_memory_bytes=tuple(memory for _, memory in found),
    )


def _gpus() -> tuple[tuple[str, int], ...]:
    """Name and memory in bytes of each visible GPU."""
    found = [(name, _bytes(mebibytes)) for name, mebibytes in _query("name,memory.total")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    shown = [part for part in visible.split(",") if part.strip()]
    return tuple(found[int(part)] if part.strip().isdigit() else found[0] for part in shown)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """What a GPU does at one moment.

    Attributes:
        index: its number on this machine.
        busy_percent: share of the last moments in which a kernel ran.
        used_bytes: memory in use, by whichever process.
        total_bytes: memory in all.
    """

    index: int
    busy_percent: int
    used_bytes: int
    total_bytes: int


def gpu_use() -> tuple[GpuUse, ...]:
    """What this machine's GPUs do now; none where the driver does not say at once."""
    try:
        rows = _query("index,utilization.gpu,memory.used,memory.total", GLANCE_SECONDS)
    except subprocess.TimeoutExpired:
        return ()
    return tuple(
        GpuUse(int(index), int(busy), _bytes(used), _bytes(total))
        for index, busy, used, total in rows
        if index.isdigit() and busy.isdigit()
    )


def _query(fields: str, patience_seconds: float = 30.0) -> list[list[str]]:
    """Fields of every GPU that the NVIDIA driver knows; none without a driver."""
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=patience_seconds, check=False
    )
    if result.returncode:
        return []
    lines = [line for line in result.stdout.splitlines() if line.strip()]
    return [[part.strip() for part in line.rsplit(",", fields.count(","))] for line in lines]


def _bytes(mebibytes: str) -> int:
    # `[N/A]` on GPUs that share the host's memory.
    return int(mebibytes) * 2**20 if mebibytes.isdigit() else 0


def resolve_device(asked: str, machine: Machine) -> str:
    """`cpu` or `cuda` for `auto`, `cpu` or `cuda`.

    Raises:
        ValueError: `cuda` on a machine without a GPU.
    """
    if asked == "cuda" and not machine.gpus:
        raise ValueError("device=cuda, but this machine has no NVIDIA GPU; use device=auto or cpu")
    if asked == "auto":
        return "cuda" if machine.gpus else "cpu"
    return asked


def resolve_precision(asked: str, device: str) -> str:
    """`bf16` on CUDA and `fp32` on CPU for `auto`; otherwise what was asked for."""
    if asked == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return asked
