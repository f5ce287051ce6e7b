"""A prepared folder, opened: two token streams, cut into windows.

Each split is one stream: the shards of a split in order, joined, so that windows cross shard
boundaries and do not depend on where shards were cut. Window `i` of length `T` holds the `T + 1`
tokens from `i · T` on; neighbours share one token, every token but the first is a target exactly
once, and the tokens left after the last whole window are never read (`Split.dropped_tokens`).

Files are mapped into memory once, when opened. Processes on one machine share the page cache, write
nothing and hold no lock, and the folder may be read-only. Pickling a data set sends its path.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.data.manifest import read_manifest
from orchestrator.data.order import WindowIds
from orchestrator.data.shards import ShardRecord, Tokens, open_index, open_shard

TOKEN_BYTES_FILE = "token_bytes.npy"


class Batch(NamedTuple):
    """Windows to read at once.

    Attributes:
        inputs: `[W, T]`, contiguous.
        targets: the token after each input, `[W, T]`, contiguous.
        bounds: the parts that the windows are read as, as `DocumentRule.bounds` gives them; None
            where every window is one.
        counted: `[W, T]`, the targets that count in losses; None for all.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    bounds: NDArray[np.int64] | None = None
    counted: NDArray[np.bool_] | None = None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """One side of a data set as a stream of tokens; windows cross the ends of documents.

    Attributes:
        name: `train` or `val`.
        shards: memory-mapped tokens of each shard.
        indices: memory-mapped document ends of each shard, in tokens of that shard.
        num_tokens: tokens of all shards.
        num_documents: documents of all shards.
        text_bytes: UTF-8 bytes of the documents' text.
    """

    name: str
    shards: tuple[Tokens, ...] = field(repr=False)
    indices: tuple[NDArray[np.uint64], ...] = field(repr=False)
    num_tokens: int
    num_documents: int
    text_bytes: int
    _starts: tuple[int, ...] = field(repr=False)

    def num_windows(self, seq_len: int) -> int:
        """Whole windows of `seq_len` targets.

        Raises:
            ValueError: the split is too short for a single one, or `seq_len` is below 1.
        """
        if seq_len < 1:
            raise ValueError(f"{seq_len=} must be at least 1")
        if self.num_tokens < seq_len + 1:
            raise ValueError(
                f"seq_len={seq_len} needs {seq_len + 1} tokens, and the {self.name} part has "
                f"{self.num_tokens}; shorten seq_len or add text"
            )
        return (self.num_tokens - 1) // seq_len

    def dropped_tokens(self, seq_len: int) -> int:
        """Tokens after the last whole window, which no window reads as a target."""
        return self.num_tokens - 1 - self.num_windows(seq_len) * seq_len

    def document_ends(self) -> NDArray[np.uint64]:
        """Where each document ends, in tokens of the stream, ascending; `[num_documents]`."""
        shifted = [
            ends + np.uint64(start) for ends, start in zip(self.indices, self._starts, strict=True)
        ]
        return np.concatenate(shifted)

    def tokens(self, start: int, count: int) -> Tokens:
        """`count` tokens of the stream from `start` on, copied.

        Raises:
            ValueError: a range that leaves the stream.
        """
        if start < 0 or count < 0 or start + count > self.num_tokens:
            raise ValueError(
                f"tokens {start} to {start + count} are not inside the {self.name} part of "
                f"{self.num_tokens} tokens"
            )
        out = np.empty(count, self.shards[0].dtype)
        self._copy(start, out)
        return out

    def windows(self, ids: WindowIds, seq_len: int) -> Tokens:
        """The windows of these ids, `[len(ids), seq_len + 1]`, in the type they are stored in.

        Raises:
            ValueError: an id that the split does not have.
        """
        self._check_ids(ids, seq_len)
        out = np.empty((len(ids), seq_len + 1), self.shards[0].dtype)
        for row, index in zip(out, ids.tolist(), strict=True):
            self._copy(index * seq_len, row)
        return out

    def batch(self, ids: WindowIds, seq_len: int) -> Batch:
        """Inputs and targets of these windows, `[len(ids), seq_len]` int64 each.

        Raises:
            ValueError: an id that the split does not have.
        """
        self._check_ids(ids, seq_len)
        # One block, widened straight from the map. Casting twice from a narrow copy took four times
        # as long (440 µs for 8 windows of 4,096 on a busy x86 core), most of it in page faults.
        inputs, targets = np.empty((2, len(ids), seq_len), np.int64)
        for row, index in enumerate(ids.tolist()):
            self._copy(index * seq_len, inputs[row])
            self._copy(index * seq_len + 1, targets[row])
        return Batch(inputs, targets)

    def _check_ids(self, ids: WindowIds, seq_len: int) -> None:
        num_windows = self.num_windows(seq_len)
        if len(ids) and (ids.min() < 0 or ids.max() >= num_windows):
            raise ValueError(
                f"window ids from {ids.min()} to {ids.max()} are not all between 0 and "
                f"{num_windows - 1}"
            )

    def _copy(self, start: int, out: NDArray[Any]) -> None:
        shard = bisect_right(self._starts, start) - 1
        done = 0
        while done < len(out):
            offset = start + done - self._starts[shard]
            part = self.shards[shard][offset : offset + len(out) - done]
            out[done : done + len(part)] = part
            done += len(part)
            shard += 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dataset:
    """A tokenised data set, ready to be read.

    Attributes:
        folder: where it lies.
        data_id: id of its content, 64 hex digits.
        manifest: what `manifest.json` says; not to be changed.
        vocab_size: entries of the vocabulary.
        train: the part to train on.
        val: the part to validate on; shares no document with `train`.
        token_bytes: `[vocab_size]` uint32, UTF-8 bytes of text that each token stands for, 0 for
            special tokens.
        unigram_loss_nats: cross-entropy of the validation tokens under the training tokens'
            frequencies, each count raised by 0.5: what a model scores that ignores context.
    """

    folder: Path
    data_id: str
    manifest: dict[str, Any] = field(repr=False)
    vocab_size: int
    train: Split
    val: Split
    token_bytes: NDArray[np.uint32] = field(repr=False)
    unigram_loss_nats: float

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would send every token of the memory maps.
        return open_dataset, (self.folder,)

    def target_bytes(self, targets: NDArray[np.int64]) -> int:
        """UTF-8 bytes of text that these targets stand for, of any shape.

        A summed loss in nats, divided by this and by ln 2, is bits per byte; targets that are
        special tokens add loss and no bytes.
        """
        return int(self.token_bytes[targets].sum(dtype=np.int64))


