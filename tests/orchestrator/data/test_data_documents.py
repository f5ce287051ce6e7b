"""Where documents end inside windows: the drawn example, brute force, ids that stay."""

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import orchestrator.data.documents
from orchestrator.data import (
    DataConfig,
    Dataset,
    DocumentRule,
    Split,
    TrainingBatches,
    evaluation_set,
    locate,
)
from tests.orchestrator.data.conftest import jsonl_config

MASKED = DataConfig(mask_documents=True)
WITHOUT_FIRST = DataConfig(first_token_loss=False)
BOTH = DataConfig(mask_documents=True, first_token_loss=False)


def split_of(*lengths: int) -> Split:
    """A split of documents of these lengths, each token the number of its document."""
    tokens = np.repeat(np.arange(len(lengths)), lengths).astype("<u2")
    return Split(
        name="train",
        shards=(tokens,),
        indices=(np.cumsum(lengths).astype("<u8"),),
        num_tokens=len(tokens),
        num_documents=len(lengths),
        text_bytes=0,
        _starts=(0,),
    )


def rule_of(split: Split, config: DataConfig) -> DocumentRule:
    rule = DocumentRule.of(split, config)
    assert rule is not None
    return rule


def test_the_drawn_example_is_what_happens() -> None:
    split, ids = split_of(3, 3, 5), np.arange(2)
    drawing = [line[14:] for line in orchestrator.data.documents.__doc__.splitlines()[6:9]]
    columns = [i for i, letter in enumerate(drawing[0]) if letter in "abc"]
    rule = rule_of(split, BOTH)
    drawn = [int(drawing[1][i]) for i in columns if drawing[1][i].isdigit()]
    assert rule.bounds(ids, 5).tolist() == [*drawn, 10]
    drawn = [i < len(drawing[2]) and drawing[2][i] == "^" for i in columns]
    assert (~rule.counted(ids, 5)).ravel().tolist() == drawn


@settings(max_examples=50)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=3, max_size=20),
    seq_len=st.integers(1, 8),
    data=st.data(),
)
def test_bounds_and_counted_targets_equal_a_look_at_every_token(
    lengths: list[int], seq_len: int, data: st.DataObject
) -> None:
    split = split_of(*lengths, seq_len + 1)
    ids = st.lists(st.integers(0, split.num_windows(seq_len) - 1), min_size=1, max_size=4)
    chosen = np.array(data.draw(ids))
    rule = rule_of(split, BOTH)
    windows = split.windows(chosen, seq_len).astype(int)
    expected = [0]
    for row in windows[:, :-1].tolist():
        runs = [len(list(run)) for _, run in itertools.groupby(row)]
        expected += (expected[-1] + np.cumsum(runs)).tolist()
    assert rule.bounds(chosen, seq_len).tolist() == expected
    counted = windows[:, 1:] == windows[:, :-1]
    assert rule.counted(chosen, seq_len).tolist() == counted.tolist()


def test_documents_are_cut_where_the_index_says_across_shards(tiny: Dataset) -> None:
    assert len(tiny.train.shards) > 3
    rule, starts = rule_of(tiny.train, MASKED), tiny.train.document_ends()[:-1].astype(int)
    ids = np.arange(tiny.train.num_windows(64))
    bounds = rule.bounds(ids, 64)
    inside = starts[starts < len(ids) * 64]
    assert bounds.tolist() == sorted({*range(0, len(ids) * 64 + 1, 64), *inside.tolist()})
    assert (tiny.train.tokens(0, 64 * len(ids))[inside] == 1).all()


def test_a_start_token_inside_a_text_begins_nothing(make_dataset: Callable[..., Dataset]) -> None:
    dataset = make_dataset(["one <s> two </s> three", "", "four"] * 5, vocab_size=265)
    rule = rule_of(dataset.train, MASKED)
    # `<s>` before each document, and a document without text is one of its own.
    assert (dataset.train.tokens(0, dataset.train.num_tokens)[rule.starts] == 1).all()
    assert len(rule.starts) == 12


def test_a_batch_carries_what_its_options_ask_for(tiny: Dataset) -> None:
    def batches(config: DataConfig) -> TrainingBatches:
        return TrainingBatches(
            split=tiny.train,
            data_seed=1,
            windows_per_step=8,
            seq_len=64,
            rule=DocumentRule.of(tiny.train, config),
        )

    plain, masked, without_first = (batches(c) for c in (DataConfig(), MASKED, WITHOUT_FIRST))
    assert plain.rule is None
    assert plain.batch(3)[2:] == (None, None)
    assert masked.batch(3).counted is None
    assert without_first.batch(3).bounds is None
    parts = [masked.batch(3, micro_step=step, num_micro_steps=2).bounds for step in range(2)]
    joined = [*parts[0], *(parts[1][1:] + 4 * 64)]
    assert joined == masked.batch(3).bounds.tolist()
    assert masked.counted_targets(3) == plain.counted_targets(3) == 8 * 64
    assert without_first.counted_targets(3) == without_first.batch(3).counted.sum() < 8 * 64
    assert np.array_equal(masked.batch(3).inputs, plain.batch(3).inputs)


def test_options_of_reading_are_no_part_of_the_data_but_of_the_evaluation(
    make_dataset: Callable[..., Dataset], tmp_path, made_up_texts: list[str]
) -> None:
    dataset = make_dataset(made_up_texts)
    config = jsonl_config(tmp_path / "texts.jsonl")
    plain = evaluation_set(dataset, 32, 4)
    assert evaluation_set(dataset, 32, 4, config).eval_id == plain.eval_id
    ids = {plain.eval_id}
    for options in (MASKED, WITHOUT_FIRST, BOTH):
        read = dataclasses.replace(config, **options.reading_options)
        assert locate(read, tmp_path) == dataset.folder
        ids.add(evaluation_set(dataset, 32, 4, read).eval_id)
    assert len(ids) == 4
    assert "mask_documents" not in dataset.manifest["content"]["settings"]


@pytest.mark.parametrize("config", [MASKED, WITHOUT_FIRST])
def test_the_last_batch_of_an_evaluation_is_cut_as_well(tiny: Dataset, config: DataConfig) -> None:
    whole = next(evaluation_set(tiny, 32, 5, config).batches(5))
    parts = list(evaluation_set(tiny, 32, 5, config).batches(2))
    assert [len(part.inputs) for part in parts] == [2, 2, 1]
    if config.mask_documents:
        assert whole.bounds[-1] == sum(part.bounds[-1] for part in parts)
        assert len(whole.bounds) - 1 == sum(len(part.bounds) - 1 for part in parts)
    else:
        assert np.array_equal(np.concatenate([p.counted for p in parts]), whole.counted)
