"""Documents from Parquet, JSONL and text files, and what stops their reading."""

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator.data.corpus import DataConfig, SourceFile, list_sources
from orchestrator.data.sources import count_documents, read_documents

TEXTS = ["plain", "", "ünïcode — ‘quotes’ 🙂", "two\nlines\r\n and\ttab", "</s> and <s>", "\x00nul"]


def source(path: Path) -> SourceFile:
    config = DataConfig(sources=[str(path)], split="last:0.1")
    return list_sources(config)[0]


def texts_of(path: Path, text_field: str = "text") -> list[str]:
    return [document.text for document in read_documents(source(path), text_field)]


def jsonl(texts: list[str]) -> bytes:
    # Both spellings of JSON, and blank lines as editors leave them.
    lines = [json.dumps({"text": text}, ensure_ascii=i % 2 == 0) for i, text in enumerate(texts)]
    return ("\n\n".join(lines) + "\n\n").encode()


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("a.jsonl", bytes),
        ("a.jsonl.xz", lzma.compress),
        ("a.jsonl.gz", gzip.compress),
        ("a.jsonl.zst", zstd),
    ],
    ids=["plain", "xz", "gz", "zst"],
)
def test_jsonl_gives_each_line_back(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / name
    path.write_bytes(compress(jsonl(TEXTS)))
    assert texts_of(path) == TEXTS
    assert count_documents(source(path)) == len(TEXTS)


def test_text_file_is_one_document_byte_for_byte(tmp_path: Path) -> None:
    text = "\ufeffline\r\nline\n"
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    assert texts_of(path) == [text]
    assert count_documents(source(path)) == 1


def test_parquet_reads_the_text_column_of_every_row_group(tmp_path: Path) -> None:
    texts = [f"document {i} {TEXTS[i % len(TEXTS)]}" for i in range(1_000)]
    path = tmp_path / "a.parquet"
    table = pa.table({"id": list(range(1_000)), "body": pa.array(texts, pa.large_string())})
    pq.write_table(table, path, row_group_size=300, compression="zstd")
    assert texts_of(path, "body") == texts
    assert count_documents(source(path)) == 1_000


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.array([1, 2]), "holds int64; a column of strings"),
        (pa.array(["one", None]), r"row 1 has no text"),
    ],
    ids=["numbers", "null"],
)
def test_parquet_without_text_names_the_place(
    tmp_path: Path, column: pa.Array, message: str
) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": column}), path)
    with pytest.raises(ValueError, match=message):
        texts_of(path)


def test_parquet_without_the_column_lists_those_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"content": ["x"], "id": ["y"]}), path)
    with pytest.raises(ValueError, match=r"data\.text_field='text' .* it has content, id"):
        texts_of(path)


def test_parquet_with_bytes_that_are_no_text_is_refused(tmp_path: Path) -> None:
    binary = pa.array([b"good", b"\xff\xfe bad"], pa.binary())
    path = tmp_path / "a.parquet"
    # A string column is not checked by the format: this is how broken writers leave it.
    strings = pa.Array.from_buffers(pa.string(), 2, binary.buffers())
    pq.write_table(pa.table({"text": strings}), path)
    with pytest.raises(ValueError, match=r"a\.parquet: a text is not UTF-8"):
        texts_of(path)


@pytest.mark.parametrize("keep", [0, 40, -1])
def test_truncated_parquet_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": TEXTS}), path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        texts_of(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "cut', "line 2 is not JSON"),
        (b'["text"]', "line 2 must be an object"),
        (b'{"body": "other"}', r"line 2 must be an object whose data\.text_field='text'"),
        (b'{"text": 7}', "line 2 must be an object"),
        (b'{"text": "\xff"}', "line 2 is not UTF-8"),
        (b'{"text": "\\ud800"}', "line 2 has text that is no Unicode"),
    ],
    ids=["cut", "array", "key", "number", "bytes", "surrogate"],
)
def test_bad_line_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(ValueError, match=message):
        texts_of(path)


@pytest.mark.parametrize(
    ("name", "compress"),
    [("a.jsonl.xz", lzma.compress), ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)],
    ids=["xz", "gz", "zst"],
)
def test_truncated_archive_is_refused(
    tmp_path: Path, name: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / name
    data = compress(jsonl([f"document {i}" for i in range(5_000)]))
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match="is damaged after line"):
        texts_of(path)


def test_text_file_that_is_no_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt is not UTF-8"):
        texts_of(path)