def open_dataset(folder: Path) -> Dataset:
    """Open a prepared folder; sizes, headers and ids are checked, contents are not hashed.

    Raises:
        ValueError: no manifest or an altered one, or a file that is missing, has another size or
            another header than the manifest says.
    """
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    content = manifest["content"]
    vocab_size = content["tokenizer"]["vocab_size"]
    return Dataset(
        folder=folder,
        data_id=manifest["data_id"],
        manifest=manifest,
        vocab_size=vocab_size,
        train=_open_split(folder, "train", manifest),
        val=_open_split(folder, "val", manifest),
        token_bytes=_open_token_bytes(folder, vocab_size),
        unigram_loss_nats=manifest["derived"]["unigram_loss_nats"],
    )


def shard_records(manifest: dict[str, Any], split: str) -> list[ShardRecord]:
    """What a manifest says of the shards of `train` or `val`."""
    return [ShardRecord(**values) for values in manifest["content"]["splits"][split]["shards"]]


def _open_split(folder: Path, name: str, manifest: dict[str, Any]) -> Split:
    records = shard_records(manifest, name)
    vocab_size = manifest["content"]["tokenizer"]["vocab_size"]
    sizes = [record.tokens for record in records]
    return Split(
        name=name,
        shards=tuple(open_shard(folder, record, vocab_size) for record in records),
        indices=tuple(open_index(folder, record) for record in records),
        num_tokens=sum(sizes),
        num_documents=sum(record.documents for record in records),
        text_bytes=sum(record.text_bytes for record in records),
        _starts=tuple(sum(sizes[:shard]) for shard in range(len(sizes))),
    )


def _open_token_bytes(folder: Path, vocab_size: int) -> NDArray[np.uint32]:
    path = folder / TOKEN_BYTES_FILE
    try:
        counts = np.load(path, allow_pickle=False)
    except (OSError, EOFError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if counts.shape != (vocab_size,) or counts.dtype != np.uint32:
        raise ValueError(
            f"{path} has shape {counts.shape} and type {counts.dtype} instead of ({vocab_size},) "
            "and uint32; prepare the data set again"
        )
    counts.flags.writeable = False
    return np.asarray(counts)
