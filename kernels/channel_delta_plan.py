"""How a call of the channel-decay delta rules is cut: sizes, tiles, chunks, segments. Host side."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.sequences import Sequences, num_chunk_slots, num_segments, sequences
from kernels.tiles import CHUNK, dot_precision, processors, tile_width


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile widths, warps and pipeline stages of the kernels for one dtype and pair of head dims.

    Attributes:
        prepare_key: channels of a tile in the kernel that prepares the chunks.
        prepare_warps: its warps.
        value: value columns of a tile in the scans and in the kernel of the value gradients.
        scan_warps: warps of the scans.
        scan_stages: chunks whose loads are in flight in a scan.
        value_warps: warps of the kernel of the value gradients.
        grads_key: channels of a tile in the kernels of the key gradients.
        grads_value: value columns that they take at a time.
        grads_warps: their warps.
        grads_stages: tiles of value columns in flight there.
        grads_registers: most registers of a thread there, to fit more programs on a multiprocessor;
            None for as many as the compiler takes.
        prepare_registers: the same for the kernel that prepares the chunks.
    """

    prepare_key: int
    prepare_warps: int
    value: int
    scan_warps: int
    scan_stages: int
    value_warps: int
    grads_key: int
    grads_value: int
    grads_warps: int
    grads_stages: int
    grads_registers: int | None = None
    prepare_registers: int | None = None


MEASURED: dict[tuple[torch.dtype, int, int], Tiles] = {}
"""Tiles that `bench kernels --tune` found, by dtype, key dim and value dim; see `kernels.tiles`."""


def tiles(dtype: torch.dtype, key_dim: int, value_dim: int) -> Tiles:
    """Tiles for inputs of `dtype` on Hopper; see the log, "Channel-decay rules".

    What stands in `MEASURED` is taken; the rest is by rule.

    Rows of tiles have at least 128 bytes (`kernels.tiles.SHORTEST_ROW`), with one exception: for
    heads of more than 32 channels, the kernel that prepares the chunks takes half of that in 16
    bit, which is a third faster, and for which the compile check and the tests on a GPU find its
    code right.
    """
    found = MEASURED.get((dtype, key_dim, value_dim))
    if found is not None:
        return found
    if dtype == torch.float32:
        return Tiles(32, 8, 64, 8, 1, 8, 32, 64, 8, 1)
    scan = (4, 2) if key_dim <= 128 else (8, 1)
    return Tiles(
        32 if key_dim > 32 else 64, 4, 64, *scan, 4, 64, 128 if value_dim > 64 else 64, 4, 1
    )


@dataclass(frozen=True, slots=True)
class Call:
    """One call as its launches need it.

    Attributes:
        B: batch rows.
        T: tokens of a row.
        H: key heads.
        HV: value heads.
        K: key dim.
        V: value dim.
        dtype: of q, k and v.
        has_channel_gates: whether erase and write are per channel, not one strength per head.
        is_unit: whether q and k are made unit vectors.
        scale: factor of the read.
        tiles: tiles of its kernels.
        chunks: its sequences and their chunks.
        segments: parts that each sequence is split into.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    dtype: torch.dtype
    has_channel_gates: bool
    is_unit: bool
    scale: float
    tiles: Tiles
    chunks: Sequences
    segments: int

    @property
    def precision(self) -> str:
        """`input_precision` of products."""
        return dot_precision(self.dtype)

    @property
    def scan_key(self) -> int:
        """Rows of the memory in a scan, all channels in one tile."""
        return tile_width(self.K)

    @property
    def tiles_v(self) -> int:
        """Tiles of value columns in a scan."""
        return -(-self.V // self.tiles.value)

    @property
    def tiles_k(self) -> int:
        """Tiles of channels in the kernels of the key gradients."""
        return -(-self.K // self.tiles.grads_key)


def call(
    q: Tensor,
    v: Tensor,
    erase: Tensor,
    cu_seqlens: Tensor | None,
    scale: float,
    unit: bool,  # noqa: FBT001 (an operator's schema has positional arguments)
    *,
    located: bool = True,
) -> Call:
    """The plan of a call, from shapes alone but for the tables of packed sequences.

    Args:
        q: queries `[B, T, H, K]`.
        v: values `[B, T, HV, V]`.
        erase: `[B, T, HV]` or `[B, T, HV, K]`.
        cu_seqlens: boundaries of packed sequences.
        scale: factor of the read.
        unit: whether q and k are made unit vectors.
        located: also make the tables of packed sequences, which kernels read.
    """
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    chosen = tiles(q.dtype, K, V)
    count = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    slots = num_chunk_slots(B, T, CHUNK, cu_seqlens)
    chunks = sequences(B, T, CHUNK, cu_seqlens) if located else Sequences(count, T, CHUNK, slots)
    programs = count * HV * -(-V // chosen.value)
    segments = num_segments(programs, chunks.mean_chunks, processors(q.device))
    return Call(B, T, H, HV, K, V, q.dtype, erase.ndim == 4, unit, scale, chosen, chunks, segments)
