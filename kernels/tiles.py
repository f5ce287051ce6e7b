"""Tiles, warps and pipeline stages of the Triton kernels: a table, never a search at run time.

A search would time kernels inside the first training step and may choose differently on every
machine, so that neither the first step's time nor the order of float sums would reproduce. What
`bench kernels --tune` finds is written into `MEASURED` by hand, once `tests/gpu` have passed with
it; the rules below it serve every other size.

C is 64 everywhere: 128 would halve the stored memories at 40 % more products and four times the
inverse; 32 pays for very short sequences only. Entries name their measurement in `docs/log.md`, or
the property of the compiled code they were chosen by.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kernels.launch import is_interpreted

CHUNK = 64


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel is cut.

    Attributes:
        block_k: key channels of a tile.
        block_v: value channels of a tile.
        warps: warps of a program.
        stages: tiles in flight in the software pipeline.
        registers: most registers of a thread, to fit more programs on a multiprocessor; None for
            as many as the compiler takes.
    """

    block_k: int
    block_v: int
    warps: int
    stages: int
    registers: int | None = None

    def __post_init__(self) -> None:
        if min(self.block_k, self.block_v) < SHORTEST_ROW and self.warps < 8:
            raise ValueError(f"{self} is narrower than {SHORTEST_ROW} with less than 8 warps")


SHORTEST_ROW = 64
"""Channels of the narrowest tile: rows of 128 bytes in 16 bit.

With shorter ones Triton 3.6 makes wrong code for Hopper (`kernels.uniform_registers`): on an H200
gradients of q and k were off by 100 % for heads of 16 × 64 and 24 × 40, and scans of 16 and of 32
columns ended in an illegal memory access. Narrower heads take tiles that are partly masked. The
one narrower tile, 512 × 32 with 8 warps, has passed its tests there.
"""


def tile_width(channels: int) -> int:
    """The tile that holds so many channels: the next power of two, at least `SHORTEST_ROW`."""
    # Triton's own function of this kind takes 50 µs a call, longer than a launch.
    return max(SHORTEST_ROW, 1 << (channels - 1).bit_length())


TileRule = Callable[[int, int, torch.dtype], Tile]
"""The tile of a kernel by key dim, value dim and dtype of the inputs."""

MEASURED: dict[tuple[str, int, int, torch.dtype], Tile] = {}
"""Tiles that were searched for, by kernel, key dim, value dim and dtype of the inputs."""


def _unless_measured(rule: TileRule) -> TileRule:
    """The tile in `MEASURED` under the rule's name without `_tile`, or that of the rule."""
    kernel = rule.__name__.removesuffix("_tile")

    @functools.wraps(rule)
    def tile(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
        found = MEASURED.get((kernel, key_dim, value_dim, dtype))
        return rule(key_dim, value_dim, dtype) if found is None else found

    return tile


@_unless_measured
def scan_tile(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """Tile of the scalar-decay scans, with a `block_k` × `block_v` memory in registers.

    Log, "Scalar-decay kernels": 3 stages take a third off 2; 8 warps, 128 columns and 16 columns
    are slower. 512 rows with 4 warps and 64 columns gave wrong numbers on an H200.
    """
    return _scan(key_dim, value_dim, dtype)


@_unless_measured
def linear_scan_tile(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """Tile of the scans of linear attention: that of the other scans, but measured apart."""
    return _scan(key_dim, value_dim, dtype)


def _scan(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    block_k = tile_width(key_dim)
    if block_k == 512:
        return Tile(block_k, 32, 8, 1)
    if block_k == 256:
        # 256 rows of memory spill with 4 warps.
        return Tile(block_k, 64, 8, 1 if dtype == torch.float32 else 2)
    return Tile(block_k, 64, 4, 1 if dtype == torch.float32 else 3)


@_unless_measured
def prepare_tile(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """Tile of the kernel that inverts a chunk's triangle: all key channels, no value channels.

    Log, "Scalar-decay kernels": 0.132 ms with 128 registers, 0.141 without a limit, 0.165 with 96.
    """
    return Tile(tile_width(key_dim), 64, 4, 1, registers=128)


@_unless_measured
def pairs_tile(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """Tile of the kernels that form products of a chunk's tokens with each other.

    Log, "Scalar-decay kernels": 0.175 ms with 168 registers, 0.205 without a limit, 0.228 with 128,
    0.307 with 8 warps.
    """
    if dtype == torch.float32:
        return Tile(64, 64, 8, 1)
    return Tile(64, 64, 4, 2, registers=168)


@_unless_measured
def token_tile(key_dim: int, value_dim: int, dtype: torch.dtype) -> Tile:
    """Tile of the kernels that take every chunk by itself, in slices of channels.

    Log, "Scalar-decay kernels": 0.445 ms, 0.609 with 8 warps although only 4 spill.
    """
    return Tile(64, 64, 8, 1) if dtype == torch.float32 else Tile(64, 64, 4, 2)


def dot_precision(dtype: torch.dtype) -> str:
    """`input_precision` of float32 products: full for float32 inputs, single tf32 beside 16 bit.

    For 16-bit inputs every other operand has 8 or 11 bits; tf32 keeps 11.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


def processors(device: torch.device) -> int:
    """Multiprocessors of the device; in the interpreter 1, which never splits a sequence."""
    return 1 if device.type != "cuda" else _multiprocessors(device)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_of(x: torch.Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's device the current one, which is where Triton launches."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)


def check_dtype(name: str, x: torch.Tensor) -> None:
    """Refuses what the kernels cannot compute with.

    Raises:
        ValueError: for dtypes other than float32, bfloat16 and float16, and for bfloat16 in the
            interpreter, whose products of bfloat16 operands are wrong.
    """
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name}.dtype is {x.dtype}; the Triton kernels take float32, bfloat16 and float16; "
            "use impl='chunked' or 'reference'"
        )
    if is_interpreted() and x.dtype == torch.bfloat16:
        raise ValueError(
            f"{name}.dtype is {x.dtype}, which Triton's interpreter multiplies wrongly; "
            "use float32 with TRITON_INTERPRET=1"
        )
