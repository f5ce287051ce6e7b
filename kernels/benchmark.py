"""Times of the ops on a GPU: our Triton kernels, our chunked form, flash-linear-attention beside.

Each row is one op, shape, implementation and pass. Before an implementation is timed at a shape,
its output and every gradient are compared with the float64 chunked form on a short sequence of the
same heads and head dims; one that is off is not timed, and its row says by how much.

Inputs are `[B, T, H, D]`, contiguous, bfloat16 (see `benchmark_ops`). Times are medians of repeated
runs with the L2 cache flushed between them; autotuning and compilation happen before. Beside the
time of a call stands that of its kernels alone (`device_time`): where the two differ, the host is
what the first one shows. The first call of a fresh process, with an empty compile cache and with a
full one, is `first_call_seconds`.
"""

import importlib.util
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton.testing
from torch import Tensor

from kernels.benchmark_ops import BENCHMARK_OPS, BenchmarkShape, implementation, op_inputs
from kernels.device_time import device_milliseconds

OPS = tuple(BENCHMARK_OPS)
IMPLEMENTATIONS = ("triton", "chunked", "fla")
PASSES = ("forward", "training forward", "forward and backward")

SHAPES = (
    BenchmarkShape(8, 4096, 8, 8, 128, 128),
    BenchmarkShape(1, 32768, 8, 8, 128, 128),
    BenchmarkShape(8, 4096, 16, 16, 64, 64),
    BenchmarkShape(8, 4096, 4, 8, 64, 64),
)
"""A batch, one long sequence, twice the heads of half the dim, grouped value heads."""

CHECK_LENGTH = 256
ERROR_LIMIT = 1e-2
"""Largest relative error of an output or gradient in bfloat16 beside float64.

Operands of 8 bits give 3e-3 to 4e-3 at this length; a wrong term gives far more than 1e-2.
"""

BYTES_PER_SECOND = 4.26e12
"""Copy bandwidth of an H200, measured, counting reads and writes; the floor of a row uses it."""


@dataclass(frozen=True, slots=True)
class BenchmarkRow:
    """One measurement.

    Attributes:
        op: name of the op.
        shape: sizes.
        impl: `triton`, `chunked` or `fla`.
        span: `forward` without gradients, `training forward` with what the backward needs, or
            `forward and backward`.
        error: largest relative error of output and gradients beside float64, on a short sequence.
        milliseconds: median; None where the error is beyond `ERROR_LIMIT`.
        low_milliseconds: 20 % quantile.
        high_milliseconds: 80 % quantile.
        device_milliseconds: time of the call's kernels alone, without the host's.
        extra_memory_bytes: most memory in use beyond that before the call.
        floor_milliseconds: time to read every input and write every output once.
    """

    op: str
    shape: BenchmarkShape
    impl: str
    span: str
    error: float
    milliseconds: float | None
    low_milliseconds: float | None
    high_milliseconds: float | None
    device_milliseconds: float | None
    extra_memory_bytes: int | None
    floor_milliseconds: float

    def as_fields(self) -> dict[str, Any]:
        """Plain values by name, for a CSV file."""
        return {**asdict(self), "shape": str(self.shape), "floor_ratio": self.floor_ratio}

    @property
    def floor_ratio(self) -> float | None:
        """How many times the floor it took."""
        return None if self.milliseconds is None else self.milliseconds / self.floor_milliseconds


def largest_error(op: str, shape: BenchmarkShape, impl: str, seed: int = 0) -> float:
    """Largest relative error of output and gradients beside float64 at `CHECK_LENGTH` tokens."""
    device = torch.device("cuda")
    generator = torch.Generator(device).manual_seed(seed)
    short = BenchmarkShape(2, CHECK_LENGTH, shape.H, shape.HV, shape.K, shape.V)
    values = op_inputs(op, short, generator)
    exact = {name: x.detach().double().requires_grad_() for name, x in values.items()}
    d_out = torch.randn(values["v"].shape, generator=generator, device=device)
    wanted = _with_gradients(implementation(op, "chunked"), exact, d_out.double())
    actual = _with_gradients(implementation(op, impl), values, d_out.to(torch.bfloat16))
    return max(
        float((a.double() - w).norm() / w.norm()) for a, w in zip(actual, wanted, strict=True)
    )


def _with_gradients(
    call: Callable[..., Tensor], values: dict[str, Tensor], d_out: Tensor
) -> tuple[Tensor, ...]:
    out = call(**values)
    return (out.detach(), *torch.autograd.grad(out, list(values.values()), d_out))


