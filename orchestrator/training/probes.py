"""Recall probes: sequences whose answers stand earlier in them, and how many a model finds.

A loss on text hides recall, since few tokens need it. Here nothing else is asked. Three tasks, each
drawn at its function: many pairs and many questions (`associative_recall`), one pair in a haystack
by depth and length (`needle`), and a question whose answer is two look-ups away (`two_hop`).

Tokens are split by their role, so that a key is never a value: 0 is the filler, the rest of the
vocabulary is halved into keys and values, or cut into three parts where a task needs one more. A
task gives inputs and targets, `[num_sequences, seq_len]` each; a target is `NO_ANSWER` where
nothing is asked. The same arrays train a model (`recall_loss`) and test one (`score_recall`).

Source of the first task: Arora et al., "Zoology", arXiv 2312.04927, section 4; here questions may
stand at every position after the pairs, not at every second one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.training.evaluate import LogitModel
from orchestrator.training.runtime import Runtime

FILLER = 0
NO_ANSWER = -100
"""The target of a position where nothing is asked; `cross_entropy` leaves it out by default."""

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecallTask:
    """Sequences with questions.

    Attributes:
        inputs: `[num_sequences, seq_len]`.
        targets: the answer at each position that asks, else `NO_ANSWER`.
    """

    inputs: Tokens
    targets: Tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallScore:
    """How well questions were answered.

    Attributes:
        accuracy: share of questions whose answer had the largest logit of all tokens.
        loss_nats: mean cross-entropy of the answers.
        questions: their number.
    """

    accuracy: float
    loss_nats: float
    questions: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NeedleCell:
    """One cell of the table that `score_needles` makes.

    Attributes:
        seq_len: length of the haystack.
        depth: where in it the pair stood, 0 at the start and 1 at the end.
        score: what the model found.
    """

    seq_len: int
    depth: float
    score: RecallScore


def associative_recall(
    generator: np.random.Generator,
    *,
    num_sequences: int,
    num_pairs: int,
    seq_len: int,
    vocab_size: int,
    gap_power: float = 0.01,
) -> RecallTask:
    """Pairs of key and value, then each key once more, asking for its value.

    `associative_recall(np.random.default_rng(0), num_sequences=1, num_pairs=2, seq_len=10,
    vocab_size=9)`:

        position     0     1     2     3     4     5     6     7     8     9
                   key value   key value   ask               ask
        input        3     6     4     5     3     0     0     4     0     0
        target       .     .     .     .     6     .     .     5     .     .

    A question comes after a gap g with probability proportional to g ** (gap_power − 1), because
    that is how repetitions in text are spaced: most are near, and some are anywhere. Uniform gaps
    would ask nearly all questions from far away, and a model that only keeps the recent past would
    look worse than it is on text.

    Args:
        generator: source of all draws.
        num_sequences: rows.
        num_pairs: pairs, and questions, of each row.
        seq_len: at least 3 · `num_pairs`.
        vocab_size: at least 2 · `num_pairs` + 2, so that keys and values differ within a row.
        gap_power: 1 for uniform gaps; nearer to 0, nearer questions.

    Raises:
        ValueError: a sequence or vocabulary that cannot hold the pairs.
    """
    if num_pairs < 1 or seq_len < 3 * num_pairs:
        raise ValueError(
            f"{seq_len=} must hold {num_pairs=} (at least 1) with their questions: at least "
            f"{3 * max(1, num_pairs)}"
        )
    keys, values = _parts(vocab_size, 2, num_pairs)
    inputs, targets = _empty(num_sequences, seq_len)
    slots = np.arange(1, seq_len - 2 * num_pairs + 1)
    weights = slots ** (gap_power - 1.0)
    for row_inputs, row_targets in zip(inputs, targets, strict=True):
        row_keys = generator.choice(keys, num_pairs, replace=False)
        row_values = generator.choice(values, num_pairs, replace=False)
        row_inputs[: 2 * num_pairs] = np.stack([row_keys, row_values], axis=1).ravel()
        gaps = generator.choice(slots, num_pairs, replace=False, p=weights / weights.sum())
        asked_at = 2 * num_pairs - 1 + gaps
        row_inputs[asked_at] = row_keys
        row_targets[asked_at] = row_values
    return RecallTask(inputs, targets)


def needle(
    generator: np.random.Generator,
    *,
    num_sequences: int,
    seq_len: int,
    depth: float,
    vocab_size: int,
) -> RecallTask:
    """One pair in a haystack of other tokens; the last position asks for it.

    `needle(np.random.default_rng(0), num_sequences=1, seq_len=8, depth=0.4, vocab_size=13)`:

        position     0     1     2     3     4     5     6     7
                  straw straw   key value straw straw straw   ask
        input        4     3     5    12     2     1     1     5
        target       .     .     .     .     .     .     .    12

    Args:
        generator: source of all draws.
        num_sequences: rows.
        seq_len: at least 3.
        depth: 0 for a pair at the start, 1 for one right before the question.
        vocab_size: at least 4: straw, keys and values are a third each.

    Raises:
        ValueError: too short a sequence, too small a vocabulary, or a depth outside [0, 1].
    """
    if seq_len < 3:
        raise ValueError(f"{seq_len=} must hold a pair and its question: at least 3")
    if not 0 <= depth <= 1:
        raise ValueError(f"{depth=} must lie in [0, 1]")
    straw, keys, values = _parts(vocab_size, 3, 1)
    inputs, targets = _empty(num_sequences, seq_len)
    inputs[:] = generator.choice(straw, (num_sequences, seq_len))
    start = round(depth * (seq_len - 3))
    inputs[:, start] = inputs[:, -1] = generator.choice(keys, num_sequences)
    inputs[:, start + 1] = targets[:, -1] = generator.choice(values, num_sequences)
    return RecallTask(inputs, targets)


def two_hop(
    generator: np.random.Generator,
    *,
    num_sequences: int,
    num_chains: int,
    vocab_size: int,
) -> RecallTask:
    """Chains first → middle → last, as shuffled pairs; the end asks from one first for its last.

    `two_hop(np.random.default_rng(0), num_sequences=1, num_chains=2, vocab_size=13)`:

        position     0     1     2     3     4     5     6     7     8
                     pair        pair        pair        pair     ask
        input        5     9     4     5     6    12     3     6     4
        target       .     .     .     .     .     .     .     .     9

    Here 4 → 5 and 5 → 9. One look-up finds 5, which is no answer; the second finds 9.

    Args:
        generator: source of all draws.
        num_sequences: rows, of 4 · `num_chains` + 1 tokens.
        num_chains: chains of each row.
        vocab_size: at least 3 · `num_chains` + 1: firsts, middles and lasts are a third each.

    Raises:
        ValueError: no chain, or a vocabulary that cannot hold them.
    """
    if num_chains < 1:
        raise ValueError(f"{num_chains=} must be at least 1")
    parts = _parts(vocab_size, 3, num_chains)
    inputs, targets = _empty(num_sequences, 4 * num_chains + 1)
    for row_inputs, row_targets in zip(inputs, targets, strict=True):
        firsts, middles, lasts = (generator.choice(p, num_chains, replace=False) for p in parts)
        pairs = np.concatenate([np.stack([firsts, middles], 1), np.stack([middles, lasts], 1)])
        row_inputs[:-1] = generator.permutation(pairs).ravel()
        asked = int(generator.integers(num_chains))
        row_inputs[-1] = firsts[asked]
        row_targets[-1] = lasts[asked]
    return RecallTask(inputs, targets)


def recall_loss(model: LogitModel, inputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the answers in nats, to train on a task.

    Args:
        model: on the tensors' device.
        inputs: `[B, T]`.
        targets: `[B, T]`, `NO_ANSWER` where nothing is asked.
    """
    is_asked = targets != NO_ANSWER
    return F.cross_entropy(model(inputs)[is_asked].float(), targets[is_asked])


