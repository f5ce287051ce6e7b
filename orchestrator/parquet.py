"""Parquet files of records: a schema from a record's fields, rows in, rows out.

Apart from `ledger`, since loading pyarrow takes longer than reading thousands of journals.
"""

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pyarrow as pa
import pyarrow.parquet as pq

ARROW_TYPES = {str: pa.string(), int: pa.int64(), float: pa.float64(), bool: pa.bool_()}
"""Column types of a record's fields, which may also be null."""


def _schema(cls: type[Any]) -> pa.Schema:
    hints = get_type_hints(cls)
    columns = []
    for item in fields(cls):
        hint = hints[item.name]
        plain = next((arg for arg in get_args(hint) if arg is not type(None)), hint)
        columns.append(pa.field(item.name, ARROW_TYPES[plain]))
    return pa.schema(columns)


def write_rows(path: Path, rows: list[dict[str, Any]], cls: type[Any]) -> None:
    """Write rows of a record class to a file in one rename, so that no reader sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    pq.write_table(pa.Table.from_pylist(rows, schema=_schema(cls)), partial)
    partial.replace(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a Parquet file; none where there is no file."""
    return list(pq.read_table(path).to_pylist()) if path.is_file() else []
