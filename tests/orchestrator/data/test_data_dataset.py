"""Prepared folders, opened: windows, batches, evaluation, and what opening refuses."""

import json
import math
import pickle
import shutil
import stat
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.data import (
    Dataset,
    Split,
    TrainingBatches,
    evaluation_set,
    info,
    open_dataset,
    verify,
)
from orchestrator.data.manifest import digest


def stream_of(split: Split) -> list[int]:
    """The split's tokens, read from the files as a program that knows only the format would."""
    return [token for shard in split.shards for token in shard.tolist()]


@pytest.fixture
def copied(tiny: Dataset, tmp_path: Path) -> Path:
    """A copy of the tiny set that a test may damage."""
    folder = tmp_path / tiny.folder.name
    shutil.copytree(tiny.folder, folder)
    return folder


def test_tiny_set_spans_shards(tiny: Dataset) -> None:
    assert len(tiny.train.shards) > 3
    assert all(len(shard) <= 2_000 for shard in tiny.train.shards)


@pytest.mark.parametrize("seq_len", [1, 7, 32, 1_999, 5_000])
def test_windows_overlap_by_one_token_across_shards(tiny: Dataset, seq_len: int) -> None:
    stream = stream_of(tiny.train)
    count = tiny.train.num_windows(seq_len)
    windows = tiny.train.windows(np.arange(count), seq_len)
    for index, window in enumerate(windows):
        assert window.tolist() == stream[index * seq_len : (index + 1) * seq_len + 1]
    targets = windows[:, 1:].ravel().tolist()
    assert targets == stream[1 : 1 + len(targets)]
    assert tiny.train.dropped_tokens(seq_len) == len(stream) - 1 - len(targets)
    assert tiny.train.dropped_tokens(seq_len) < seq_len


@given(start=st.integers(0, 12_000), count=st.integers(0, 6_000))
def test_any_range_of_tokens_is_read(tiny: Dataset, start: int, count: int) -> None:
    stream = stream_of(tiny.train)
    if start + count <= len(stream):
        assert tiny.train.tokens(start, count).tolist() == stream[start : start + count]
    else:
        with pytest.raises(ValueError, match=f"tokens {start} to {start + count}"):
            tiny.train.tokens(start, count)


def test_batch_is_inputs_and_their_next_tokens(tiny: Dataset) -> None:
    batches = TrainingBatches(split=tiny.train, data_seed=1, windows_per_step=6, seq_len=64)
    inputs, targets, *_ = batches.batch(4)
    windows = tiny.train.windows(batches.window_ids(4), 64)
    for part, expected in ((inputs, windows[:, :-1]), (targets, windows[:, 1:])):
        assert part.shape == (6, 64)
        assert part.dtype == np.int64
        assert part.flags.c_contiguous
        assert part.tolist() == expected.tolist()


def test_ranks_and_micro_steps_make_up_the_batch(tiny: Dataset) -> None:
    batches = TrainingBatches(split=tiny.train, data_seed=1, windows_per_step=12, seq_len=16)
    whole = batches.batch(3)[0].tolist()
    parts = [
        row
        for micro_step in range(3)
        for rank in range(2)
        for row in batches.batch(
            3, rank=rank, world_size=2, micro_step=micro_step, num_micro_steps=3
        )[0].tolist()
    ]
    assert parts == whole


def test_window_longer_than_the_corpus_gives_both_numbers(tiny: Dataset) -> None:
    tokens = tiny.val.num_tokens
    assert tiny.val.num_windows(tokens - 1) == 1
    with pytest.raises(ValueError, match=f"seq_len={tokens} needs {tokens + 1} .* has {tokens}"):
        tiny.val.num_windows(tokens)
    with pytest.raises(ValueError, match="the train part has"):
        TrainingBatches(split=tiny.train, data_seed=0, windows_per_step=1, seq_len=10**6)


@pytest.mark.parametrize("index", [-1, 10**6])
def test_window_that_is_not_there_is_refused(tiny: Dataset, index: int) -> None:
    with pytest.raises(ValueError, match=f"window ids from 0 to {index}|from {index} to 0"):
        tiny.train.windows(np.array([0, index]), 32)


def test_document_ends_cut_the_stream_at_start_tokens(tiny: Dataset) -> None:
    stream = np.array(stream_of(tiny.train))
    ends = tiny.train.document_ends().astype(np.int64)
    assert len(ends) == tiny.train.num_documents == 48
    assert np.flatnonzero(stream == 1).tolist() == [0, *ends[:-1].tolist()]
    assert ends[-1] == len(stream)


