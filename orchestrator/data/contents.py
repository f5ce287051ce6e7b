"""What a finished folder says of itself: the manifest's `content`, and the unigram loss."""

from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.data.corpus import DataConfig, SourceFile
from orchestrator.data.encoding import SPLITS
from orchestrator.data.manifest import FORMAT_VERSION, settings
from orchestrator.data.shards import TOKEN_DTYPES, ShardRecord, open_shard, token_version
from orchestrator.data.tokenize import Tokenizer

COUNT_CHUNK_TOKENS = 10_000_000
"""Tokens counted at once; a whole shard would be widened to 800 MB of int64."""


def describe(
    config: DataConfig,
    sources: list[tuple[SourceFile, str, int]],
    tokenizer: Tokenizer,
    records: dict[str, list[ShardRecord]],
    hashed: dict[str, str],
) -> dict[str, Any]:
    """What the data are, without paths, times and versions: `data_id` is its digest.

    Args:
        config: the data set.
        sources: its source files, each with its SHA-256 and the number of its documents.
        tokenizer: what encoded them.
        records: shards of each split.
        hashed: SHA-256 of the folder's other files, by name.
    """
    described = settings(config)
    # The same tokens under another folder name are the same data.
    del described["name"]
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
        "splits": {split: _describe_split(records[split]) for split in SPLITS},
        "files": hashed,
        "sources": [_describe_source(config, *source) for source in sources],
    }


def _describe_split(records: list[ShardRecord]) -> dict[str, Any]:
    return {
        "documents": sum(record.documents for record in records),
        "tokens": sum(record.tokens for record in records),
        "text_bytes": sum(record.text_bytes for record in records),
        "token_bytes": sum(record.token_bytes for record in records),
        "shards": [record.as_dict() for record in records],
    }


def _describe_source(
    config: DataConfig, file: SourceFile, sha256: str, documents: int
) -> dict[str, Any]:
    embedded = file.embedded
    return {
        "name": file.name,
        "version": None if embedded is None else embedded.version,
        "licence": config.licence if embedded is None else embedded.licence,
        "sha256": sha256,
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
