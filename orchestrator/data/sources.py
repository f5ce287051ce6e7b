"""Documents from source files, one at a time: Parquet rows, JSONL lines, whole .txt files.

Nothing is skipped: a row without text, a line that is no JSON and bytes that are no UTF-8 stop the
reading with the file and the place.
"""

import contextlib
import gzip
import io
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.data.corpus import SourceFile
from orchestrator.data.manifest import hash_file

PARQUET_BATCH_ROWS = 256
"""Rows decoded at once; larger batches read no faster and hold more text in memory."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text of a corpus.

    Attributes:
        text: the text, encodable as UTF-8.
        place: file and line or row, for messages.
        year: when it was given; None where the corpus does not say.
    """

    text: str
    place: str
    year: int | None = None


def check_embedded(file: SourceFile) -> None:
    """Refuse an embedded corpus that is not the one that was shipped.

    Raises:
        ValueError: the file's hash is not the recorded one.
    """
    if file.embedded is not None and hash_file(file.path) != file.embedded.sha256:
        raise ValueError(
            f"{file.path} is not the corpus that ships with this package (its sha256 differs); "
            "restore the file"
        )


def read_documents(file: SourceFile, text_field: str) -> Iterator[Document]:
    """The documents of one file, in order.

    Raises:
        ValueError: the file cannot be decoded, or a document has no text.
    """
    match file.kind:
        case "parquet":
            return _read_parquet(file.path, text_field)
        case "jsonl":
            return _read_jsonl(file, text_field)
        case _:
            return _read_txt(file.path)


def count_documents(file: SourceFile) -> int:
    """How many documents `read_documents` yields; Parquet answers from its footer."""
    match file.kind:
        case "parquet":
            with _open_parquet(file.path) as parquet:
                return int(parquet.metadata.num_rows)
        case "jsonl":
            return sum(1 for _ in _lines(file.path))
        case _:
            return 1


def _read_txt(path: Path) -> Iterator[Document]:
    yield Document(_decode(path.read_bytes(), str(path)), str(path))


def _read_parquet(path: Path, text_field: str) -> Iterator[Document]:
    with _open_parquet(path) as parquet:
        schema = parquet.schema_arrow
        if text_field not in schema.names:
            raise ValueError(
                f"data.text_field={text_field!r} is no column of {path}; it has "
                f"{', '.join(schema.names)}"
            )
        kind = schema.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise ValueError(
                f"data.text_field={text_field!r} of {path} holds {kind}; a column of strings is "
                "needed"
            )
        row = 0
        for batch in _parquet_batches(parquet, path, text_field):
            for text in batch:
                place = f"{path}, row {row}"
                if text is None:
                    raise ValueError(f"{place} has no {text_field}; remove the row")
                yield Document(text, place)
                row += 1


@contextlib.contextmanager
def _open_parquet(path: Path) -> Iterator[Any]:
    try:
        parquet = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {_line(error)}") from error
    with parquet:
        yield parquet


def _parquet_batches(parquet: Any, path: Path, text_field: str) -> Iterator[list[str | None]]:
    batches = parquet.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[text_field])
    while True:
        try:
            batch = next(batches, None)
            texts = None if batch is None else batch.column(0).to_pylist()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}: a text is not UTF-8: {error}") from error
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read as Parquet: {_line(error)}") from error
        if texts is None:
            return
        yield texts


def _read_jsonl(file: SourceFile, text_field: str) -> Iterator[Document]:
    for number, line in _lines(file.path):
        place = f"{file.path}, line {number}"
        try:
            value = json.loads(_decode(line, place))
        except json.JSONDecodeError as error:
            raise ValueError(f"{place} is not JSON: {error}") from error
        if not isinstance(value, dict) or not isinstance(value.get(text_field), str):
            raise ValueError(
                f"{place} must be an object whose data.text_field={text_field!r} is a string"
            )
        text = value[text_field]
        _check_encodable(text, place)
        yield Document(text, place, value["year"] if file.embedded is not None else None)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their numbers from 1."""
    with _open_stream(path) as stream:
        number = 0
        while True:
            try:
                line = stream.readline()
            except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
                raise ValueError(
                    f"{path} is damaged after line {number}: {_line(error)}"
                ) from error
            if not line:
                return
            number += 1
            if line.strip():
                yield number, line


def _open_stream(path: Path) -> IO[bytes]:
    match path.suffix:
        case ".xz":
            return cast(IO[bytes], lzma.open(path, "rb"))
        case ".gz":
            return cast(IO[bytes], gzip.open(path, "rb"))
        case ".zst":
            if not pa.Codec.is_available("zstd"):
                raise ValueError(f"{path} needs a pyarrow with zstd; use .jsonl, .xz or .gz")
            return io.BufferedReader(pa.input_stream(str(path), compression="zstd"))
        case _:
            return path.open("rb")


def _decode(data: bytes, place: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8: {error}") from error


def _check_encodable(text: str, place: str) -> None:
    """JSON may spell half of a surrogate pair, which no UTF-8 text can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has text that is no Unicode: {error}") from error


def _line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
