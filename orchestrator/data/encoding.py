"""Documents of a corpus, split into two sides, encoded into shards."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from orchestrator.data.corpus import DataConfig, SourceFile, SplitRule
from orchestrator.data.shards import (
    TOKEN_DTYPES,
    ShardRecord,
    ShardWriter,
    Tokens,
    token_version,
)
from orchestrator.data.sources import Document, count_documents, read_documents
from orchestrator.data.tokenize import Tokenizer

SPLITS = ("train", "val")

BATCH_DOCUMENTS = 1_024
BATCH_CHARACTERS = 4_000_000
"""Text encoded in one call: enough to keep every thread busy, little beside a shard."""


@dataclass(frozen=True, slots=True)
class SidedDocument:
    """A document and where it belongs.

    Attributes:
        split: `train` or `val`.
        file: position of its file among the corpus's.
        document: the document.
    """

    split: str
    file: int
    document: Document


@dataclass(frozen=True, slots=True)
class Corpus:
    """The source files of a data set under its split rule.

    Attributes:
        config: the data set.
        files: its files, in reading order.
        first_validation: position of the first validating document under a `last` split; None
            under `year`.
    """

    config: DataConfig
    files: list[SourceFile]
    first_validation: int | None

    @classmethod
    def open(cls, config: DataConfig, files: list[SourceFile]) -> "Corpus":
        """The corpus; a `last` split counts its documents.

        Raises:
            ValueError: a file that cannot be read, or a split that leaves no training document.
        """
        rule = SplitRule.parse(config.split)
        if rule.kind != "last":
            return cls(config, files, None)
        total = sum(count_documents(file) for file in files)
        first = rule.first_validation(total)
        if first < 1:
            raise ValueError(
                f"data.split={config.split!r} leaves none of the {total} documents in data.sources "
                "to train on; add documents"
            )
        return cls(config, files, first)

    def documents(self) -> Iterator[SidedDocument]:
        """Every document, in order.

        Raises:
            ValueError: a file that cannot be decoded, or a document without text or year.
        """
        rule = SplitRule.parse(self.config.split)
        position = 0
        for number, file in enumerate(self.files):
            for document in read_documents(file, self.config.text_field):
                if self.first_validation is not None:
                    validates = position >= self.first_validation
                elif document.year is not None:
                    validates = document.year >= rule.threshold
                else:
                    raise ValueError(
                        f"{document.place} has no year, which data.split={self.config.split!r} "
                        "needs"
                    )
                yield SidedDocument(SPLITS[validates], number, document)
                position += 1

    def training_texts(self) -> Iterator[str]:
        """Texts of the training side, in order."""
        for sided in self.documents():
            if sided.split == "train":
                yield sided.document.text


@dataclass(kw_only=True, slots=True)
class ShardEncoder:
    """Writes what is missing of a corpus's shards.

    Attributes:
        corpus: what to encode.
        tokenizer: what encodes.
        folder: where the shards go.
        records: shards of each split that are there already; finished ones are added.
        shard_tokens: most tokens of a shard.
        on_shard: called with the split and record of each shard as soon as it is whole.
        on_progress: called now and then with documents read and tokens written so far.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    folder: Path
    records: dict[str, list[ShardRecord]]
    shard_tokens: int
    on_shard: Callable[[str, ShardRecord], None]
    on_progress: Callable[[int, int], None]
    _writers: dict[str, ShardWriter] = field(init=False)
    _num_tokens: int = field(init=False, default=0)

    def run(self) -> list[int]:
        """Encode every document that no shard holds yet; returns the documents of each file.

        Raises:
            ValueError: what `Corpus.documents` raises, a side without text, a document longer than
                a shard, or one that the tokenizer does not give back.
        """
        version = token_version(self.tokenizer.vocab_size)
        self._writers = {
            split: ShardWriter(
                self.folder, split, version, self.shard_tokens, len(self.records[split])
            )
            for split in SPLITS
        }
        try:
            per_file = self._encode_all()
            for split in SPLITS:
                self._note(split, self._writers[split].close())
        finally:
            for writer in self._writers.values():
                writer.abandon()
        for split in SPLITS:
            if sum(record.tokens for record in self.records[split]) < 2:
                raise ValueError(
                    f"data.split={self.corpus.config.split!r} leaves fewer than 2 tokens in the "
                    f"{split} part; add documents or move the split"
                )
        return per_file

    def _encode_all(self) -> list[int]:
        covered = {
            split: sum(record.documents for record in self.records[split]) for split in SPLITS
        }
        self._num_tokens = sum(r.tokens for records in self.records.values() for r in records)
        seen = dict.fromkeys(SPLITS, 0)
        per_file = [0] * len(self.corpus.files)
        batch: list[SidedDocument] = []
        characters = 0
        for sided in self.corpus.documents():
            per_file[sided.file] += 1
            seen[sided.split] += 1
            if seen[sided.split] <= covered[sided.split]:
                continue
            batch.append(sided)
            characters += len(sided.document.text)
            if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
                self._write(batch)
                self.on_progress(sum(per_file), self._num_tokens)
                batch, characters = [], 0
        self._write(batch)
        self.on_progress(sum(per_file), self._num_tokens)
        return per_file

    def _write(self, batch: list[SidedDocument]) -> None:
        if not batch:
            return
        dtype = TOKEN_DTYPES[token_version(self.tokenizer.vocab_size)]
        start = [] if self.tokenizer.start_id is None else [self.tokenizer.start_id]
        end = [] if self.tokenizer.end_id is None else [self.tokenizer.end_id]
        encoded = self.tokenizer.encode([sided.document.text for sided in batch])
        for sided, ids in zip(batch, encoded, strict=True):
            tokens: Tokens = np.array([*start, *ids, *end], dtype)
            text_bytes = len(sided.document.text.encode())
            token_bytes = int(self.tokenizer.token_bytes[tokens].sum(dtype=np.int64))
            if not 0 <= token_bytes - text_bytes <= self.tokenizer.prefix_bytes:
                raise ValueError(
                    f"data.tokenizer={self.corpus.config.tokenizer!r} does not give back "
                    f"{sided.document.place}: its tokens stand for {token_bytes} bytes, its text "
                    f"has {text_bytes}; use a tokenizer that does not normalise text"
                )
            try:
                ended = self._writers[sided.split].add(tokens, text_bytes, token_bytes)
            except ValueError as error:
                raise ValueError(f"{sided.document.place}: {error}") from error
            self._num_tokens += len(tokens)
            self._note(sided.split, ended)

    def _note(self, split: str, record: ShardRecord | None) -> None:
        if record is not None:
            self.records[split].append(record)
            self.on_shard(split, record)
