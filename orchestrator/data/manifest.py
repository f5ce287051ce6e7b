"""`manifest.json`: what a prepared folder holds, and the `data_id` that follows from it.

A manifest has four parts. `content` says what the tokens are and where they come from, without
paths, times or versions of libraries; `data_id` is the SHA-256 of its canonical JSON. `derived`
holds numbers that follow from the tokens (floating point, so they are kept out of the id).
`made` holds the configuration with its paths, the command line and the library.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.data.corpus import (
    READING_DEFAULTS,
    DataConfig,
    MissingSourceError,
    SourceFile,
    list_sources,
    require_absolute,
)

FORMAT_VERSION = 1
"""Raised when a reader of today could not read what a writer of tomorrow writes."""

MANIFEST = "manifest.json"
PARTS = ("data_id", "content", "derived", "made")
HASH_CHUNK_BYTES = 1 << 20


def canonical_json(value: Any) -> bytes:
    """One byte string for equal values: sorted keys, no spaces, UTF-8; NaN is refused."""
    text = json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return text.encode()


def digest(value: Any) -> str:
    """SHA-256 of the canonical JSON of `value`, in hex."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    state = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK_BYTES):
            state.update(chunk)
    return state.hexdigest()


def manifest_text(content: dict[str, Any], derived: dict[str, Any], made: dict[str, Any]) -> str:
    """The text of `manifest.json`, `data_id` first."""
    manifest = {"data_id": digest(content), "content": content, "derived": derived, "made": made}
    return json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a prepared folder, its id recomputed.

    Raises:
        ValueError: no manifest, another format version, or content that `data_id` is not the id of.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is no prepared data set: it has no {MANIFEST}") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); prepare the data set again") from None
    if not isinstance(manifest, dict) or not manifest.keys() >= set(PARTS):
        raise ValueError(f"{path} is no manifest of a data set: it needs {', '.join(PARTS)}")
    found = digest(manifest["content"])
    if found != manifest["data_id"]:
        raise ValueError(
            f"{path} was altered: its content has the id {found[:8]}, and it says "
            f"data_id={str(manifest['data_id'])[:8]}; prepare the data set again"
        )
    version = manifest["content"]["format_version"]
    if version != FORMAT_VERSION:
        raise ValueError(
            f"{path} has format_version={version}, and this version reads {FORMAT_VERSION}; "
            "prepare the data set again"
        )
    return manifest


def folder_name(config: DataConfig, data_id: str) -> str:
    """Name of the folder of a prepared set under `<root>/data/`."""
    return f"{config.name}-{data_id[:8]}"


def locate(config: DataConfig, root: Path) -> Path | None:
    """The folder under `<root>/data/` that was prepared from this configuration, if there is one.

    Where the source files are at hand, their names and sizes must be the manifest's; should that
    leave several folders, the files' hashes decide. Where they are gone (a set that was copied to
    another machine), the file names in the globs must be the ones it was prepared from.

    Args:
        config: with absolute paths.
        root: the folder that holds `data/`.

    Raises:
        ValueError: a relative path, or several folders that fit equally well.
    """
    require_absolute(config)
    root = Path(root).absolute()
    fitting = [folder for folder in _candidates(config, root) if _fits(config, folder)]
    if len(fitting) > 1:
        hashes = source_hashes(list_sources(config))
        fitting = [folder for folder in fitting if _hashes(folder) == hashes]
    if len(fitting) > 1:
        raise ValueError(
            f"several data sets were prepared from data.name={config.name!r} as it stands: "
            f"{', '.join(map(str, fitting))}; remove all but one"
        )
    return fitting[0] if fitting else None


def locate_exact(config: DataConfig, root: Path, hashes: list[str]) -> Path | None:
    """Like `locate`, for source files whose hashes are known already."""
    for folder in _candidates(config, root):
        try:
            if _fits(config, folder) and _hashes(folder) == hashes:
                return folder
        except ValueError:
            # An altered manifest: whoever looks for exactly this set is about to replace it.
            continue
    return None


def source_hashes(files: Iterable[SourceFile]) -> list[str]:
    """SHA-256 of each source file, in reading order."""
    return [hash_file(file.path) for file in files]


def settings(config: DataConfig) -> dict[str, Any]:
    """What of a configuration decides the tokens, apart from the sources; paths left out."""
    values = asdict(config)
    for name in ("sources", *READING_DEFAULTS):
        del values[name]
    if config.tokenizer_path is not None:
        prefix = "llama2:" if config.tokenizer.startswith("llama2:") else ""
        values["tokenizer"] = prefix + config.tokenizer_path.suffix
    return values


def _candidates(config: DataConfig, root: Path) -> list[Path]:
    pattern = folder_name(config, "?" * 8)
    return sorted(path.parent for path in (root / "data").glob(f"{pattern}/{MANIFEST}"))


def _fits(config: DataConfig, folder: Path) -> bool:
    manifest = read_manifest(folder)
    if manifest["made"]["settings"] != settings(config):
        return False
    path = config.tokenizer_path
    if path is not None and path.is_file():
        tokenizer_hash = manifest["content"]["tokenizer"]["sha256"]
        if hash_file(path) != tokenizer_hash:
            return False
    try:
        files = list_sources(config)
    except MissingSourceError:
        names = [Path(pattern).name for pattern in config.sources]
        return names == [Path(pattern).name for pattern in manifest["made"]["sources"]]
    recorded = manifest["content"]["sources"]
    if len(recorded) != len(files):
        return False
    return all(
        file.name == source["name"]
        and file.num_bytes == source["bytes"]
        and (file.embedded is None or file.embedded.sha256 == source["sha256"])
        for file, source in zip(files, recorded, strict=True)
    )


def _hashes(folder: Path) -> list[str]:
    return [source["sha256"] for source in read_manifest(folder)["content"]["sources"]]
