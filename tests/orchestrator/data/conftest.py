"""Prepared data sets for the tests of the data path."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data import DataConfig, Dataset, open_dataset, prepare

WORDS = (
    *("the", "of", "and", "to", "in", "that", "for", "by", "it", "as", "with", "be", "our", "is"),
    *("people", "states", "government", "congress", "country", "year", "war", "peace", "law"),
)


@pytest.fixture(scope="session")
def made_up_texts() -> list[str]:
    """60 documents of 20 to 200 words, the same in every run."""
    generator = np.random.Generator(np.random.Philox(key=7))
    lengths = generator.integers(20, 200, size=60)
    return [" ".join(generator.choice(WORDS, size=length)) + "." for length in lengths]


def write_jsonl(path: Path, texts: Iterable[str]) -> Path:
    lines = [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def jsonl_config(path: Path, **overrides: Any) -> DataConfig:
    values: dict[str, Any] = {
        "name": "tiny",
        "sources": [str(path)],
        "split": "last:0.2",
        "vocab_size": 300,
    }
    return DataConfig(**values | overrides)


@pytest.fixture
def make_dataset(tmp_path: Path) -> Callable[..., Dataset]:
    """Prepares texts, given as JSONL, under the test's own root and opens the result."""

    def make(texts: Iterable[str], *, shard_tokens: int = 10**6, **overrides: Any) -> Dataset:
        config = jsonl_config(write_jsonl(tmp_path / "texts.jsonl", texts), **overrides)
        return open_dataset(prepare(config, tmp_path, shard_tokens=shard_tokens).folder)

    return make


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, made_up_texts: list[str]) -> Dataset:
    """The made-up documents in several shards; 48 train, 12 validate."""
    root = tmp_path_factory.mktemp("tiny")
    config = jsonl_config(write_jsonl(root / "texts.jsonl", made_up_texts))
    return open_dataset(prepare(config, root, shard_tokens=2_000).folder)


@pytest.fixture(scope="session")
def sotu(common_root: Path) -> Dataset:
    """The embedded corpus as it is prepared by default."""
    return open_dataset(prepare(DataConfig(), common_root).folder)
