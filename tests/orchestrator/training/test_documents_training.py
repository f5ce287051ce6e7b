"""Documents in trials: equal sums however a step is cut, one rule for training and scoring."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from orchestrator.config import BatchConfig, BudgetConfig, CheckpointConfig, trial_to_dict
from orchestrator.data import DataConfig, evaluation_set, open_dataset
from orchestrator.identity import arm_id, cell_id
from orchestrator.training.checkpoint import CheckpointMismatchError
from orchestrator.training.evaluate import evaluate
from orchestrator.training.loop import load_micro_batches, train_step
from orchestrator.training.ranks import Alone
from orchestrator.training.runtime import Runtime
from orchestrator.training.session import open_session
from orchestrator.training.windows import on_device
from orchestrator.trial import ListJournal, measure_speed, run_trial

MASKED = DataConfig(vocab_size=300, mask_documents=True)
BOTH = DataConfig(vocab_size=300, mask_documents=True, first_token_loss=False)
LONG = {"seq_len": 128, "batch": BatchConfig(tokens=512), "budget": BudgetConfig(tokens=2048)}


def open_long(tiny_trial, folder, data, **changes):
    config = tiny_trial(mixer="gated_deltanet", stack="hybrid", data=data, **(LONG | changes))
    return open_session(config, seed=0, data_folder=folder, runtime=Runtime())


def step_gradients(session, ranks=None):
    batches = list(
        load_micro_batches(
            session.batches, session.config, 0, session.runtime, *([ranks] if ranks else [])
        )
    )
    loss, _ = train_step(session.model, session.optimizer, batches, 1e9, session.runtime)
    return loss.item(), [p.grad.clone() for p in session.model.parameters()]


class Half(Alone):
    """One of two ranks, as far as the windows that it reads."""

    world_size = 2

    def __init__(self, rank):
        self.rank = rank


def assert_equal_gradients(actual, expected):
    for got, want in zip(actual, expected, strict=True):
        assert torch.allclose(got, want, rtol=0, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("data", [MASKED, BOTH], ids=["masked", "without_first"])
def test_however_a_step_is_cut_its_targets_weigh_alike(tiny_trial, data_folder, data):
    whole_loss, whole = step_gradients(open_long(tiny_trial, data_folder, data))
    parts = open_long(tiny_trial, data_folder, data, batch=BatchConfig(tokens=512, micro_windows=1))
    loss, gradients = step_gradients(parts)
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert_equal_gradients(gradients, whole)
    halves = [
        step_gradients(open_long(tiny_trial, data_folder, data), Half(rank)) for rank in (0, 1)
    ]
    assert sum(loss for loss, _ in halves) / 2 == pytest.approx(whole_loss, rel=1e-6)
    means = [(a + b) / 2 for a, b in zip(*(g for _, g in halves), strict=True)]
    assert_equal_gradients(means, whole)


def test_a_step_learns_from_the_targets_that_count(tiny_trial, data_folder):
    session = open_long(tiny_trial, data_folder, BOTH)
    read = session.batches.batch(0)
    assert 0 < (~read.counted).sum() < 16
    batch = on_device(read, torch.device("cpu"))
    losses = session.model.token_losses(batch.inputs, batch.targets, batch.documents)
    expected = losses.detach().numpy()[read.counted].mean()
    assert step_gradients(session)[0] == pytest.approx(expected, rel=1e-6)


class HashedLosses:
    """A fixed loss in [0, 8) of each target, whatever the documents."""

    def token_losses(self, inputs, targets, documents=None):
        return ((inputs * 31 + targets * 17) % 64).float() / 8


def test_a_score_weighs_windows_by_the_targets_that_count(data_folder):
    dataset = open_dataset(data_folder)
    windows = evaluation_set(dataset, 96, 6, DataConfig(first_token_loss=False))
    result = evaluate(HashedLosses(), dataset, windows, windows_per_batch=4, runtime=Runtime())
    inputs, targets, *_ = dataset.val.batch(windows.window_ids, 96)
    starts = dataset.val.document_ends()[:-1].astype(int)
    counted = ~np.isin(windows.window_ids[:, None] * 96 + 1 + np.arange(96), starts)
    losses = ((inputs * 31 + targets * 17) % 64) / 8
    loss, counts = losses[counted].mean(), counted.sum(1)
    assert len(set(counts.tolist())) > 1
    assert result.tokens == counted.sum()
    assert result.loss_nats == pytest.approx(loss, rel=1e-12)
    num_bytes = dataset.token_bytes[targets][counted].sum()
    bits = losses[counted].sum() / math.log(2) / num_bytes
    assert result.bits_per_byte == pytest.approx(bits, rel=1e-12)
    # The linearised error of a ratio of two means.
    distances = (losses * counted).sum(1) - loss * counts
    error = distances.std(ddof=1) / counts.mean() / 6**0.5
    assert result.standard_error == pytest.approx(error, rel=1e-12)


@pytest.fixture(scope="module")
def ended(data_folder):
    """Builds the end of a trial's journal."""

    def run(config, **options):
        journal = ListJournal()
        run_trial(
            config, seed=0, data_folder=data_folder, runtime=Runtime(), journal=journal, **options
        )
        return journal.events

    return run


