"""The compile check: it finds what it is for, and every kernel passes it."""

import itertools
import sys
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from kernels.compile_check import (
    Launch,
    Report,
    compile_launch,
    main,
    recorded_launches,
    transposed_stores,
)
from kernels.launch import is_interpreted
from kernels.tiles import (
    Tile,
    linear_scan_tile,
    pairs_tile,
    prepare_tile,
    scan_tile,
    token_tile,
)

compiled = pytest.mark.skipif(is_interpreted(), reason="the interpreter replaces the compiler")


@triton.jit
def transposed_product_kernel(a, b, x, out, N: tl.constexpr, D: tl.constexpr, CURED: tl.constexpr):
    """A masked product, transposed, feeds another: the fault; or is formed transposed: the cure."""
    o_n = tl.arange(0, N)
    o_nd = o_n[:, None] * D + tl.arange(0, D)[None, :]
    if CURED:
        b_s = tl.dot(tl.load(b + o_nd), tl.trans(tl.load(a + o_nd)))
        b_s = tl.where(o_n[:, None] <= o_n[None, :], b_s, 0.0).to(tl.bfloat16)
    else:
        b_s = tl.dot(tl.load(a + o_nd), tl.trans(tl.load(b + o_nd)))
        b_s = tl.trans(tl.where(o_n[:, None] >= o_n[None, :], b_s, 0.0).to(tl.bfloat16))
    tl.store(out + o_nd, tl.dot(b_s, tl.load(x + o_nd)))


def launch_of(width: int, *, cured: bool, warps: int = 4) -> Launch:
    a, b, x = (torch.zeros(64, width, dtype=torch.bfloat16) for _ in range(3))
    with recorded_launches() as launches:
        transposed_product_kernel[(1,)](
            a, b, x, a.float(), N=64, D=width, CURED=cured, num_warps=warps
        )
    return launches[0]


@compiled
@pytest.mark.parametrize("width", [32, 128])
def test_a_transposed_accumulator_is_found_and_its_cure_passes(width: int) -> None:
    bad, good = launch_of(width, cured=False), launch_of(width, cured=True)
    faults = compile_launch(bad).faults(bad, 0)
    assert faults == ["a transposed dot result is a dot operand"]
    report = compile_launch(good)
    assert report.faults(good, 0) == []
    assert report.wgmma > 0


@compiled
def test_a_record_holds_what_compilation_depends_on() -> None:
    launch = launch_of(32, cured=True, warps=8)
    assert launch.name == "transposed_product_kernel"
    assert dict(launch.types) == {"a": "*bf16", "b": "*bf16", "x": "*bf16", "out": "*fp32"}
    assert dict(launch.constants) == {"N": 64, "D": 32, "CURED": True}
    assert launch.warps == 8


def test_only_layouts_down_a_column_count_as_transposed() -> None:
    text = (
        "#linear = #ttg.linear<{register = [[1, 0], [8, 0]], lane = []}>\n"
        "#linear1 = #ttg.linear<{register = [[0, 1], [8, 0]], lane = []}>\n"
        "%0 = ttg.local_alloc %a : (tensor<64x64xf32, #linear1>) -> !x\n"
    )
    assert transposed_stores(text) == 0
    assert transposed_stores(text + "%1 = ttg.local_alloc %b : (tensor<4xf32, #linear>) -> !x") == 1


@compiled
def test_every_limit_has_its_fault() -> None:
    launch = launch_of(32, cured=True)
    report = Report(0, 255, 8, 232_449, 4, 1, 0.0)
    assert len(report.faults(launch, stack_budget=0)) == 3
    assert len(report.faults(launch, stack_budget=8)) == 2
    serialized = Report(0, 255, 0, 0, 4, 0, 0.0, wgmma_starts=4)
    assert serialized.faults(launch, 0) == ["every matrix instruction waits for the one before"]
    assert not replace(serialized, wgmma_starts=1).faults(launch, 0)


@compiled
def test_each_kernel_compiles_for_hopper_without_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compile_check", "--quick"])
    assert main() == 0, capsys.readouterr().out
    assert capsys.readouterr().out.count("  ok\n") > 10


def test_tiles_that_crash_are_refused() -> None:
    for narrow in ((64, 32), (16, 64)):
        with pytest.raises(ValueError, match="narrower than 64 with less than 8 warps"):
            Tile(*narrow, 4, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_no_head_is_narrow_enough_for_a_tile_that_crashes(dtype: torch.dtype) -> None:
    for key_dim, value_dim in itertools.product((1, 8, 16, 24, 32, 48, 64, 100, 256), repeat=2):
        for rule in (scan_tile, linear_scan_tile, prepare_tile, pairs_tile, token_tile):
            tile = rule(key_dim, value_dim, dtype)
            assert tile.block_k >= 64
            assert tile.block_v >= 64
