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
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from orchestrator.data.contents import describe, unigram_loss_nats
from orchestrator.data.corpus import DataConfig, SourceFile, list_sources
from orchestrator.data.dataset import TOKEN_BYTES_FILE
from orchestrator.data.encoding import SPLITS, Corpus, ShardEncoder
from orchestrator.data.inspection import verify
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
    ShardRecord,
    damage,
    sync_folder,
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
        described = [FORMAT_VERSION, settings(self.config), names, self.hashes, tokenizer]
        return digest([*described, self.shard_tokens])


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
    root = Path(root).absolute()
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
    # Before the lock, so that a prepared set is found under a root that cannot be written.
    if found := _find_whole(job, root):
        return found
    stem = f"{config.name}-{job.build_id[:8]}"
    parent = root / "data"
    parent.mkdir(parents=True, exist_ok=True)
    on_wait = partial(report, Progress("wait"))
    with exclusive_journal(parent / f"{stem}.journal", on_wait) as journal:
        if found := _find_whole(job, root):
            return found
        folder = parent / f"{stem}.partial"
        _recover(folder, journal, job.command, resume=resume)
        try:
            return _build(job, folder, journal)
        except ValueError:
            # Refused input: once it is mended, its hash is another and nothing here would serve.
            shutil.rmtree(folder)
            raise


def _find_whole(job: _Job, root: Path) -> Prepared | None:
    """The set as prepared before, if every hash still holds."""
    folder = locate_exact(job.config, root, job.hashes)
    if folder is None:
        return None
    checked = verify(folder)
    if checked.problems:
        return None
    return Prepared(folder=folder, data_id=checked.data_id, is_new=False)


def _recover(folder: Path, journal: Journal, command: str | None, *, resume: bool) -> None:
    """Bring folder and journal to what both agree is whole, and remove the rest."""
    folder.mkdir(exist_ok=True)
    entries = journal.entries if resume else []
    if not entries:
        entries = [{"step": "start", "command": command}]
    kept = _whole_entries(folder, entries)
    journal.replace(kept)
    names = set()
    for entry in kept:
        if entry["step"] == "tokenizer":
            names.add(TOKENIZER_FILE)
        elif entry["step"] == "shard":
            record = ShardRecord(**entry["record"])
            names |= {record.file, record.index_file}
    for path in folder.iterdir():
        if path.name not in names:
            path.unlink()


def _whole_entries(folder: Path, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps whose files are what was written; of each split's shards, those up to a gap."""
    kept = []
    broken = set()
    for entry in entries:
        if entry["step"] == "tokenizer":
            path = folder / TOKENIZER_FILE
            if not path.is_file() or hash_file(path) != entry["sha256"]:
                # Every shard was written with it.
                return entries[:1]
        if entry["step"] == "shard":
            record = ShardRecord(**entry["record"])
            if entry["split"] in broken or damage(folder, record):
                broken.add(entry["split"])
                continue
        kept.append(entry)
    return kept


def _build(job: _Job, folder: Path, journal: Journal) -> Prepared:
    job.report(Progress("count"))
    corpus = Corpus.open(job.config, job.files)
    tokenizer = job.given or _trained_tokenizer(job, corpus, folder, journal)
    records: dict[str, list[ShardRecord]] = {split: [] for split in SPLITS}
    for entry in journal.entries:
        if entry["step"] == "shard":
            records[entry["split"]].append(ShardRecord(**entry["record"]))
    encoder = ShardEncoder(
        corpus=corpus,
        tokenizer=tokenizer,
        folder=folder,
        records=records,
        shard_tokens=job.shard_tokens,
        on_shard=lambda split, record: journal.append(
            {"step": "shard", "split": split, "record": record.as_dict()}
        ),
        on_progress=lambda documents, tokens: job.report(Progress("encode", documents, tokens)),
    )
    documents = encoder.run()
    job.report(Progress("finish"))
    write_file(folder / TOKEN_BYTES_FILE, _npy(tokenizer.token_bytes))
    own_files = [TOKEN_BYTES_FILE] + ([TOKENIZER_FILE] if job.given is None else [])
    hashed = {name: hash_file(folder / name) for name in own_files}
    sources = list(zip(job.files, job.hashes, documents, strict=True))
    text = manifest_text(
        describe(job.config, sources, tokenizer, records, hashed),
        {"unigram_loss_nats": unigram_loss_nats(folder, records, tokenizer.vocab_size)},
        {
            "settings": settings(job.config),
            "sources": job.config.sources,
            "tokenizer": job.config.tokenizer,
            "library": tokenizer.library,
            "command": journal.entries[0]["command"],
        },
    )
    write_file(folder / MANIFEST, text.encode())
    return _publish(job, folder)


def _trained_tokenizer(job: _Job, corpus: Corpus, folder: Path, journal: Journal) -> Tokenizer:
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        job.report(Progress("tokenizer"))
        texts = first_bytes(corpus.training_texts(), job.config.tokenizer_bytes)
        write_file(path, train_bpe(texts, job.config.vocab_size).encode())
        journal.append({"step": "tokenizer", "sha256": hash_file(path)})
    return own_tokenizer(path.read_text(encoding="utf-8"), job.config)


def _npy(values: NDArray[np.uint32]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values, allow_pickle=False)
    return buffer.getvalue()


def _publish(job: _Job, finished: Path) -> Prepared:
    """Give the finished folder its name; a damaged folder of the same id makes room."""
    sync_folder(finished)
    data_id = read_manifest(finished)["data_id"]
    folder = finished.parent / folder_name(job.config, data_id)
    damaged = finished.with_suffix(".damaged")
    if folder.exists():
        _require_same_data(folder, data_id)
        if damaged.exists():
            shutil.rmtree(damaged)
        folder.rename(damaged)
    finished.rename(folder)
    if damaged.exists():
        shutil.rmtree(damaged)
    sync_folder(folder.parent)
    return Prepared(folder=folder, data_id=data_id, is_new=True)


def _require_same_data(folder: Path, data_id: str) -> None:
    """Refuse to replace a readable folder of other data, whose id merely begins alike."""
    try:
        found = read_manifest(folder)["data_id"]
    except ValueError:
        return
    if found != data_id:
        raise ValueError(
            f"{folder} holds other data (data_id={found}) and stands where data_id={data_id} "
            "belongs; move it away"
        )
