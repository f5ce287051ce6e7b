"""Making a prepared folder: what it holds, interruptions, repetitions, refusals."""

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers

from orchestrator.data import DataConfig, Dataset, Progress, locate, open_dataset, prepare, verify
from orchestrator.data.manifest import canonical_json
from orchestrator.data.preparation import Prepared

SHARD_TOKENS = 1_000


@pytest.fixture
def config(tmp_path: Path, made_up_texts: list[str]) -> DataConfig:
    """The made-up documents as JSONL in the test's own folder."""
    lines = [json.dumps({"text": text}) for text in made_up_texts]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return DataConfig(name="tiny", sources=[str(path)], split="last:0.2", vocab_size=300)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def write_times(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def documents_of(dataset: Dataset) -> Iterator[list[int]]:
    for split in (dataset.train, dataset.val):
        start = 0
        for end in split.document_ends().tolist():
            yield split.tokens(start, end - start).tolist()
            start = end


def decode(dataset: Dataset, ids: list[int]) -> str:
    library = tokenizers.Tokenizer.from_file(str(dataset.folder / "tokenizer.json"))
    text: str = library.decode(ids, skip_special_tokens=False)
    return text


AWKWARD = [
    "ends with </s>",
    "",
    "<s> begins and <s></s> holds " + "</s>" * 20,
    "long " * 400,
    "<unk>",
    "tail",
]


@pytest.mark.parametrize("start", [True, False])
@pytest.mark.parametrize("end", [True, False])
def test_boundaries_stand_in_the_index_and_text_comes_back(
    make_dataset: Callable[..., Dataset], made_up_texts: list[str], *, start: bool, end: bool
) -> None:
    # Boundaries guessed from ids merge documents: OLMo-core 843, transformers 24569.
    texts = made_up_texts + AWKWARD
    dataset = make_dataset(texts, document_start=start, document_end=end, shard_tokens=2_500)
    documents = list(documents_of(dataset))
    assert len(documents) == len(texts)
    for ids, text in zip(documents, texts, strict=True):
        body = ids[1:] if start else ids
        body = body[:-1] if end else body
        assert ids[:1] == [1] or not start
        assert ids[-1:] == [2] or not end
        assert not {0, 1, 2} & set(body)
        assert decode(dataset, body) == text


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(texts=st.lists(st.text(max_size=300), max_size=12))
def test_any_documents_come_back(make_dataset: Callable[..., Dataset], texts: list[str]) -> None:
    # The two documents around them keep both sides from being empty.
    texts = ["x", *texts, "tail"]
    dataset = make_dataset(texts, vocab_size=259, shard_tokens=2_000)
    documents = list(documents_of(dataset))
    assert [decode(dataset, ids[1:]) for ids in documents] == texts
    assert {ids[0] for ids in documents} == {1}


def test_validation_is_the_last_share_and_no_document_is_on_both_sides(
    tiny: Dataset, made_up_texts: list[str]
) -> None:
    texts = [decode(tiny, ids[1:]) for ids in documents_of(tiny)]
    assert texts == made_up_texts
    assert (tiny.train.num_documents, tiny.val.num_documents) == (48, 12)


def test_tokenizer_learns_from_the_training_part_alone(
    make_dataset: Callable[..., Dataset], made_up_texts: list[str]
) -> None:
    words = {"zebra": "zebra " * 500}
    with_it = make_dataset([*made_up_texts, words["zebra"]], split="last:0.01")
    vocab = json.loads((with_it.folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert with_it.val.num_documents == 1
    assert not any("zeb" in piece for piece in vocab)
    trained = make_dataset([words["zebra"], *made_up_texts], split="last:0.01")
    vocab = json.loads((trained.folder / "tokenizer.json").read_text())["model"]["vocab"]
    assert any("zeb" in piece for piece in vocab)


def test_tokenizer_bytes_limit_what_it_learns_from(
    make_dataset: Callable[..., Dataset], made_up_texts: list[str]
) -> None:
    first = make_dataset(made_up_texts, tokenizer_bytes=4_000)
    again = make_dataset([*made_up_texts[:50], "other words " * 50], tokenizer_bytes=4_000)
    assert (first.folder / "tokenizer.json").read_bytes() == (
        again.folder / "tokenizer.json"
    ).read_bytes()


FINEWEB_EDU = pa.schema(
    [
        ("text", pa.string()),
        ("id", pa.string()),
        ("dump", pa.string()),
        ("url", pa.string()),
        ("file_path", pa.string()),
        ("language", pa.string()),
        ("language_score", pa.float64()),
        ("token_count", pa.int64()),
        ("score", pa.float64()),
        ("int_score", pa.int64()),
    ]
)


def write_fineweb_edu(path: Path, texts: list[str]) -> None:
    rows = [
        {
            "text": text,
            "id": f"<urn:uuid:{i}>",
            "dump": "CC-MAIN-2024-10",
            "url": f"https://example.org/{i}",
            "file_path": "s3://commoncrawl/x.warc.gz",
            "language": "en",
            "language_score": 0.98,
            "token_count": len(text.split()),
            "score": 3.1,
            "int_score": 3,
        }
        for i, text in enumerate(texts)
    ]
    table = pa.Table.from_pylist(rows, schema=FINEWEB_EDU)
    pq.write_table(table, path, row_group_size=16, compression="snappy")


def test_fineweb_edu_parquet_gives_the_tokens_of_the_same_texts(
    tmp_path: Path, config: DataConfig, made_up_texts: list[str]
) -> None:
    folder = tmp_path / "sample" / "10BT"
    folder.mkdir(parents=True)
    write_fineweb_edu(folder / "000_00000.parquet", made_up_texts[:37])
    write_fineweb_edu(folder / "001_00000.parquet", made_up_texts[37:])
    web = replace(config, name="fineweb_edu", sources=[f"{folder}/*.parquet"], licence="ODC-By 1.0")
    found = open_dataset(prepare(web, tmp_path).folder)
    expected = open_dataset(prepare(config, tmp_path).folder)
    for name in ("train-00000.bin", "train-00000.idx", "val-00000.bin", "tokenizer.json"):
        assert (found.folder / name).read_bytes() == (expected.folder / name).read_bytes()
    assert found.data_id != expected.data_id
    sources = found.manifest["content"]["sources"]
    assert [source["documents"] for source in sources] == [37, 23]
    assert {source["licence"] for source in sources} == {"ODC-By 1.0"}


def test_manifest_holds_what_the_id_is_made_of(
    tiny: Dataset, config: DataConfig, tmp_path: Path
) -> None:
    content = tiny.manifest["content"]
    assert tiny.data_id == hashlib.sha256(canonical_json(content)).hexdigest()
    assert tiny.folder.name == f"tiny-{tiny.data_id[:8]}"
    assert str(tiny.folder.parent.parent) not in json.dumps(content)
    assert content["token_type"] == "uint16"
    for split in (tiny.train, tiny.val):
        described = content["splits"][split.name]
        assert described["tokens"] == split.num_tokens
        assert described["documents"] == split.num_documents
        assert described["text_bytes"] == described["token_bytes"] == split.text_bytes
    prepared = prepare(config, tmp_path, command="data prepare conf=x")
    assert open_dataset(prepared.folder).manifest["made"]["command"] == "data prepare conf=x"


def test_id_follows_the_data_and_not_the_place(tmp_path: Path, config: DataConfig) -> None:
    first = prepare(config, tmp_path)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    path = moved / "texts.jsonl"
    shutil.copy(config.sources[0], path)
    same = [
        replace(config, sources=[str(path)]),
        replace(config, name="other_name"),
        replace(config, sources=[f"{moved}/*.jsonl"]),
    ]
    for number, variant in enumerate(same):
        assert prepare(variant, tmp_path / str(number)).data_id == first.data_id
    other = [
        replace(config, vocab_size=301),
        replace(config, split="last:0.3"),
        replace(config, document_end=True),
    ]
    path.write_text(path.read_text().replace("peace", "piece"))
    other.append(replace(config, sources=[str(path)]))
    ids = {prepare(variant, tmp_path).data_id for variant in other}
    assert len(ids | {first.data_id}) == 5


@pytest.mark.parametrize("threads", ["1", "3"])
def test_id_does_not_depend_on_threads(tmp_path: Path, config: DataConfig, threads: str) -> None:
    expected = prepare(config, tmp_path / "here", shard_tokens=SHARD_TOKENS)
    done = run_prepare(config, tmp_path / "there", env={"RAYON_NUM_THREADS": threads})
    assert json.loads(done.stdout)["data_id"] == expected.data_id


def test_second_call_finds_the_set_and_touches_nothing(tmp_path: Path, config: DataConfig) -> None:
    first = prepare(config, tmp_path)
    before = write_times(first.folder)
    stages: list[str] = []
    second = prepare(config, tmp_path, report=lambda progress: stages.append(progress.stage))
    assert (first.is_new, second.is_new) == (True, False)
    assert second.folder == first.folder
    assert write_times(first.folder) == before
    assert stages == ["hash"]
    assert names(tmp_path / "data") == [first.folder.name]


def test_prepared_set_is_found_under_a_read_only_root(tmp_path: Path, config: DataConfig) -> None:
    first = prepare(config, tmp_path / "root")
    parent = first.folder.parent
    parent.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert not prepare(config, tmp_path / "root").is_new
        assert locate(config, tmp_path / "root") == first.folder
    finally:
        parent.chmod(stat.S_IRWXU)


def test_progress_tells_documents_and_tokens(tmp_path: Path, config: DataConfig) -> None:
    seen: list[Progress] = []
    dataset = open_dataset(prepare(config, tmp_path, report=seen.append).folder)
    assert [p.stage for p in seen] == ["hash", "count", "tokenizer", "encode", "finish"]
    assert (seen[3].documents, seen[3].tokens) == (
        60,
        dataset.train.num_tokens + dataset.val.num_tokens,
    )


CHILD = """
import json, os, signal, sys
from pathlib import Path
from orchestrator.data import DataConfig, encoding, prepare

encoding.BATCH_DOCUMENTS = 5
stage, tokens = sys.argv[3], int(sys.argv[4])

def report(progress):
    if progress.stage == stage and progress.tokens >= tokens:
        os.kill(os.getpid(), signal.SIGKILL)

done = prepare(
    DataConfig(**json.loads(sys.argv[1])), Path(sys.argv[2]), shard_tokens=1000, report=report
)
print(json.dumps({"data_id": done.data_id, "is_new": done.is_new}))
"""


def start_prepare(
    config: DataConfig, root: Path, *, kill_at: tuple[str, int] = ("never", 0), **options: Any
) -> "subprocess.Popen[str]":
    values = {name: getattr(config, name) for name in DataConfig.__slots__}
    environment = os.environ | options.pop("env", {})
    arguments = [json.dumps(values), str(root), kill_at[0], str(kill_at[1])]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        **options,
    )


def run_prepare(
    config: DataConfig, root: Path, **options: Any
) -> "subprocess.CompletedProcess[str]":
    process = start_prepare(config, root, **options)
    stdout, _ = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout)


@pytest.fixture
def undisturbed(tmp_path: Path, config: DataConfig) -> dict[str, bytes]:
    prepared = prepare(config, tmp_path / "undisturbed", shard_tokens=SHARD_TOKENS)
    return contents(prepared.folder)


@pytest.mark.parametrize(
    ("stage", "tokens", "shards_left"),
    [("tokenizer", 0, 0), ("encode", 1, 1), ("encode", 7_000, 5), ("finish", 0, 13)],
    ids=["training", "first batch", "middle", "end"],
)
def test_killed_preparation_resumes_to_the_same_bytes(
    tmp_path: Path,
    config: DataConfig,
    undisturbed: dict[str, bytes],
    stage: str,
    tokens: int,
    shards_left: int,
) -> None:
    root = tmp_path / "killed"
    process = run_prepare(config, root, kill_at=(stage, tokens))
    assert process.returncode == -signal.SIGKILL
    assert locate(config, root) is None
    (partial,) = (root / "data").glob("*.partial")
    left = {path.name: path.stat().st_mtime_ns for path in partial.glob("*.bin")}
    assert len(left) >= shards_left
    resumed = prepare(config, root, shard_tokens=SHARD_TOKENS)
    assert contents(resumed.folder) == undisturbed
    assert names(root / "data") == [resumed.folder.name]
    kept = write_times(resumed.folder)
    assert {name: kept[name] for name in left} == left


def killed_in_the_middle(root: Path, config: DataConfig) -> Path:
    run_prepare(config, root, kill_at=("encode", 7_000))
    (partial,) = (root / "data").glob("*.partial")
    return partial


@pytest.mark.parametrize("position", [100, -1], ids=["header", "last byte"])
def test_resume_keeps_no_damaged_shard(
    tmp_path: Path, config: DataConfig, undisturbed: dict[str, bytes], position: int
) -> None:
    partial = killed_in_the_middle(tmp_path / "killed", config)
    path = partial / "train-00001.bin"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    resumed = prepare(config, tmp_path / "killed", shard_tokens=SHARD_TOKENS)
    assert contents(resumed.folder) == undisturbed


@pytest.mark.parametrize("damage", ["tokenizer", "journal line", "journal", "folder"])
def test_resume_survives_a_damaged_memory(
    tmp_path: Path, config: DataConfig, undisturbed: dict[str, bytes], damage: str
) -> None:
    partial = killed_in_the_middle(tmp_path / "killed", config)
    journal = partial.with_suffix(".journal")
    match damage:
        case "tokenizer":
            (partial / "tokenizer.json").write_text("{}")
        case "journal line":
            journal.write_bytes(journal.read_bytes()[:-9])
        case "journal":
            journal.write_bytes(b"\x00" * 40 + b"\n")
        case "folder":
            shutil.rmtree(partial)
    resumed = prepare(config, tmp_path / "killed", shard_tokens=SHARD_TOKENS)
    assert contents(resumed.folder) == undisturbed


def test_starting_over_keeps_nothing(
    tmp_path: Path, config: DataConfig, undisturbed: dict[str, bytes]
) -> None:
    partial = killed_in_the_middle(tmp_path / "killed", config)
    before = write_times(partial)["train-00000.bin"]
    fresh = prepare(config, tmp_path / "killed", resume=False, shard_tokens=SHARD_TOKENS)
    assert contents(fresh.folder) == undisturbed
    assert write_times(fresh.folder)["train-00000.bin"] > before


def test_changed_source_does_not_continue_the_old_one(tmp_path: Path, config: DataConfig) -> None:
    root = tmp_path / "killed"
    killed_in_the_middle(root, config)
    path = Path(config.sources[0])
    path.write_text(path.read_text().replace("peace", "piece"))
    changed = prepare(config, root, shard_tokens=SHARD_TOKENS)
    fresh = prepare(config, tmp_path / "fresh", shard_tokens=SHARD_TOKENS)
    assert contents(changed.folder) == contents(fresh.folder)


def test_processes_that_start_together_prepare_once(tmp_path: Path, config: DataConfig) -> None:
    processes = [start_prepare(config, tmp_path / "root") for _ in range(3)]
    results = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert len({result["data_id"] for result in results}) == 1
    assert sorted(result["is_new"] for result in results) == [False, False, True]
    assert len(names(tmp_path / "root" / "data")) == 1


def test_waiting_is_told_and_ends_with_the_others_result(
    tmp_path: Path, config: DataConfig
) -> None:
    waiting: list[subprocess.Popen[str]] = []

    def report(progress: Progress) -> None:
        if progress.stage == "finish":
            waiting.append(start_prepare(config, tmp_path, kill_at=("wait", 0)))
            waiting[0].wait(timeout=60)

    mine = prepare(config, tmp_path, shard_tokens=SHARD_TOKENS, report=report)
    # It reported that it waits, which is where it kills itself; its lock went with it.
    assert waiting[0].returncode == -signal.SIGKILL
    if waiting[0].stdout is not None:
        waiting[0].stdout.close()
    assert prepare(config, tmp_path, shard_tokens=SHARD_TOKENS) == replace(mine, is_new=False)


@pytest.mark.parametrize("name", ["train-00002.bin", "val-00000.idx", "manifest.json"])
def test_damaged_set_is_made_again(tmp_path: Path, config: DataConfig, name: str) -> None:
    first = prepare(config, tmp_path, shard_tokens=SHARD_TOKENS)
    before = contents(first.folder)
    path = first.folder / name
    path.write_bytes(path.read_bytes()[:-2])
    again = prepare(config, tmp_path, shard_tokens=SHARD_TOKENS)
    assert again == Prepared(folder=first.folder, data_id=first.data_id, is_new=True)
    assert contents(first.folder) == before
    assert names(tmp_path / "data") == [first.folder.name]


def test_folder_of_other_data_is_not_replaced(tmp_path: Path, config: DataConfig) -> None:
    wanted = prepare(config, tmp_path / "a")
    other = prepare(replace(config, vocab_size=301), tmp_path / "b")
    other.folder.rename(other.folder.with_name(wanted.folder.name))
    with pytest.raises(ValueError, match="holds other data"):
        prepare(config, tmp_path / "b")
    assert open_dataset(tmp_path / "b/data" / wanted.folder.name).data_id == other.data_id


def test_locate_tells_configurations_apart(tmp_path: Path, config: DataConfig) -> None:
    assert locate(config, tmp_path) is None
    other = replace(config, vocab_size=301)
    folder = prepare(config, tmp_path).folder
    other_folder = prepare(other, tmp_path).folder
    assert locate(config, tmp_path) == folder
    assert locate(other, tmp_path) == other_folder
    assert locate(replace(config, document_end=True), tmp_path) is None
    assert locate(replace(config, name="unknown"), tmp_path) is None


def test_locate_notices_sources_of_another_size(tmp_path: Path, config: DataConfig) -> None:
    folder = prepare(config, tmp_path).folder
    path = Path(config.sources[0])
    text = path.read_text()
    path.write_text(text + '\n{"text": "one more"}\n')
    assert locate(config, tmp_path) is None
    path.write_text(text)
    assert locate(config, tmp_path) == folder


def test_locate_works_where_the_sources_are_gone(tmp_path: Path, config: DataConfig) -> None:
    folder = prepare(config, tmp_path).folder
    Path(config.sources[0]).unlink()
    assert locate(config, tmp_path) == folder
    assert locate(replace(config, sources=["/mnt/texts.jsonl"]), tmp_path) == folder
    assert locate(replace(config, sources=["/mnt/other.jsonl"]), tmp_path) is None


def test_locate_hashes_sources_to_choose_between_two_sets(
    tmp_path: Path, config: DataConfig
) -> None:
    old = prepare(config, tmp_path).folder
    path = Path(config.sources[0])
    text = path.read_text()
    path.write_text(text.replace("peace", "piece"))
    new = prepare(config, tmp_path).folder
    assert new != old
    assert locate(config, tmp_path) == new
    path.write_text(text)
    assert locate(config, tmp_path) == old
    shutil.copytree(old, old.with_name("tiny-00000000"))
    with pytest.raises(ValueError, match="several data sets were prepared"):
        locate(config, tmp_path)


def test_users_tokenizer_is_named_by_hash_and_not_copied(
    tmp_path: Path, config: DataConfig, tiny: Dataset
) -> None:
    path = tmp_path / "tok.json"
    shutil.copy(tiny.folder / "tokenizer.json", path)
    given_one = replace(config, tokenizer=str(path))
    prepared = prepare(given_one, tmp_path)
    dataset = open_dataset(prepared.folder)
    assert not (prepared.folder / "tokenizer.json").exists()
    described = dataset.manifest["content"]["tokenizer"]
    assert described["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    tokens = tiny.train.tokens(0, tiny.train.num_tokens)
    assert dataset.train.tokens(0, dataset.train.num_tokens).tolist() == tokens.tolist()
    assert locate(given_one, tmp_path) == prepared.folder
    path.write_text(path.read_text() + " ")
    assert locate(given_one, tmp_path) is None
    path.unlink()
    assert locate(given_one, tmp_path) == prepared.folder


def test_wide_vocabulary_is_stored_in_four_bytes(
    tmp_path: Path, config: DataConfig, tiny: Dataset
) -> None:
    spec = json.loads((tiny.folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = spec["model"]["vocab"]
    # The piece "the" moves to an id that 16 bits cannot hold.
    vocab |= {f"filler{i}": i for i in range(300, 70_000)} | {"Ġthe": 69_999}
    del vocab["filler69999"]
    vocab["filler_the"] = next(i for i in range(300) if i not in set(vocab.values()))
    path = tmp_path / "tok.json"
    path.write_text(json.dumps(spec, ensure_ascii=False), encoding="utf-8")
    wide = replace(config, tokenizer=str(path), vocab_size=70_000)
    dataset = open_dataset(prepare(wide, tmp_path).folder)
    header = np.fromfile(dataset.folder / "train-00000.bin", "<i4", count=3)
    assert header[:2].tolist() == [20240520, 2]
    found = dataset.train.tokens(0, dataset.train.num_tokens)
    narrow = tiny.train.tokens(0, tiny.train.num_tokens).astype(np.int64)
    the = json.loads((tiny.folder / "tokenizer.json").read_text())["model"]["vocab"]["Ġthe"]
    narrow[narrow == the] = 69_999
    assert found.dtype == np.uint32
    assert found.tolist() == narrow.tolist()
    assert verify(dataset.folder).problems == ()


def test_tokenizer_that_normalises_is_refused_at_the_first_changed_document(
    tmp_path: Path, config: DataConfig, tiny: Dataset
) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(tiny.folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.StripAccents()
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    path = tmp_path / "tok.json"
    tokenizer.save(str(path))
    source = Path(config.sources[0])
    with source.open("a") as stream:
        stream.write('\n{"text": "caf\\u00e9"}\n')
    with pytest.raises(ValueError, match=r"does not give back .*texts\.jsonl, line 61: its tokens"):
        prepare(replace(config, tokenizer=str(path)), tmp_path)


@pytest.mark.parametrize(
    ("texts", "overrides", "message"),
    [
        (["only one"], {}, "leaves none of the 1 documents"),
        (["a", "b"], {"vocab_size": 5_000}, r"data\.vocab_size=5000 is more than"),
        (["text", ""], {"vocab_size": 259}, "fewer than 2 tokens in the val part"),
        (["x" * 3_000, "y"], {"vocab_size": 259}, "line 1: a document of 3001 tokens is longer"),
    ],
    ids=["one document", "vocabulary", "empty side", "long document"],
)
def test_corpus_that_cannot_serve_is_refused_and_leaves_nothing(
    tmp_path: Path,
    config: DataConfig,
    texts: list[str],
    overrides: dict[str, Any],
    message: str,
) -> None:
    lines = [json.dumps({"text": text}) for text in texts]
    Path(config.sources[0]).write_text("\n".join(lines))
    with pytest.raises(ValueError, match=message):
        prepare(replace(config, **overrides), tmp_path, shard_tokens=SHARD_TOKENS)
    assert names(tmp_path / "data") == []


def test_bad_line_in_the_middle_is_refused_and_leaves_nothing(
    tmp_path: Path, config: DataConfig
) -> None:
    path = Path(config.sources[0])
    path.write_text(path.read_text() + "\n{broken\n")
    with pytest.raises(ValueError, match=r"texts\.jsonl, line 61 is not JSON"):
        prepare(config, tmp_path)
    assert names(tmp_path / "data") == []


def test_years_are_only_known_of_the_embedded_corpus(tmp_path: Path, config: DataConfig) -> None:
    # `year` with files is refused by the configuration; a `year` key in them is not trusted.
    config.split = "year:2010"
    with pytest.raises(ValueError, match=r"line 1 has no year, which data\.split='year:2010'"):
        prepare(config, tmp_path)


@pytest.mark.parametrize("shard_tokens", [0, 2**31])
def test_impossible_shard_size_is_refused(
    tmp_path: Path, config: DataConfig, shard_tokens: int
) -> None:
    with pytest.raises(ValueError, match=f"shard_tokens={shard_tokens}"):
        prepare(config, tmp_path, shard_tokens=shard_tokens)


def test_unused_pre_tokenizer_is_no_excuse(tmp_path: Path, config: DataConfig) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "<s>": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path / "tok.json"
    tokenizer.save(str(path))
    with pytest.raises(ValueError, match="does not give back"):
        prepare(replace(config, tokenizer=str(path), vocab_size=2), tmp_path)
