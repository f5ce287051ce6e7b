"""Times of one decoded token beside the time that its memory needs to pass through the GPU.

A step reads the memory of every row and head and writes it again, and at this size nothing else
counts; the floor of a row is that traffic at the copy bandwidth. The L2 cache is flushed between
runs, since a model's other layers would have done so. The memory is updated in place. A call by
itself takes longer to launch than to run; captured in a CUDA graph, as a decoder would, it is the
GPU that is timed, and the launch of a graph with it. The kernels alone are timed as well.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import triton.testing
from torch import Tensor

from kernels import decode
from kernels.benchmark import BYTES_PER_SECOND, OPS
from kernels.benchmark_ops import BenchmarkShape, op_inputs
from kernels.device_time import device_milliseconds

SHAPES = tuple(BenchmarkShape(B, 1, 8, 8, 128, 128) for B in (1, 16, 64, 256))
STEPS: dict[str, Callable[..., Any]] = {
    "linear_attention": decode.linear_attention_step,
    "delta_rule": decode.delta_rule_step,
    "gated_delta_rule": decode.gated_delta_rule_step,
    "kimi_delta_rule": decode.kimi_delta_rule_step,
    "gated_delta_rule_2": decode.gated_delta_rule_2_step,
}


@dataclass(frozen=True, slots=True)
class DecodeRow:
    """One measurement.

    Attributes:
        op: name of the op.
        batch: rows that decode together.
        heads: value heads.
        head_dim: K and V.
        milliseconds: median of a call.
        graph_milliseconds: median of its replay from a CUDA graph.
        device_milliseconds: time of its kernels alone.
        floor_milliseconds: time to read and write all memories once.
    """

    op: str
    batch: int
    heads: int
    head_dim: int
    milliseconds: float
    graph_milliseconds: float
    device_milliseconds: float
    floor_milliseconds: float

    def as_fields(self) -> dict[str, Any]:
        """Plain values by name, for a CSV file."""
        return {**asdict(self), "floor_ratio": self.floor_ratio}

    @property
    def floor_ratio(self) -> float:
        """How many times the memory's traffic the kernels took."""
        return self.device_milliseconds / self.floor_milliseconds


def benchmark_decode(
    ops: Sequence[str] = OPS, shapes: Sequence[BenchmarkShape] = SHAPES
) -> Iterator[DecodeRow]:
    """Rows of every op and batch size, on the current CUDA device.

    Raises:
        ValueError: for an unknown op, or without a CUDA device.
    """
    for op in ops:
        if op not in STEPS:
            raise ValueError(f"op {op!r} is none of {', '.join(STEPS)}")
    if not torch.cuda.is_available():
        raise ValueError("decoding is timed on a CUDA device, and there is none")
    for op in ops:
        for shape in shapes:
            step = _step(op, shape)
            call, replay = (
                float(triton.testing.do_bench(run, warmup=50, rep=200, quantiles=[0.5]))
                for run in (step, _captured(step))
            )
            device = device_milliseconds(step)
            moved = 2 * 4 * shape.B * shape.HV * shape.K * shape.V
            floor = moved / BYTES_PER_SECOND * 1e3
            yield DecodeRow(op, shape.B, shape.HV, shape.K, call, replay, device, floor)


def _step(op: str, shape: BenchmarkShape) -> Callable[[], object]:
    generator = torch.Generator("cuda").manual_seed(0)
    token = {name: x.detach()[:, 0] for name, x in op_inputs(op, shape, generator).items()}
    state: Tensor = torch.zeros(shape.B, shape.HV, shape.K, shape.V, device="cuda")
    options = {} if op == "linear_attention" else {"qk_l2norm": True}

    def run() -> object:
        with torch.no_grad():
            return STEPS[op](**token, state=state, in_place=True, **options)

    return run


def _captured(step: Callable[[], object]) -> Callable[[], object]:
    """A call that replays `step` from a CUDA graph."""
    # Kernels are compiled and cuBLAS opened for this stream first, neither of which a capture may.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph.replay


def table(rows: Sequence[DecodeRow]) -> str:
    """Rows as a Markdown table."""
    lines = [
        "| op | batch | µs | in a graph | kernels | × memory traffic |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row.op} | {row.batch} | {row.milliseconds * 1e3:.1f} "
        f"| {row.graph_milliseconds * 1e3:.1f} | {row.device_milliseconds * 1e3:.1f} "
        f"| {row.floor_ratio:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)