def test_evaluation_reads_each_chosen_window_once(tiny: Dataset) -> None:
    chosen = evaluation_set(tiny, seq_len=32, count=10)
    rows = [row for inputs, *_ in chosen.batches(4) for row in inputs.tolist()]
    expected = tiny.val.windows(chosen.window_ids, 32)[:, :-1].tolist()
    assert rows == expected
    assert [len(inputs) for inputs, *_ in chosen.batches(4)] == [4, 4, 2]
    with pytest.raises(ValueError, match="windows_per_batch=0"):
        list(chosen.batches(0))


def test_eval_id_tells_sets_apart_and_is_the_same_everywhere(tiny: Dataset, sotu: Dataset) -> None:
    # The hash of the validation set must be equal on every rank and for every seed (llm.c 792):
    # no rank or seed can even be given.
    ids = {
        evaluation_set(tiny, 32, 10).eval_id,
        evaluation_set(tiny, 32, 11).eval_id,
        evaluation_set(tiny, 16, 10).eval_id,
        evaluation_set(sotu, 32, 10).eval_id,
    }
    assert len(ids) == 4
    assert evaluation_set(open_dataset(tiny.folder), 32, 10).eval_id in ids
    everything = evaluation_set(tiny, 32, tiny.val.num_windows(32)).eval_id
    assert evaluation_set(tiny, 32).eval_id == everything


def test_target_bytes_are_the_bytes_of_the_text(sotu: Dataset) -> None:
    whole = sotu.val.tokens(0, sotu.val.num_tokens).astype(np.int64)
    assert sotu.target_bytes(whole) == sotu.val.text_bytes == 593_383
    assert sotu.target_bytes(np.array([[1, 1], [2, 0]])) == 0


def test_embedded_corpus_has_the_known_counts(sotu: Dataset) -> None:
    assert (sotu.train.num_documents, sotu.val.num_documents) == (235, 14)
    assert (sotu.train.num_tokens, sotu.val.num_tokens) == (2_702_900, 164_503)
    assert sotu.train.text_bytes == 11_592_368
    assert sotu.unigram_loss_nats == pytest.approx(6.8695, abs=1e-4)


def test_unigram_loss_follows_its_definition(tiny: Dataset) -> None:
    counts, val = Counter(stream_of(tiny.train)), stream_of(tiny.val)
    loss = 0.0
    for token in val:
        probability = (counts[token] + 0.5) / (counts.total() + 0.5 * tiny.vocab_size)
        loss -= math.log(probability) / len(val)
    assert tiny.unigram_loss_nats == pytest.approx(loss, rel=1e-9)


def test_shards_are_llm_c_files(tiny: Dataset) -> None:
    data = (tiny.folder / "train-00000.bin").read_bytes()
    header = np.frombuffer(data, "<i4", count=256)
    assert header[:2].tolist() == [20240520, 1]
    tokens = np.frombuffer(data, "<u2", offset=1024)
    assert header[2] == len(tokens)
    assert not header[3:].any()
    assert tokens.tolist() == tiny.train.shards[0].tolist()


def test_info_tells_windows_and_what_they_drop(tiny: Dataset) -> None:
    facts = info(tiny.folder, seq_len=64)
    train = facts["splits"]["train"]
    assert json.loads(json.dumps(facts)) == facts
    assert train["windows"] == tiny.train.num_windows(64)
    assert train["dropped_tokens"] == tiny.train.dropped_tokens(64)
    assert train["bytes_per_token"] == tiny.train.text_bytes / tiny.train.num_tokens
    assert "windows" not in info(tiny.folder)["splits"]["train"]


def test_tokens_cannot_be_written(tiny: Dataset) -> None:
    with pytest.raises(ValueError, match="read-only"):
        tiny.train.shards[0][0] = 5
    with pytest.raises(ValueError, match="read-only"):
        tiny.token_bytes[0] = 5


def test_pickled_set_is_its_path(tiny: Dataset) -> None:
    data = pickle.dumps(tiny)
    assert len(data) < 1_000
    again = pickle.loads(data)
    assert again.data_id == tiny.data_id
    assert again.train.tokens(5, 100).tolist() == tiny.train.tokens(5, 100).tolist()


def flip_byte(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x01
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["train-00001.bin", "val-00000.bin", "train-00002.idx"])
def test_file_that_lost_its_last_byte_is_not_opened(copied: Path, name: str) -> None:
    # "Already exists, skipping" trains on truncated shards: nanochat issue 344.
    path = copied / name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match=rf"{name} has \d+ bytes instead of \d+"):
        open_dataset(copied)
    assert [name in problem for problem in verify(copied).problems] == [True]


@pytest.mark.parametrize("position", [0, 4, 8, 900])
def test_wrong_header_is_not_opened(copied: Path, position: int) -> None:
    flip_byte(copied / "train-00001.bin", position)
    with pytest.raises(ValueError, match=r"train-00001\.bin has the header magic="):
        open_dataset(copied)


