"""The recall probes of a trial: the same questions for every cell and seed, asked once at its end.

A model of text has not seen these tasks, so an answer shows that it reads from its context. What is
kept are all scores, each beside the accuracy of guessing, and one accuracy per kind of task.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator.training.evaluate import LogitModel
from orchestrator.training.probes import (
    RecallTask,
    associative_recall,
    needle,
    score_recall,
    two_hop,
)
from orchestrator.training.recall_config import RecallConfig
from orchestrator.training.runtime import Runtime

TOKENS_PER_PAIR = 4
"""Length of an associative task: two for the pair, one to ask, one to spare."""

SEED = 0
"""Of the questions, which are no sample of anything that a trial's seed stands for."""

KINDS = ("recall", "needle", "two_hop")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallResult:
    """How one task went.

    Attributes:
        kind: `recall`, `needle` or `two_hop`.
        size: pairs, length of the haystack, or chains.
        depth: of the needle; None for other kinds.
        accuracy: share of questions answered.
        loss_nats: mean cross-entropy of the answers.
        questions: their number.
        chance: accuracy of a guess among the tokens that can be answers.
    """

    kind: str
    size: int
    depth: float | None = None
    accuracy: float
    loss_nats: float
    questions: int
    chance: float


def ask_recall(
    model: LogitModel, config: RecallConfig, vocab_size: int, runtime: Runtime
) -> list[RecallResult]:
    """Asks a model every task of the options, in their order; empty where they ask nothing.

    Args:
        model: on the runtime's device.
        config: what to ask.
        vocab_size: of the model.
        runtime: device and arithmetic.

    Raises:
        ValueError: a task that the vocabulary cannot hold.
    """
    results = []
    for kind, size, depth, task in _tasks(config, vocab_size):
        score = score_recall(model, task, runtime=runtime)
        answers = (vocab_size - 1) // (2 if kind == "recall" else 3)
        results.append(
            RecallResult(
                kind=kind,
                size=size,
                depth=depth,
                accuracy=score.accuracy,
                loss_nats=score.loss_nats,
                questions=score.questions,
                chance=1 / answers,
            )
        )
    return results


def accuracies(results: list[RecallResult]) -> dict[str, float | None]:
    """Mean accuracy over the tasks of each kind, by the column of the records; None without any."""
    found: dict[str, float | None] = {}
    for kind in KINDS:
        own = [result.accuracy for result in results if result.kind == kind]
        found[f"{kind}_accuracy"] = sum(own) / len(own) if own else None
    return found


def _tasks(
    config: RecallConfig, vocab_size: int
) -> Iterator[tuple[str, int, float | None, RecallTask]]:
    if not config.num_sequences:
        return
    generator = np.random.default_rng(SEED)
    common: dict[str, Any] = {"num_sequences": config.num_sequences, "vocab_size": vocab_size}
    for pairs in config.pairs:
        length = TOKENS_PER_PAIR * pairs
        task = associative_recall(generator, num_pairs=pairs, seq_len=length, **common)
        yield "recall", pairs, None, task
    for length in config.lengths:
        for depth in config.depths:
            yield "needle", length, depth, needle(generator, seq_len=length, depth=depth, **common)
    for chains in config.chains:
        yield "two_hop", chains, None, two_hop(generator, num_chains=chains, **common)