def floor_milliseconds(op: str, shape: BenchmarkShape, span: str) -> float:
    """Time to move every input and output of the pass once, at the copy bandwidth."""
    tokens = shape.B * shape.T
    queries_and_keys = 2 * 2 * shape.H * shape.K
    values = 2 * shape.HV * shape.V
    gates = BENCHMARK_OPS[op].gate_bytes(shape)
    moved = tokens * (queries_and_keys + 2 * values + gates)
    if span == "forward and backward":
        moved += tokens * (2 * queries_and_keys + 3 * values + 2 * gates)
    return moved / BYTES_PER_SECOND * 1e3


def measure(op: str, shape: BenchmarkShape, impl: str) -> Iterator[BenchmarkRow]:
    """One row for each pass, on the current CUDA device."""
    error = largest_error(op, shape, impl)
    generator = torch.Generator("cuda").manual_seed(1)
    values = op_inputs(op, shape, generator)
    d_out = torch.randn_like(values["v"].detach())
    call = implementation(op, impl)

    def forward() -> None:
        with torch.no_grad():
            call(**values)

    def training_forward() -> None:
        call(**values)

    def both() -> None:
        torch.autograd.grad(call(**values), list(values.values()), d_out)

    for span, run in zip(PASSES, (forward, training_forward, both), strict=True):
        floor = floor_milliseconds(op, shape, span)
        if not error <= ERROR_LIMIT:
            yield BenchmarkRow(op, shape, impl, span, error, None, None, None, None, None, floor)
            continue
        run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        median, low, high = triton.testing.do_bench(
            run, warmup=50, rep=200, quantiles=[0.5, 0.2, 0.8]
        )
        device = device_milliseconds(run)
        yield BenchmarkRow(op, shape, impl, span, error, median, low, high, device, extra, floor)


def benchmark(
    ops: Sequence[str] = OPS,
    shapes: Iterable[BenchmarkShape] = SHAPES,
    impls: Sequence[str] = IMPLEMENTATIONS,
) -> Iterator[BenchmarkRow]:
    """Rows of every op, shape and implementation, those of one op and shape in succession.

    Raises:
        ValueError: for an unknown op or implementation, or without a CUDA device.
    """
    for name, known, asked in (("op", OPS, ops), ("implementation", IMPLEMENTATIONS, impls)):
        for value in asked:
            if value not in known:
                raise ValueError(f"{name} {value!r} is none of {', '.join(known)}")
    if not torch.cuda.is_available():
        raise ValueError("kernels are timed on a CUDA device, and there is none")
    for op in ops:
        for shape in shapes:
            for impl in impls:
                yield from measure(op, shape, impl)


def table(rows: Iterable[BenchmarkRow]) -> str:
    """Rows as a Markdown table, each beside the times of fla in the same run."""
    rows = list(rows)
    beside = {(r.op, r.shape, r.span): r for r in rows if r.impl == "fla"}
    lines = [
        "| op | shape | pass | impl | ms | 20–80 % | GPU ms | × floor | fla / this | in GPU time "
        "| extra MiB | error |",
        "|---|---|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        name = f"| {row.op} | {row.shape} | {row.span} | {row.impl} | "
        if row.milliseconds is None or row.extra_memory_bytes is None:
            lines.append(f"{name}off | | | | | | | {row.error:.1e} |")
            continue
        fla = beside.get((row.op, row.shape, row.span))
        ratio = _ratio(None if fla is None else fla.milliseconds, row.milliseconds)
        theirs = None if fla is None else fla.device_milliseconds
        lines.append(
            f"{name}{row.milliseconds:.3f} | {row.low_milliseconds:.3f}–{row.high_milliseconds:.3f}"
            f" | {row.device_milliseconds:.3f} | {row.floor_ratio:.1f}"
            f" | {ratio} | {_ratio(theirs, row.device_milliseconds)}"
            f" | {row.extra_memory_bytes / 2**20:.0f} | {row.error:.1e} |"
        )
    return "\n".join(lines)


def _ratio(theirs: float | None, ours: float | None) -> str:
    return "" if theirs is None or ours is None else f"{theirs / ours:.2f}"


def installed_implementations() -> tuple[str, ...]:
    """Our Triton kernels, and flash-linear-attention where it is installed."""
    return ("triton", "fla") if importlib.util.find_spec("fla") else ("triton",)


def first_call_seconds(op: str, shape: BenchmarkShape, impl: str) -> tuple[float, float]:
    """Seconds of the first forward and backward of a fresh process: nothing compiled, all compiled.

    Raises:
        RuntimeError: the process failed; the message is what it wrote last.
    """
    sizes = (shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V)
    command = [sys.executable, "-m", "kernels.first_call", op, impl, *map(str, sizes)]
    with tempfile.TemporaryDirectory() as cache:
        seconds = []
        for _ in range(2):
            run = subprocess.run(
                command,
                env={**os.environ, "TRITON_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=False,
            )
            if run.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {run.stderr[-500:]}")
            seconds.append(float(run.stdout.split()[-1]))
    return seconds[0], seconds[1]
