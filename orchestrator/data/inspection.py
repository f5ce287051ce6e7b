"""Looking at a prepared folder without training on it: `verify` hashes, `info` describes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.data.dataset import open_dataset, shard_records
from orchestrator.data.manifest import hash_file, read_manifest
from orchestrator.data.shards import damage


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
