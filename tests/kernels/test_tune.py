"""The search for tiles: what counts as faster, what is out, and that nothing stays changed."""

from collections.abc import Callable

import pytest
import torch
from triton.runtime.errors import OutOfResources

from kernels import channel_delta_plan, tiles
from kernels.benchmark import OPS
from kernels.benchmark_ops import BenchmarkShape
from kernels.tiles import Tile
from kernels.tune import Part, TuneRow, entries, parts, tune

SHAPE = BenchmarkShape(8, 4096, 8, 8, 128, 128)
BF16 = torch.bfloat16


def scan() -> Tile:
    return tiles.linear_scan_tile(128, 128, BF16)


def search(milliseconds: Callable[[], float], error: Callable[[], float]) -> list[TuneRow]:
    return list(tune("linear_attention", SHAPE, milliseconds=milliseconds, error=error))


@pytest.mark.parametrize("op", OPS)
def test_every_part_has_other_cuts_and_no_known_fault(op: str) -> None:
    for part in parts(op, SHAPE):
        assert part.candidates
        assert part.present not in part.candidates
        assert len(set(part.candidates)) == len(part.candidates)


@pytest.mark.parametrize("op", OPS)
def test_the_cut_that_is_tried_is_the_one_that_is_launched(op: str) -> None:
    def launched(part: Part) -> object:
        if part.table is channel_delta_plan.MEASURED:
            return channel_delta_plan.tiles(BF16, 128, 128)
        return getattr(tiles, f"{part.name}_tile")(128, 128, BF16)

    for part in parts(op, SHAPE):
        with part.cut_by(part.candidates[0]):
            assert launched(part) == part.candidates[0]
        assert launched(part) == part.present
        assert part.key not in part.table


def test_a_cut_of_one_head_dim_leaves_others_alone() -> None:
    (part,) = parts("linear_attention", SHAPE)
    before = tiles.linear_scan_tile(64, 64, BF16), tiles.scan_tile(128, 128, BF16)
    with part.cut_by(Tile(128, 128, 8, 1)):
        assert (tiles.linear_scan_tile(64, 64, BF16), tiles.scan_tile(128, 128, BF16)) == before


def test_the_fastest_cut_becomes_an_entry_with_both_times() -> None:
    rows = search(lambda: 0.5 + scan().stages / 10 + scan().warps / 100, lambda: 1e-3)
    assert rows[0].outcome == "present"
    assert rows[0].milliseconds == pytest.approx(0.84)
    comment, line = entries(rows)
    assert comment.startswith("# 0.640 ms, 0.840 before: linear_attention 8x4096 H8 D128")
    table = eval(f"{{{line}}}", {"Tile": Tile, "torch": torch})
    ((key, cut),) = table.items()
    assert key == ("linear_scan", 128, 128, BF16)
    assert (cut.warps, cut.stages) == (4, 1)


def test_a_gain_within_the_noise_of_the_present_cut_is_none() -> None:
    seconds = iter((1.00, 0.95))
    rows = search(lambda: next(seconds, 0.91), lambda: 1e-3)
    assert {row.outcome for row in rows[1:]} == {"no faster"}
    assert entries(rows) == []


def test_wrong_numbers_and_cuts_that_do_not_fit_are_out() -> None:
    def time() -> float:
        if scan().stages == 4:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return 1.0 / scan().warps

    rows = search(time, lambda: 0.3 if scan().warps == 8 else 1e-3)
    by_cut = {row.cut: row for row in rows}
    assert by_cut[Tile(128, 64, 8, 2)].outcome == "off by 3.0e-01"
    assert by_cut[Tile(128, 64, 4, 4)].outcome.startswith("too much of the GPU: out of resource")
    assert all(row.milliseconds is None for row in rows if row.cut.warps == 8)
    assert entries(rows) == []
    assert not tiles.MEASURED.keys() & {("linear_scan", 128, 128, BF16)}


def test_kernels_that_are_wrong_as_they_are_are_not_searched() -> None:
    (row,) = search(lambda: 1.0, lambda: float("nan"))
    assert row.outcome == "off by nan"
    assert row.as_fields()["milliseconds"] is None


def test_an_unknown_op_and_a_missing_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="op 'delta' is none of linear_attention"):
        list(tune("delta", SHAPE))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="searched on a CUDA device, and there is none"):
        list(tune("delta_rule", SHAPE))
