"""From text to a prepared folder: tokenizer, shards, manifest; interruptible at any point.

    hash sources → count documents (for a `last` split) → train the tokenizer on the training part
    → encode documents into shards → manifest → one rename

All of it happens in `<root>/data/NAME-BUILD.partial/`, under a lock that a second process waits
for. A journal beside it notes each finished shard. After an interruption the next `prepare` of the
same configuration and sources keeps the shards that are noted and whole, encodes the rest, and ends
with the same bytes as an undisturbed one.
"""

import io
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from orchestrator.data.corpus import DataConfig, SourceFile, list_sources
from orchestrator.data.dataset import TOKEN_BYTES_FILE, verify
from orchestrator.data.encoding import SPLITS, Corpus, ShardEncoder
from orchestrator.data.journal import Journal, exclusive_journal
from orchestrator.data.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    digest,
    folder_name,
    hash_file,
    locate_exact,
    manifest_text,
    read_manifest,
    settings,
)
from orchestrator.data.shards import (
    SHARD_TOKENS,
    TOKEN_DTYPES,
    ShardRecord,
    damage,
    open_shard,
    sync_folder,
    token_version,
    write_file,
)
from orchestrator.data.sources import check_embedded
from orchestrator.data.tokenize import (
    Tokenizer,
    first_bytes,
    load_tokenizer,
    own_tokenizer,
    train_bpe,
)

TOKENIZER_FILE = "tokenizer.json"

COUNT_CHUNK_TOKENS = 10_000_000
"""Tokens counted at once; a whole shard would be widened to 800 MB of int64."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a preparation stands.

    Attributes:
        stage: `wait`, `hash`, `count`, `tokenizer`, `encode` or `finish`.
        documents: in `encode`, documents read so far.
        tokens: in `encode`, tokens written so far, with those that an interrupted run left.
    """

    stage: str
    documents: int = 0
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What `prepare` leaves.

    Attributes:
        folder: the prepared folder.
        data_id: id of its content.
        is_new: false if it had been prepared before and every hash still holds.
    """

    folder: Path
    data_id: str
    is_new: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Job:
    """One preparation: what `prepare` was asked for, its sources, and the user's tokenizer."""

    config: DataConfig
    files: list[SourceFile]
    hashes: list[str]
    given: Tokenizer | None
    shard_tokens: int
    command: str | None
    report: Callable[[Progress], None]

    @property
    def build_id(self) -> str:
        """What must be equal for one run to continue another's work."""
        own = f"tokenizers {tokenizers.__version__}"
        tokenizer = [own] if self.given is None else [self.given.library, self.given.sha256]
        names = [file.name for file in self.files]
        return digest(
            [
                FORMAT_VERSION,
                settings(self.config),
                names,
                self.hashes,
                tokenizer,
                self.shard_tokens,
            ]
        )


def prepare(
    config: DataConfig,
    root: Path,
    *,
    resume: bool = True,
    command: str | None = None,
    shard_tokens: int = SHARD_TOKENS,
    report: Callable[[Progress], None] = lambda _: None,
) -> Prepared:
    """Make `<root>/data/NAME-<first 8 of data_id>/`, or find it made and whole.

    A set that was prepared before is hashed; a damaged one is made again and replaced.

    Args:
        config: with absolute paths (`resolve_paths`).
        root: folder that holds `data/`; made if it is missing.
        resume: keep what an interrupted run has finished; false starts over.
        command: command line to note in the manifest; the first run's, if this one continues it.
        shard_tokens: most tokens of a shard.
        report: called as the work goes on.

    Raises:
        ValueError: a source that is missing, damaged or no text, a split that leaves one side
            empty, a tokenizer that does not fit, or too small a corpus for the vocabulary.
    """
    if not 1 <= shard_tokens < 2**31:
        raise ValueError(f"{shard_tokens=} must be between 1 and 2**31 - 1, as a header counts it")
    parent = Path(root).absolute() / "data"
    parent.mkdir(parents=True, exist_ok=True)
    report(Progress("hash"))
    files = list_sources(config)
    for file in files:
        check_embedded(file)
    job = _Job(
        config=config,
        files=files,
        hashes=[hash_file(file.path) for file in files],
        given=None if config.tokenizer_path is None else load_tokenizer(config),
        shard_tokens=shard_tokens,
        command=command,
        report=report,
    )
    stem = f"{config.name}-{job.build_id[:8]}"
    with exclusive_journal(parent / f"{stem}.journal", lambda: report(Progress("wait"))) as journal:
        found = locate_exact(config, parent.parent, job.hashes)
        if found is not None:
            checked = verify(found)
            if not checked.problems:
                return Prepared(folder=found, data_id=checked.data_id, is_new=False)
        partial = parent / f"{stem}.partial"
        _recover(partial, journal, job.command, resume=resume)
        return _build(job, partial, journal)


