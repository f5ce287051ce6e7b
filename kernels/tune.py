"""`bench kernels --tune`: which tiles, warps and stages are the fastest for an op and shape.

The parts of an op are cut independently of each other, so they are searched one after the other,
each with the tiles of the others as they are. A candidate counts by the GPU time of a whole forward
and backward, and only if the outputs and gradients that it gives are right. The present tile is
timed twice, and what lies within the difference is no gain.

What comes out is text for `kernels.tiles.MEASURED` or `kernels.channel_delta_plan.MEASURED`;
nothing is used before a person has put it there and `tests/gpu` and the compile check have passed
with it. A candidate that harms the process, by an illegal access for instance, ends the search with
its error; the rows before it have been yielded.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from kernels import channel_delta_plan, tiles
from kernels.benchmark import ERROR_LIMIT, OPS, largest_error
from kernels.benchmark_ops import BenchmarkShape, implementation, op_inputs
from kernels.device_time import device_milliseconds
from kernels.tiles import Tile

DTYPE = torch.bfloat16
"""Of the inputs, as in the benchmark."""

WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
REGISTERS = (None, 128, 168)

Cut = Any
"""A `Tile`, or the `channel_delta_plan.Tiles` of all kernels of a channel-decay rule."""


@dataclass(frozen=True, slots=True)
class Part:
    """What of an op is searched by itself.

    Attributes:
        name: kernel, as in `tiles.MEASURED`, or group of kernels.
        table: where a cut is looked up before the rules.
        key: under which it stands there.
        present: the cut in use.
        candidates: others that can be.
    """

    name: str
    table: dict[Any, Cut]
    key: tuple[Any, ...]
    present: Cut
    candidates: tuple[Cut, ...]

    @contextmanager
    def cut_by(self, cut: Cut) -> Iterator[None]:
        """In which the op is launched with this cut."""
        before = self.table.get(self.key)
        self.table[self.key] = cut
        try:
            yield
        finally:
            if before is None:
                del self.table[self.key]
            else:
                self.table[self.key] = before


@dataclass(frozen=True, slots=True)
class TuneRow:
    """One cut and what it did.

    Attributes:
        op: name of the op.
        shape: sizes.
        part: what was cut.
        cut: how.
        milliseconds: GPU time of a forward and backward; None for a cut that is out.
        outcome: `present`, `faster`, `no faster`, or why it is out.
        device_name: of the GPU.
    """

    op: str
    shape: BenchmarkShape
    part: Part
    cut: Cut
    milliseconds: float | None
    outcome: str
    device_name: str

    def as_fields(self) -> dict[str, Any]:
        """Plain values by name, for a CSV file."""
        plain = {"op": self.op, "shape": str(self.shape), "part": self.part.name}
        rest = {"milliseconds": self.milliseconds, "outcome": self.outcome}
        return {**plain, "cut": str(self.cut), **rest, "device_name": self.device_name}

    def __str__(self) -> str:
        """One line for a person."""
        time = "" if self.milliseconds is None else f"{self.milliseconds:.3f} ms, "
        return f"{self.op} {self.shape} {self.part.name} {self.cut}: {time}{self.outcome}"


def parts(op: str, shape: BenchmarkShape) -> list[Part]:
    """What of an op can be cut in another way, in the order of its launches."""
    if op in ("kimi_delta_rule", "gated_delta_rule_2"):
        return _channel_parts(shape)
    if op == "linear_attention":
        return [_part("linear_scan", _scans(shape), shape)]
    whole_key = [tiles.tile_width(shape.K)]
    return [
        _part("scan", _scans(shape), shape),
        _part("prepare", _cuts(whole_key, [64], [1], REGISTERS), shape),
        _part("pairs", _cuts([min(64, *whole_key)], _blocks(shape.V), (1, 2), REGISTERS), shape),
        _part("token", _cuts(_blocks(shape.K), _blocks(shape.V), (1, 2), (None,)), shape),
    ]


def tune(
    op: str,
    shape: BenchmarkShape,
    *,
    milliseconds: Callable[[], float] | None = None,
    error: Callable[[], float] | None = None,
) -> Iterator[TuneRow]:
    """Every cut of every part of an op, the present one first; see the module.

    Args:
        op: name of the op.
        shape: sizes; the text that comes out holds for its head dims.
        milliseconds: time of the op as it is cut now; None for that on the current CUDA device.
        error: largest relative error of its results; None for that beside float64.

    Raises:
        ValueError: for an unknown op, or without a CUDA device.
    """
    if op not in OPS:
        raise ValueError(f"op {op!r} is none of {', '.join(OPS)}")
    if milliseconds is None and not torch.cuda.is_available():
        raise ValueError("tiles are searched on a CUDA device, and there is none")
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    time = milliseconds or _training_time(op, shape)
    check = error or (lambda: largest_error(op, shape, "triton"))
    for part in parts(op, shape):
        with part.cut_by(part.present):
            found = check()
            if not found <= ERROR_LIMIT:
                yield TuneRow(op, shape, part, part.present, None, f"off by {found:.1e}", name)
                continue
            first, second = time(), time()
        best = min(first, second) - abs(first - second)
        yield TuneRow(op, shape, part, part.present, min(first, second), "present", name)
        for cut in part.candidates:
            taken, outcome = _tried(part, cut, time, check)
            if taken is not None and taken < best:
                outcome = "faster"
            yield TuneRow(op, shape, part, cut, taken, outcome, name)


def entries(rows: Iterable[TuneRow]) -> list[str]:
    """Lines for the tables: the fastest cut of each part, where one was faster than the present."""
    rows = list(rows)
    lines = []
    for present in (row for row in rows if row.outcome == "present"):
        of_part = [row for row in rows if row.part is present.part and row.outcome == "faster"]
        if not of_part:
            continue
        best = min(of_part, key=lambda row: row.milliseconds or float("inf"))
        key = ", ".join(repr(x) for x in best.part.key)
        where = f"{best.op} {best.shape}, {best.device_name}"
        lines.append(f"# {best.milliseconds:.3f} ms, {present.milliseconds:.3f} before: {where}.")
        lines.append(f"({key}): {best.cut},")
    return lines


def _tried(
    part: Part, cut: Cut, time: Callable[[], float], check: Callable[[], float]
) -> tuple[float | None, str]:
    """Time of a cut, or None and why it is out."""
    try:
        with part.cut_by(cut):
            found = check()
            if not found <= ERROR_LIMIT:
                return None, f"off by {found:.1e}"
            return time(), "no faster"
    except OutOfResources as failure:
        return None, f"too much of the GPU: {failure}"
    except (CompilationError, PTXASError) as failure:
        return None, f"does not compile: {type(failure).__name__}"


def _training_time(op: str, shape: BenchmarkShape) -> Callable[[], float]:
    """GPU time of a forward and backward, as the op is cut when it is called."""
    values = op_inputs(op, shape, torch.Generator("cuda").manual_seed(1))
    d_out = torch.randn_like(values["v"].detach())
    call = implementation(op, "triton")

    def both() -> None:
        torch.autograd.grad(call(**values), list(values.values()), d_out)

    def timed() -> float:
        both()
        return device_milliseconds(both)

    return timed


def _part(name: str, candidates: Iterable[Tile], shape: BenchmarkShape) -> Part:
    rule: tiles.TileRule = getattr(tiles, f"{name}_tile")
    present = rule(shape.K, shape.V, DTYPE)
    others = tuple(cut for cut in candidates if cut != present)
    return Part(name, tiles.MEASURED, (name, shape.K, shape.V, DTYPE), present, others)


def _scans(shape: BenchmarkShape) -> list[Tile]:
    return _cuts([tiles.tile_width(shape.K)], _blocks(shape.V), STAGES, (None,))


def _blocks(channels: int) -> list[int]:
    """Widths of a tile over so many channels."""
    return [width for width in (32, 64, 128) if width <= tiles.tile_width(channels)]


def _cuts(
    blocks_k: Iterable[int],
    blocks_v: Iterable[int],
    stages: Iterable[int],
    registers: Iterable[int | None],
) -> list[Tile]:
    """All tiles of these that are not known to fail."""
    product = itertools.product(blocks_k, blocks_v, WARPS, stages, registers)
    return [Tile(*cut) for cut in product if min(cut[:2]) >= tiles.SHORTEST_ROW or cut[2] >= 8]


def _channel_parts(shape: BenchmarkShape) -> list[Part]:
    present = channel_delta_plan.tiles(DTYPE, shape.K, shape.V)
    fields: dict[str, dict[str, tuple[Any, ...]]] = {
        "prepare": {
            "prepare_key": (32, 64),
            "prepare_warps": WARPS,
            "prepare_registers": REGISTERS,
        },
        "scans": {"value": (64, 128), "scan_warps": WARPS, "scan_stages": STAGES},
        "values": {"value_warps": WARPS},
        "key gradients": {
            "grads_value": (64, 128),
            "grads_warps": WARPS,
            "grads_stages": (1, 2),
            "grads_registers": REGISTERS,
        },
    }
    key = (DTYPE, shape.K, shape.V)
    found = []
    for name, choices in fields.items():
        product = itertools.product(*choices.values())
        cuts = (
            dataclasses.replace(present, **dict(zip(choices, values, strict=True)))
            for values in product
        )
        others = tuple(cut for cut in cuts if cut != present)
        found.append(Part(name, channel_delta_plan.MEASURED, key, present, others))
    return found