def test_missing_shard_is_not_opened(copied: Path) -> None:
    (copied / "train-00003.bin").unlink()
    with pytest.raises(ValueError, match=r"train-00003\.bin cannot be read: No such file"):
        open_dataset(copied)
    assert len(verify(copied).problems) == 1


@pytest.mark.parametrize(
    "name", ["train-00002.bin", "val-00000.idx", "tokenizer.json", "token_bytes.npy"]
)
def test_one_flipped_byte_is_named_by_verify(copied: Path, name: str) -> None:
    assert verify(copied).problems == ()
    flip_byte(copied / name, -3)
    problems = verify(copied).problems
    assert len(problems) == 1
    assert f"{name} has been altered" in problems[0]


def test_altered_manifest_is_refused(copied: Path) -> None:
    path = copied / "manifest.json"
    path.write_text(path.read_text().replace('"documents": 48', '"documents": 47'))
    for look in (open_dataset, verify, info):
        with pytest.raises(ValueError, match="was altered"):
            look(copied)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no prepared data set"),
        ("{", "is not JSON"),
        ("{}", "is no manifest"),
        ("[]", "is no manifest"),
    ],
)
def test_folder_without_a_manifest_is_refused(copied: Path, text: str | None, message: str) -> None:
    path = copied / "manifest.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(ValueError, match=message):
        open_dataset(copied)


def test_later_format_is_refused(copied: Path) -> None:
    path = copied / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["content"]["format_version"] = 99
    manifest["data_id"] = digest(manifest["content"])
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="format_version=99, and this version reads 1"):
        open_dataset(copied)


@pytest.mark.parametrize("data", [b"", b"\x93NUMPY", np.zeros(3, np.uint32).tobytes()])
def test_broken_table_of_token_bytes_is_not_opened(copied: Path, data: bytes) -> None:
    (copied / "token_bytes.npy").write_bytes(data)
    with pytest.raises(ValueError, match=r"token_bytes\.npy cannot be read"):
        open_dataset(copied)


def test_table_of_another_vocabulary_is_not_opened(copied: Path) -> None:
    np.save(copied / "token_bytes.npy", np.zeros(299, np.uint32))
    with pytest.raises(ValueError, match=r"has shape \(299,\)"):
        open_dataset(copied)


def test_hundred_shards_open_in_a_moment(
    make_dataset: Callable[..., Dataset], made_up_texts: list[str]
) -> None:
    dataset = make_dataset(made_up_texts * 4, shard_tokens=600)
    assert len(dataset.train.shards) + len(dataset.val.shards) >= 100
    seconds = []
    for _ in range(5):
        start = time.process_time()  # whatever else the machine does meanwhile
        open_dataset(dataset.folder)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.2


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {p.name: (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.iterdir()}


READER = """
import json, os, sys
from pathlib import Path
from orchestrator.data import TrainingBatches, open_dataset
dataset = open_dataset(Path(sys.argv[1]))
batches = TrainingBatches(split=dataset.train, data_seed=4, windows_per_step=8, seq_len=64)
print(json.dumps([batches.window_ids(2).tolist(), batches.batch(2)[0].sum().item()]), flush=True)
sys.stdin.readline()
print(json.dumps([batches.window_ids(9).tolist(), batches.batch(9)[0].sum().item()]), flush=True)
"""


def test_readers_share_a_read_only_folder_and_survive_a_killed_one(
    copied: Path, tiny: Dataset
) -> None:
    # Loaders that share state by name crash each other: mosaicml/streaming issues 306, 884, 217.
    before = contents(copied)
    for path in [*copied.iterdir(), copied]:
        path.chmod(stat.S_IRUSR | (stat.S_IXUSR if path.is_dir() else 0))

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, "-c", READER, str(copied)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    batches = TrainingBatches(split=tiny.train, data_seed=4, windows_per_step=8, seq_len=64)

    def expected(step: int) -> list[object]:
        return [batches.window_ids(step).tolist(), int(batches.batch(step)[0].sum())]

    readers = [start() for _ in range(4)]
    try:
        first_lines = [reader.stdout.readline() for reader in readers if reader.stdout]
        readers[0].kill()
        readers[0].communicate(timeout=30)
        readers.append(start())
        assert readers[-1].stdout is not None
        first_lines.append(readers[-1].stdout.readline())
        assert [json.loads(line) for line in first_lines] == [expected(2)] * 5
        for reader in readers[1:]:
            # Each maps the shards themselves, and no named shared memory that could outlive it.
            mapped = Path(f"/proc/{reader.pid}/maps").read_text()
            assert "train-00000.bin" in mapped
            assert "/dev/shm" not in mapped
        for reader in readers[1:]:
            rest, _ = reader.communicate("go on\n", timeout=30)
            assert reader.returncode == 0
            assert json.loads(rest) == expected(9)
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
        copied.chmod(stat.S_IRWXU)
    assert contents(copied) == before
