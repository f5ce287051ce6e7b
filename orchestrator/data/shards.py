"""Token files: `.bin` shards of tokens, each with an `.idx` of where its documents end.

    train-00000.bin   256 little-endian int32 (magic, version, number of tokens, zeros), then tokens
    train-00000.idx   one little-endian uint64 per document: its end, in tokens of this shard

Version 1 holds uint16 tokens and is llm.c's format to the byte, which modded-nanogpt reads as well;
version 2, which is ours, holds uint32 tokens for vocabularies above 65,536. A document never spans
two shards. Boundaries stand in the index alone: no reader has to guess them from token ids.
"""

import hashlib
import os
from array import array
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.data.manifest import hash_file

MAGIC = 20240520
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
INDEX_BYTES = 8

TOKEN_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("<u2"), 2: np.dtype("<u4")}
"""Token type by version."""

SHARD_TOKENS = 100_000_000
"""Largest shard: 200 MB of uint16, as llm.c and modded-nanogpt cut theirs."""

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


def token_version(vocab_size: int) -> int:
    """The version whose tokens are just wide enough for this vocabulary."""
    return 1 if vocab_size <= 2**16 else 2


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """What the manifest says of one shard.

    Attributes:
        file: name of the `.bin`; the `.idx` has the same stem.
        bytes: size of the `.bin`.
        tokens: tokens in it.
        documents: documents in it.
        text_bytes: UTF-8 bytes of their text.
        token_bytes: sum of the bytes that the tokens stand for.
        sha256: of the `.bin`.
        index_sha256: of the `.idx`.
    """

    file: str
    bytes: int
    tokens: int
    documents: int
    text_bytes: int
    token_bytes: int
    sha256: str
    index_sha256: str

    @property
    def index_file(self) -> str:
        """Name of the `.idx`."""
        return self.file.removesuffix(".bin") + ".idx"

    @property
    def index_bytes(self) -> int:
        """Size of the `.idx`."""
        return INDEX_BYTES * self.documents

    def as_dict(self) -> dict[str, Any]:
        """The record as plain values."""
        return asdict(self)


def header(version: int, num_tokens: int) -> bytes:
    """The first 1,024 bytes of a `.bin`."""
    values = np.zeros(HEADER_INTS, "<i4")
    values[:3] = MAGIC, version, num_tokens
    return values.tobytes()


class ShardWriter:
    """Writes the shards of one split, documents in order; each appears whole or not at all.

    A shard is cut before the document that would make it longer than `shard_tokens`, so that where
    it ends depends on the documents alone, never on where a writing was interrupted.

    Args:
        folder: where the shards go.
        split: first part of their names.
        version: token type, a key of `TOKEN_DTYPES`.
        shard_tokens: most tokens of one shard.
        first_shard: number of the first one to write.
    """

    def __init__(
        self, folder: Path, split: str, version: int, shard_tokens: int, first_shard: int = 0
    ) -> None:
        self._folder = folder
        self._split = split
        self._version = version
        self._shard_tokens = shard_tokens
        self._number = first_shard
        self._shard: _OpenShard | None = None

    def add(self, ids: Tokens, text_bytes: int, token_bytes: int) -> ShardRecord | None:
        """Append one document; returns the shard that ended before it, if one did.

        Raises:
            ValueError: the document alone is longer than a shard.
        """
        if len(ids) > self._shard_tokens:
            raise ValueError(
                f"a document of {len(ids)} tokens is longer than a shard of {self._shard_tokens}; "
                "split it into several documents"
            )
        ended = None
        if self._shard is not None and self._shard.num_tokens + len(ids) > self._shard_tokens:
            ended = self.close()
        if self._shard is None:
            stem = f"{self._split}-{self._number:05d}"
            self._shard = _OpenShard(self._folder / stem, self._version)
        self._shard.add(ids, text_bytes, token_bytes)
        return ended

    def close(self) -> ShardRecord | None:
        """End the current shard; None if it holds no document."""
        if self._shard is None:
            return None
        record = self._shard.finish()
        self._shard = None
        self._number += 1
        return record

    def abandon(self) -> None:
        """Drop the current shard, as after an error."""
        if self._shard is not None:
            self._shard.stream.close()
            self._shard = None


