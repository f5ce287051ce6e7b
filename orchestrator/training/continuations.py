"""How likely a model finds given continuations: what multiple-choice tasks ask."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from orchestrator.training.evaluate import LogitModel
from orchestrator.training.runtime import Runtime

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of its continuation, each at least one."""


class Scored(NamedTuple):
    """A continuation as a model sees it.

    Attributes:
        log_probability: of the whole continuation given the context, natural logarithm.
        is_greedy: whether each of its tokens is the most likely one where it stands.
    """

    log_probability: float
    is_greedy: bool


@torch.no_grad()
def score_continuations(
    model: LogitModel,
    pairs: Sequence[Pair],
    *,
    max_length: int,
    runtime: Runtime,
    pairs_per_batch: int = 8,
) -> list[Scored]:
    """Scores pairs in their order, by full forward passes over pairs of similar length.

    A row is padded behind its end, which no earlier position can see.

    Args:
        model: on the runtime's device.
        pairs: what to score.
        max_length: most tokens that a model reads; of longer pairs the first ones are cut off.
        runtime: device and arithmetic.
        pairs_per_batch: rows of one forward pass.

    Raises:
        ValueError: an empty context or continuation, or a continuation that leaves no room for one
            token of context.
    """
    for context, continuation in pairs:
        if not context or not 1 <= len(continuation) <= max_length:
            raise ValueError(
                f"a context of {len(context)} and a continuation of {len(continuation)} tokens: "
                f"each needs one token, and the continuation at most {max_length}"
            )
    order = sorted(range(len(pairs)), key=lambda i: -len(pairs[i][0]) - len(pairs[i][1]))
    scores: list[Scored | None] = [None] * len(pairs)
    for first in range(0, len(order), pairs_per_batch):
        members = order[first : first + pairs_per_batch]
        batch = [pairs[i] for i in members]
        for index, score in zip(members, _scored(model, batch, max_length, runtime), strict=True):
            scores[index] = score
    return [score for score in scores if score is not None]


def _scored(
    model: LogitModel, batch: Sequence[Pair], max_length: int, runtime: Runtime
) -> list[Scored]:
    # The last token predicts nothing that is asked, so a row reads one more than it is long.
    rows = [[*context, *continuation][-(max_length + 1) :] for context, continuation in batch]
    longest = max(len(row) for row in rows) - 1
    inputs = torch.tensor([row[:-1] + [0] * (longest + 1 - len(row)) for row in rows])
    with runtime.autocast():
        logits = model(inputs.to(runtime.torch_device))
    scores = []
    for row, (_, continuation), row_logits in zip(rows, batch, logits, strict=True):
        last = len(row) - 1
        asked: Tensor = row_logits[last - len(continuation) : last].float().log_softmax(-1)
        targets = torch.tensor(list(continuation), device=asked.device)
        total = asked.gather(1, targets[:, None]).double().sum().item()
        scores.append(Scored(total, bool((asked.argmax(-1) == targets).all())))
    return scores