@torch.no_grad()
def score_recall(
    model: LogitModel, task: RecallTask, *, runtime: Runtime, tokens_per_batch: int = 16_384
) -> RecallScore:
    """Asks a model every question of a task.

    Args:
        model: on the runtime's device.
        task: whose tokens the model knows.
        runtime: device and arithmetic.
        tokens_per_batch: most tokens of one forward pass of several rows, each of which has the
            logits of the whole vocabulary.
    """
    device = runtime.torch_device
    found, loss, questions = 0, 0.0, 0
    num_rows = max(1, tokens_per_batch // task.inputs.shape[1])
    for first in range(0, len(task.inputs), num_rows):
        rows = slice(first, first + num_rows)
        inputs = torch.from_numpy(task.inputs[rows]).to(device)
        targets = torch.from_numpy(task.targets[rows]).to(device)
        is_asked = targets != NO_ANSWER
        with runtime.autocast():
            logits = model(inputs)[is_asked].float()
        answers = targets[is_asked]
        found += int((logits.argmax(-1) == answers).sum())
        loss += F.cross_entropy(logits, answers, reduction="sum").item()
        questions += len(answers)
    return RecallScore(accuracy=found / questions, loss_nats=loss / questions, questions=questions)


def score_needles(
    model: LogitModel,
    generator: np.random.Generator,
    *,
    seq_lens: Iterable[int],
    depths: Iterable[float],
    vocab_size: int,
    num_sequences: int,
    runtime: Runtime,
) -> list[NeedleCell]:
    """A model's score at finding one pair, for each length and depth.

    Args:
        model: on the runtime's device.
        generator: source of all draws.
        seq_lens: lengths of the haystack.
        depths: places of the pair, each in [0, 1].
        vocab_size: of the model.
        num_sequences: questions for each cell.
        runtime: device and arithmetic.
    """
    depths = list(depths)
    cells = []
    for seq_len in seq_lens:
        for depth in depths:
            task = needle(
                generator,
                num_sequences=num_sequences,
                seq_len=seq_len,
                depth=depth,
                vocab_size=vocab_size,
            )
            score = score_recall(model, task, runtime=runtime)
            cells.append(NeedleCell(seq_len=seq_len, depth=depth, score=score))
    return cells


def _parts(vocab_size: int, count: int, at_least: int) -> list[Tokens]:
    """The vocabulary without its filler, cut into equal parts; leftovers at the end are unused."""
    size = (vocab_size - 1) // count
    if size < at_least:
        raise ValueError(
            f"{vocab_size=} must be at least {count * at_least + 1}: a filler and {count} parts of "
            f"{at_least}"
        )
    return [np.arange(1 + i * size, 1 + (i + 1) * size) for i in range(count)]


def _empty(num_sequences: int, seq_len: int) -> tuple[Tokens, Tokens]:
    if num_sequences < 1:
        raise ValueError(f"{num_sequences=} must be at least 1")
    shape = (num_sequences, seq_len)
    return np.full(shape, FILLER, np.int64), np.full(shape, NO_ANSWER, np.int64)