def _recover(partial: Path, journal: Journal, command: str | None, *, resume: bool) -> None:
    """Bring folder and journal to what both agree is whole, and remove the rest."""
    partial.mkdir(exist_ok=True)
    entries = journal.entries if resume else []
    if not entries:
        entries = [{"step": "start", "command": command}]
    kept = _whole_entries(partial, entries)
    journal.replace(kept)
    names = set()
    for entry in kept:
        if entry["step"] == "tokenizer":
            names.add(TOKENIZER_FILE)
        elif entry["step"] == "shard":
            record = ShardRecord(**entry["record"])
            names |= {record.file, record.index_file}
    for path in partial.iterdir():
        if path.name not in names:
            path.unlink()


def _whole_entries(partial: Path, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps whose files are what was written; of each split's shards, those up to a gap."""
    kept = []
    broken = set()
    for entry in entries:
        if entry["step"] == "tokenizer":
            path = partial / TOKENIZER_FILE
            if not path.is_file() or hash_file(path) != entry["sha256"]:
                # Every shard was written with it.
                return entries[:1]
        if entry["step"] == "shard":
            record = ShardRecord(**entry["record"])
            if entry["split"] in broken or damage(partial, record):
                broken.add(entry["split"])
                continue
        kept.append(entry)
    return kept


def _build(job: _Job, partial: Path, journal: Journal) -> Prepared:
    job.report(Progress("count"))
    corpus = Corpus.open(job.config, job.files)
    tokenizer = job.given or _trained_tokenizer(job, corpus, partial, journal)
    records: dict[str, list[ShardRecord]] = {split: [] for split in SPLITS}
    for entry in journal.entries:
        if entry["step"] == "shard":
            records[entry["split"]].append(ShardRecord(**entry["record"]))
    encoder = ShardEncoder(
        corpus=corpus,
        tokenizer=tokenizer,
        folder=partial,
        records=records,
        shard_tokens=job.shard_tokens,
        on_shard=lambda split, record: journal.append(
            {"step": "shard", "split": split, "record": record.as_dict()}
        ),
        on_progress=lambda documents, tokens: job.report(Progress("encode", documents, tokens)),
    )
    documents = encoder.run()
    job.report(Progress("finish"))
    write_file(partial / TOKEN_BYTES_FILE, _npy(tokenizer.token_bytes))
    text = manifest_text(
        _content(job, tokenizer, partial, records, documents),
        {"unigram_loss_nats": unigram_loss_nats(partial, records, tokenizer.vocab_size)},
        {
            "settings": settings(job.config),
            "sources": job.config.sources,
            "tokenizer": job.config.tokenizer,
            "library": tokenizer.library,
            "command": journal.entries[0]["command"],
        },
    )
    write_file(partial / MANIFEST, text.encode())
    return _publish(job, partial)


def _trained_tokenizer(job: _Job, corpus: Corpus, partial: Path, journal: Journal) -> Tokenizer:
    path = partial / TOKENIZER_FILE
    if not path.is_file():
        job.report(Progress("tokenizer"))
        texts = first_bytes(corpus.training_texts(), job.config.tokenizer_bytes)
        write_file(path, train_bpe(texts, job.config.vocab_size).encode())
        journal.append({"step": "tokenizer", "sha256": hash_file(path)})
    return own_tokenizer(path.read_text(encoding="utf-8"), job.config)


def _content(
    job: _Job,
    tokenizer: Tokenizer,
    partial: Path,
    records: dict[str, list[ShardRecord]],
    documents: list[int],
) -> dict[str, Any]:
    """What the data are, without paths, times and versions: `data_id` is its digest."""
    described = settings(job.config)
    # The same tokens under another folder name are the same data.
    del described["name"]
    files = [TOKEN_BYTES_FILE] + ([TOKENIZER_FILE] if job.given is None else [])
    return {
        "format_version": FORMAT_VERSION,
        "settings": described,
        "deduplication": "none",
        "tokenizer": {
            "kind": tokenizer.kind,
            "sha256": tokenizer.sha256,
            "vocab_size": tokenizer.vocab_size,
            "start_id": tokenizer.start_id,
            "end_id": tokenizer.end_id,
            "prefix_bytes": tokenizer.prefix_bytes,
            "encode_special_tokens": True,
        },
        "token_type": TOKEN_DTYPES[token_version(tokenizer.vocab_size)].name,
        "splits": {split: _described_split(records[split]) for split in SPLITS},
        "files": {name: hash_file(partial / name) for name in files},
        "sources": [
            _described_source(job, number, count) for number, count in enumerate(documents)
        ],
    }


def _described_split(records: list[ShardRecord]) -> dict[str, Any]:
    return {
        "documents": sum(record.documents for record in records),
        "tokens": sum(record.tokens for record in records),
        "text_bytes": sum(record.text_bytes for record in records),
        "token_bytes": sum(record.token_bytes for record in records),
        "shards": [record.as_dict() for record in records],
    }


def _described_source(job: _Job, number: int, documents: int) -> dict[str, Any]:
    file = job.files[number]
    embedded = file.embedded
    return {
        "name": file.name,
        "version": None if embedded is None else embedded.version,
        "licence": job.config.licence if embedded is None else embedded.licence,
        "sha256": job.hashes[number],
        "bytes": file.num_bytes,
        "documents": documents,
    }


def unigram_loss_nats(
    folder: Path, records: dict[str, list[ShardRecord]], vocab_size: int
) -> float:
    """Cross-entropy of validation tokens under training frequencies, each count raised by 0.5."""
    counts = {split: np.zeros(vocab_size, np.int64) for split in SPLITS}
    for split in SPLITS:
        for record in records[split]:
            tokens = open_shard(folder, record, vocab_size)
            for first in range(0, len(tokens), COUNT_CHUNK_TOKENS):
                part = tokens[first : first + COUNT_CHUNK_TOKENS]
                counts[split] += np.bincount(part, minlength=vocab_size)
    train = counts["train"] + 0.5
    log_probability = np.log(train / train.sum())
    return float(-(counts["val"] @ log_probability) / counts["val"].sum())


def _npy(values: NDArray[np.uint32]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


def _publish(job: _Job, partial: Path) -> Prepared:
    """Give the finished folder its name; a damaged folder of the same id makes room."""
    sync_folder(partial)
    data_id = read_manifest(partial)["data_id"]
    folder = partial.parent / folder_name(job.config, data_id)
    if folder.exists():
        damaged = partial.with_suffix(".damaged")
        folder.rename(damaged)
        partial.rename(folder)
        shutil.rmtree(damaged)
    else:
        partial.rename(folder)
    sync_folder(partial.parent)
    return Prepared(folder=folder, data_id=data_id, is_new=True)