class _OpenShard:
    """A shard under a temporary name, its header not written yet."""

    def __init__(self, stem: Path, version: int) -> None:
        self.stem = stem
        self.version = version
        self.num_tokens = 0
        self.ends = array("Q")
        self.text_bytes = 0
        self.token_bytes = 0
        self.stream = _temporary(stem.with_suffix(".bin")).open("wb")
        self.stream.write(header(version, 0))

    def add(self, ids: Tokens, text_bytes: int, token_bytes: int) -> None:
        self.stream.write(ids.astype(TOKEN_DTYPES[self.version], copy=False).tobytes())
        self.num_tokens += len(ids)
        self.ends.append(self.num_tokens)
        self.text_bytes += text_bytes
        self.token_bytes += token_bytes

    def finish(self) -> ShardRecord:
        shard, index = self.stem.with_suffix(".bin"), self.stem.with_suffix(".idx")
        self.stream.seek(0)
        self.stream.write(header(self.version, self.num_tokens))
        _sync(self.stream)
        self.stream.close()
        index_data = np.array(self.ends, "<u8").tobytes()
        write_file(index, index_data)
        sha256 = hash_file(_temporary(shard))
        _temporary(shard).replace(shard)
        sync_folder(shard.parent)
        return ShardRecord(
            file=shard.name,
            bytes=shard.stat().st_size,
            tokens=self.num_tokens,
            documents=len(self.ends),
            text_bytes=self.text_bytes,
            token_bytes=self.token_bytes,
            sha256=sha256,
            index_sha256=hashlib.sha256(index_data).hexdigest(),
        )


def write_file(path: Path, data: bytes) -> None:
    """Write a file that appears whole or not at all: temporary name, fsync, rename."""
    temporary = _temporary(path)
    with temporary.open("wb") as stream:
        stream.write(data)
        _sync(stream)
    temporary.replace(path)


def sync_folder(folder: Path) -> None:
    """Make the renames inside a folder last through a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_shard(folder: Path, record: ShardRecord, vocab_size: int) -> Tokens:
    """The tokens of a shard as a read-only memory map, its size and header checked.

    Raises:
        ValueError: a missing file, a wrong size, or a header that is not the manifest's.
    """
    version = token_version(vocab_size)
    dtype = TOKEN_DTYPES[version]
    path = folder / record.file
    _check_size(path, record.bytes)
    if record.bytes != HEADER_BYTES + dtype.itemsize * record.tokens:
        raise ValueError(
            f"{path} should hold {record.tokens} tokens of {dtype.itemsize} bytes, and the "
            f"manifest gives it {record.bytes} bytes"
        )
    with path.open("rb") as stream:
        found = stream.read(HEADER_BYTES)
    if found != header(version, record.tokens):
        magic, number, count = np.frombuffer(found, "<i4")[:3].tolist()
        raise ValueError(
            f"{path} has the header magic={magic}, version={number}, tokens={count} instead of "
            f"{MAGIC}, {version}, {record.tokens}; prepare the data set again"
        )
    if record.tokens == 0:
        return np.zeros(0, dtype)
    # As a plain array: every slice of a `memmap` object runs Python code.
    return np.asarray(np.memmap(path, dtype, "r", offset=HEADER_BYTES, shape=(record.tokens,)))


def open_index(folder: Path, record: ShardRecord) -> NDArray[np.uint64]:
    """Where each document of a shard ends, in tokens, as a read-only memory map.

    Raises:
        ValueError: a missing file, a wrong size, or ends that do not reach the last token.
    """
    path = folder / record.index_file
    _check_size(path, record.index_bytes)
    ends: NDArray[np.uint64] = np.memmap(path, "<u8", "r", shape=(record.documents,))
    if int(ends[-1]) != record.tokens:
        raise ValueError(
            f"{path} ends at token {int(ends[-1])} of {record.tokens}; prepare the data set again"
        )
    return ends


def damage(folder: Path, record: ShardRecord) -> list[str]:
    """What is wrong with a shard's two files, by size and hash; empty if nothing is."""
    found = []
    for name, size, sha256 in (
        (record.file, record.bytes, record.sha256),
        (record.index_file, record.index_bytes, record.index_sha256),
    ):
        path = folder / name
        try:
            _check_size(path, size)
        except ValueError as error:
            found.append(str(error))
            continue
        if hash_file(path) != sha256:
            found.append(f"{path} has been altered: its sha256 is not the manifest's")
    return found


def _check_size(path: Path, size: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    if found != size:
        raise ValueError(
            f"{path} has {found} bytes instead of {size}: it is truncated or not the file that was "
            "written; prepare the data set again"
        )


def _temporary(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _sync(stream: IO[bytes]) -> None:
    stream.flush()
    os.fsync(stream.fileno())
