"""What a data set is made of: configuration, embedded corpus, source files."""

import hashlib
import json
import lzma
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.data import DataConfig, resolve_paths
from orchestrator.data.corpus import (
    EMBEDDED,
    MissingSourceError,
    SourceFile,
    SplitRule,
    list_sources,
)
from orchestrator.data.sources import check_embedded

CONF = Path(__file__).parents[3] / "conf" / "data"


def sotu_documents() -> list[dict[str, Any]]:
    with lzma.open(EMBEDDED["sotu"].path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_configuration_imports_neither_numpy_nor_readers() -> None:
    program = (
        "import sys, orchestrator.data.corpus\n"
        "heavy = {'numpy', 'torch', 'pyarrow', 'tokenizers', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_reading_a_prepared_set_imports_neither_torch_nor_readers() -> None:
    program = (
        "import sys\n"
        "from orchestrator.data import TrainingBatches, open_dataset\n"
        "heavy = {'torch', 'pyarrow', 'tokenizers', 'pandas'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_embedded_corpus_is_what_its_provenance_says() -> None:
    corpus = EMBEDDED["sotu"]
    provenance = (corpus.path.parent / "PROVENANCE.md").read_text(encoding="utf-8")
    content = hashlib.sha256(lzma.decompress(corpus.path.read_bytes())).hexdigest()
    assert corpus.sha256 in provenance
    assert content in provenance
    assert hashlib.sha256(corpus.path.read_bytes()).hexdigest() == corpus.sha256
    documents = sotu_documents()
    assert len(documents) == 249
    assert sum(document["year"] >= 2010 for document in documents) == 14
    assert "American Presidency Project" in provenance


def test_embedded_split_shares_no_text() -> None:
    documents = sotu_documents()
    train = {document["text"] for document in documents if document["year"] < 2010}
    val = {document["text"] for document in documents if document["year"] >= 2010}
    assert len(train) + len(val) == 249
    assert not train & val


def test_altered_embedded_corpus_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "sotu.jsonl.xz"
    data = bytearray(EMBEDDED["sotu"].path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)
    file = SourceFile(path=path, kind="jsonl", num_bytes=len(data), embedded=EMBEDDED["sotu"])
    with pytest.raises(ValueError, match="is not the corpus that ships"):
        check_embedded(file)


@pytest.mark.parametrize("path", sorted(CONF.glob("*.yaml")), ids=lambda path: path.stem)
def test_group_files_hold_fields_of_the_configuration(path: Path) -> None:
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert set(values) <= {field.name for field in fields(DataConfig)}
    if path.stem == "files":
        # Not `???`: merged into a schema with a default, that would leave the embedded corpus there
        # under another name.
        with pytest.raises(ValueError, match=r"data\.sources is empty"):
            DataConfig(**values)
        values["sources"] = ["text/*.jsonl"]
    config = DataConfig(**values)
    assert config.name == path.stem


def test_default_configuration_is_the_embedded_group() -> None:
    values = yaml.safe_load((CONF / "sotu.yaml").read_text(encoding="utf-8"))
    assert DataConfig(**values) == DataConfig()
    assert DataConfig().is_embedded


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": "../up"}, "data.name='../up'"),
        ({"sources": []}, "data.sources is empty"),
        ({"sources": ["hf://datasets/x/*.parquet"]}, "only local files"),
        ({"sources": ["notes.pdf"]}, "notes.pdf"),
        ({"sources": ["texts/*.txt"]}, "data.split='year:2010' needs the years"),
        ({"split": "last:1.5"}, "data.split='last:1.5'"),
        ({"split": "last:0"}, "data.split='last:0'"),
        ({"split": "random"}, "data.split='random'"),
        ({"text_field": ""}, "data.text_field is empty"),
        ({"tokenizer": ""}, "data.tokenizer=''"),
        ({"tokenizer": "llama2:"}, "data.tokenizer='llama2:'"),
        ({"tokenizer_bytes": 0}, "data.tokenizer_bytes=0"),
        ({"vocab_size": 258}, "data.vocab_size=258 must be between 259"),
        ({"vocab_size": 2**31 + 1}, "data.vocab_size=2147483649"),
        ({"start_token": "<bos>"}, "data.start_token='<bos>'"),
    ],
)
def test_bad_configuration_names_field_and_value(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("*", r"\*")):
        DataConfig(**values)


def test_relative_paths_start_from_the_given_folder(tmp_path: Path) -> None:
    config = DataConfig(
        sources=["sotu", "a/*.txt", "/abs/b.jsonl"],
        split="last:0.1",
        tokenizer="llama2:tok/tokenizer.json",
        vocab_size=32_000,
    )
    resolved = resolve_paths(config, tmp_path)
    assert resolved.sources == ["sotu", str(tmp_path / "a/*.txt"), "/abs/b.jsonl"]
    assert resolved.tokenizer == f"llama2:{tmp_path / 'tok/tokenizer.json'}"
    assert resolve_paths(resolved, Path("/elsewhere")) == resolved
    assert config.sources[1] == "a/*.txt"


def test_relative_paths_are_refused_where_files_are_read() -> None:
    config = DataConfig(sources=["a/*.txt"], split="last:0.1")
    with pytest.raises(ValueError, match=r"'a/\*\.txt' is relative"):
        list_sources(config)


def test_files_are_read_by_path_within_a_glob_and_in_the_order_of_globs(tmp_path: Path) -> None:
    for name in ("b.txt", "a.txt", "z.jsonl"):
        (tmp_path / name).write_text("text")
    (tmp_path / "folder.txt").mkdir()
    globs = [f"{tmp_path}/*.jsonl", f"{tmp_path}/*.txt"]
    files = list_sources(DataConfig(sources=globs, split="last:0.1"))
    assert [file.name for file in files] == ["z.jsonl", "a.txt", "b.txt"]
    assert [file.kind for file in files] == ["jsonl", "txt", "txt"]
    assert [file.num_bytes for file in files] == [4, 4, 4]


def test_glob_without_a_file_is_refused(tmp_path: Path) -> None:
    config = DataConfig(sources=[f"{tmp_path}/*.txt"], split="last:0.1")
    with pytest.raises(MissingSourceError, match="matches no file"):
        list_sources(config)


def test_file_that_two_globs_match_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    config = DataConfig(sources=[f"{tmp_path}/*.txt", f"{tmp_path}/a*.txt"], split="last:0.1")
    with pytest.raises(ValueError, match="which an earlier source has read"):
        list_sources(config)


@pytest.mark.parametrize(
    ("share", "documents", "first"),
    [("0.01", 1000, 990), ("0.01", 10, 9), ("0.5", 3, 1), ("0.25", 10, 7)],
)
def test_last_split_rounds_and_validates_at_least_one(
    share: str, documents: int, first: int
) -> None:
    assert SplitRule.parse(f"last:{share}").first_validation(documents) == first