def test_documents_change_a_trial_and_leaving_them_be_changes_nothing(tiny_trial, ended):
    def losses(data):
        events = ended(tiny_trial(mixer="deltanet", data=data, **LONG))
        return events[0]["eval_id"], events[-1]["val_loss_nats"]

    plain = losses(DataConfig(vocab_size=300))
    said = DataConfig(vocab_size=300, mask_documents=False, first_token_loss=True)
    assert losses(said) == plain
    others = [losses(data) for data in (MASKED, BOTH)]
    assert len({plain, *others}) == len({eval_id for eval_id, _ in (plain, *others)}) == 3


def test_a_checkpoint_of_the_plain_stream_is_not_continued_with_documents(
    tiny_trial, ended, tmp_path
):
    every = CheckpointConfig(every_steps=2)
    plain = tiny_trial(data=DataConfig(vocab_size=300), checkpoint=every, **LONG)
    ended(plain, checkpoint_folder=tmp_path, pause_step=2)
    masked = dataclasses.replace(plain, data=MASKED)
    with pytest.raises(CheckpointMismatchError, match="mask_documents is None there and True here"):
        ended(masked, checkpoint_folder=tmp_path)
    assert ended(plain, checkpoint_folder=tmp_path)[0]["resumed_from_step"] == 2


def test_speed_is_measured_on_documents(tiny_trial, data_folder, monkeypatch):
    seen = []
    original = open_session.__globals__["build_model"]

    def build(*arguments):
        model = original(*arguments)
        loss = model.loss
        model.loss = lambda *given: seen.append(given[2]) or loss(*given)
        return model

    monkeypatch.setitem(open_session.__globals__, "build_model", build)
    measure_speed(
        tiny_trial(mixer="linear", data=MASKED, **LONG),
        seed=0,
        data_folder=data_folder,
        runtime=Runtime(),
        steps=1,
        warmup_steps=0,
    )
    assert len(seen) == 1
    assert len(seen[0].cu_seqlens) > 5


def test_ids_know_of_documents_only_where_they_are_told_apart(tiny_trial):
    plain = trial_to_dict(tiny_trial())
    before = trial_to_dict(tiny_trial())
    for name in ("mask_documents", "first_token_loss"):
        del before["data"][name]
    assert (cell_id(before), arm_id(before)) == (cell_id(plain), arm_id(plain))
    changed = [{"mask_documents": True}, {"first_token_loss": False}]
    for identify in (cell_id, arm_id):
        others = {identify(plain | {"data": plain["data"] | data}) for data in changed}
        assert len(others | {identify(plain)}) == 3


def test_compiled_layers_and_documents_are_refused_together(tiny_trial):
    config = tiny_trial()
    compiled = dataclasses.replace(config.model, compile=True)
    with pytest.raises(ValueError, match=r"model\.compile=true with data\.mask_documents=true"):
        dataclasses.replace(config, model=compiled, data=MASKED)
