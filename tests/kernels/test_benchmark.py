"""What the benchmark prints beside what it measured, and shapes written by a person."""

import pytest

from kernels.benchmark import BenchmarkRow, floor_milliseconds, table
from kernels.benchmark_decode import DecodeRow
from kernels.benchmark_decode import table as decode_table
from kernels.benchmark_ops import BenchmarkShape

SHAPE = BenchmarkShape(8, 4096, 8, 8, 128, 128)


def row(impl: str, milliseconds: float | None, device: float | None) -> BenchmarkRow:
    memory = None if milliseconds is None else 2**20
    times = (milliseconds, milliseconds, milliseconds, device)
    return BenchmarkRow("delta_rule", SHAPE, impl, "forward", 4e-3, *times, memory, 0.5)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[5:-1]]


def test_times_stand_beside_those_of_fla_for_the_call_and_for_its_kernels() -> None:
    ours, fla = table([row("triton", 1.0, 0.5), row("fla", 2.5, 2.0)]).splitlines()[2:]
    assert cells(ours) == ["1.000", "1.000–1.000", "0.500", "2.0", "2.50", "4.00", "1", "4.0e-03"]
    assert cells(fla)[4:6] == ["1.00", "1.00"]


def test_without_fla_there_is_no_ratio_and_wrong_kernels_have_no_time() -> None:
    alone, off = table([row("triton", 1.0, 0.5), row("chunked", None, None)]).splitlines()[2:]
    assert cells(alone)[4:6] == ["", ""]
    assert cells(off) == ["off", "", "", "", "", "", "", "4.0e-03"]


def test_every_line_of_a_table_has_as_many_cells() -> None:
    decoded = DecodeRow("delta_rule", 64, 8, 128, 0.1, 0.03, 0.02, 0.016)
    rows = [row("triton", 1.0, 0.5), row("fla", None, None)]
    for text in (table(rows), decode_table([decoded])):
        assert len({line.count("|") for line in text.splitlines()}) == 1


def test_decoding_is_held_against_the_traffic_of_its_memory_by_its_kernels() -> None:
    decoded = DecodeRow("delta_rule", 64, 8, 128, 0.1, 0.03, 0.024, 0.016)
    assert decoded.as_fields()["floor_ratio"] == pytest.approx(1.5)
    assert "| 100.0 | 30.0 | 24.0 | 1.50 |" in decode_table([decoded])


def test_the_floor_counts_each_input_and_output_once() -> None:
    tokens, bytes_each = 8 * 4096, 2 * (2 * 8 * 128 + 2 * 8 * 128) + 2 * 8
    floor = floor_milliseconds("delta_rule", SHAPE, "forward")
    assert floor == pytest.approx(tokens * bytes_each / 4.26e12 * 1e3)


def test_a_shape_is_read_as_it_is_written() -> None:
    assert BenchmarkShape.parse("8x4096x4x8x64x32") == BenchmarkShape(8, 4096, 4, 8, 64, 32)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("8x4096", "shape '8x4096' is not of the form BxTxHxHVxKxV"),
        ("8x4096x8x8x128x0", "is not of the form"),
        ("8x4096x8x8x128x-1", "is not of the form"),
        ("8x4096x3x8x64x64", "shape.HV=8 that is no multiple of shape.H=3"),
    ],
)
def test_other_texts_are_no_shape(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        BenchmarkShape.parse(text)
