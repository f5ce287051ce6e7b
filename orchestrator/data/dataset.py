"""A prepared folder, opened: token streams cut into windows, and batches by step.

Each split is one stream: the shards of a split in order, joined, so that windows cross shard
boundaries and do not depend on where shards were cut. Window `i` of length `T` holds the `T + 1`
tokens from `i · T` on; neighbours share one token, every token but the first is a target exactly
once, and the tokens left after the last whole window are never read (`Split.dropped_tokens`).

Files are mapped into memory once, when opened. Processes on one machine share the page cache, write
nothing and hold no lock, and the folder may be read-only. Pickling a data set sends its path.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orchestrator.data.manifest import digest, hash_file, read_manifest
from orchestrator.data.order import WindowIds, evaluation_windows, share, window_ids
from orchestrator.data.shards import ShardRecord, Tokens, damage, open_index, open_shard

TOKEN_BYTES_FILE = "token_bytes.npy"

Batch = tuple[NDArray[np.int64], NDArray[np.int64]]
"""Inputs and targets, `[W, T]` each, contiguous."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Split:
    """One side of a data set as a stream of tokens.

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
        num_windows = self.num_windows(seq_len)
        if len(ids) and (ids.min() < 0 or ids.max() >= num_windows):
            raise ValueError(
                f"window ids from {ids.min()} to {ids.max()} are not all between 0 and "
                f"{num_windows - 1}"
            )
        out = np.empty((len(ids), seq_len + 1), self.shards[0].dtype)
        for row, index in zip(out, ids.tolist(), strict=True):
            self._copy(index * seq_len, row)
        return out

    def batch(self, ids: WindowIds, seq_len: int) -> Batch:
        """Inputs and targets of these windows, `[len(ids), seq_len]` int64 each."""
        tokens = self.windows(ids, seq_len)
        return tokens[:, :-1].astype(np.int64), tokens[:, 1:].astype(np.int64)

    def _copy(self, start: int, out: Tokens) -> None:
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainingBatches:
    """The batches of a run, by step; holds no position, so resuming is asking for a later step.

    Attributes:
        split: what is read.
        data_seed: seed of the order.
        windows_per_step: windows of one optimizer step over all ranks.
        seq_len: T, tokens of a window.
    """

    split: Split
    data_seed: int
    windows_per_step: int
    seq_len: int

    def __post_init__(self) -> None:
        # Refuses a bad seed, length or batch before the first step.
        self.window_ids(0)

    @property
    def num_windows(self) -> int:
        """Windows of one epoch."""
        return self.split.num_windows(self.seq_len)

    def window_ids(self, step: int) -> WindowIds:
        """The windows of a step, `[windows_per_step]`."""
        return window_ids(self.data_seed, step, self.windows_per_step, self.num_windows)

    def batch(
        self,
        step: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        micro_step: int = 0,
        num_micro_steps: int = 1,
    ) -> Batch:
        """Inputs and targets `[W, T]` of one rank in one micro step of a step."""
        ids = share(
            self.window_ids(step),
            rank=rank,
            world_size=world_size,
            micro_step=micro_step,
            num_micro_steps=num_micro_steps,
        )
        return self.split.batch(ids, self.seq_len)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EvaluationSet:
    """The windows that judge every trial; independent of all seeds.

    Attributes:
        split: what is read.
        seq_len: T, tokens of a window.
        window_ids: `[W]`, ascending.
        eval_id: id of the set: of the data, the length and the windows; 16 hex digits.
    """

    split: Split
    seq_len: int
    window_ids: WindowIds
    eval_id: str

    def batches(self, windows_per_batch: int) -> Iterator[Batch]:
        """Inputs and targets of all windows in order; the last batch may be smaller.

        Raises:
            ValueError: `windows_per_batch` is below 1.
        """
        if windows_per_batch < 1:
            raise ValueError(f"{windows_per_batch=} must be at least 1")
        for first in range(0, len(self.window_ids), windows_per_batch):
            ids = self.window_ids[first : first + windows_per_batch]
            yield self.split.batch(ids, self.seq_len)


def evaluation_set(dataset: Dataset, seq_len: int, count: int | None = None) -> EvaluationSet:
    """`count` validation windows, spread evenly; every one for None.

    Raises:
        ValueError: a window longer than the validation part, or more windows than it has.
    """
    ids = evaluation_windows(dataset.val.num_windows(seq_len), count)
    eval_id = digest([dataset.data_id, dataset.val.name, seq_len, ids.tolist()])[:16]
    return EvaluationSet(split=dataset.val, seq_len=seq_len, window_ids=ids, eval_id=eval_id)


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
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error
    if counts.shape != (vocab_size,) or counts.dtype != np.uint32:
        raise ValueError(
            f"{path} has shape {counts.shape} and type {counts.dtype} instead of ({vocab_size},) "
            "and uint32; prepare the data set again"
        )
    counts.flags.writeable = False
    return np.asarray(counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """What hashing a prepared folder found.

    Attributes:
        folder: what was hashed.
        data_id: its id.
        num_files: files that were looked at.
        num_bytes: their bytes, as the manifest has them.
        problems: one sentence for each file that is not what was written; empty if all are.
    """

    folder: Path
    data_id: str
    num_files: int
    num_bytes: int
    problems: tuple[str, ...]


def verify(folder: Path) -> Verification:
    """Hash every file of a prepared folder against its manifest.

    Raises:
        ValueError: no manifest, or an altered one.
    """
    folder = Path(folder).absolute()
    manifest = read_manifest(folder)
    records = [*shard_records(manifest, "train"), *shard_records(manifest, "val")]
    problems = [problem for record in records for problem in damage(folder, record)]
    hashed = manifest["content"]["files"]
    for name, sha256 in hashed.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{path} is missing")
        elif hash_file(path) != sha256:
            problems.append(f"{path} has been altered: its sha256 is not the manifest's")
    return Verification(
        folder=folder,
        data_id=manifest["data_id"],
        num_files=2 * len(records) + len(hashed),
        num_bytes=sum(record.bytes + record.index_bytes for record in records),
        problems=tuple(problems),
    )


def info(folder: Path, seq_len: int | None = None) -> dict[str, Any]:
    """What there is to know of a prepared folder, as plain values.

    Args:
        folder: the prepared folder.
        seq_len: adds `windows` and `dropped_tokens` of windows of this length to each split.

    Raises:
        ValueError: what `open_dataset` raises, or a split shorter than a window.
    """
    dataset = open_dataset(folder)
    content = dataset.manifest["content"]
    splits: dict[str, dict[str, Any]] = {}
    for split in (dataset.train, dataset.val):
        splits[split.name] = {
            "documents": split.num_documents,
            "tokens": split.num_tokens,
            "text_bytes": split.text_bytes,
            "bytes_per_token": split.text_bytes / split.num_tokens,
            "shards": len(split.shards),
        }
        if seq_len is not None:
            splits[split.name]["windows"] = split.num_windows(seq_len)
            splits[split.name]["dropped_tokens"] = split.dropped_tokens(seq_len)
    return {
        "folder": str(dataset.folder),
        "data_id": dataset.data_id,
        "name": dataset.manifest["made"]["settings"]["name"],
        "tokenizer": content["tokenizer"],
        "settings": content["settings"],
        "sources": content["sources"],
        "unigram_loss_nats": dataset.unigram_loss_nats,
        "splits": splits,
    }
