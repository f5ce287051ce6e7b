"""Early stopping of a search: successive halving whose axis is tokens and whose losses are means.

Asynchronous successive halving (Li et al., "A System for Massively Parallel Hyperparameter Tuning",
2020, algorithm 2): of the points that have reached a rung, the best 1/η go on to the next one, as
soon as they are among them. Three things differ from the paper: a point's loss is the mean over its
seeds, never that of one run; a paused point keeps its checkpoint, so that nothing is trained twice;
and after the last point was asked for, each rung sends on at least one, so that a search of few
points has a finished one too.
"""

from collections.abc import Sequence

from orchestrator.config import AshaConfig, TrialConfig


def rung_tokens(asha: AshaConfig | None, budget_tokens: int) -> list[int]:
    """Tokens at which points are judged, ascending; the last rung is the budget.

    Raises:
        ValueError: the first rung is not below the budget.
    """
    if asha is None:
        return [budget_tokens]
    if asha.min_tokens >= budget_tokens:
        raise ValueError(
            f"search.asha.min_tokens={asha.min_tokens} must be less than "
            f"budget.tokens={budget_tokens}, or no point could be stopped"
        )
    rungs, tokens = [], asha.min_tokens
    while tokens < budget_tokens:
        rungs.append(tokens)
        tokens *= asha.reduction
    return [*rungs, budget_tokens]


def rung_steps(rungs: Sequence[int], config: TrialConfig) -> list[int]:
    """Steps of a trial at its rungs, rounded down; the last one is its end.

    Raises:
        ValueError: two rungs fall on one step, or a rung comes before the first step.
    """
    steps = [tokens // config.batch.tokens for tokens in rungs[:-1]] + [config.num_steps]
    if steps[0] < 1 or len(set(steps)) < len(steps):
        raise ValueError(
            f"search.asha puts rungs at {', '.join(str(r) for r in rungs)} tokens, but a step has "
            f"batch.tokens={config.batch.tokens}: rungs need a step each; raise "
            "search.asha.min_tokens"
        )
    return steps


def promotable(
    losses: Sequence[dict[int, float]], targets: dict[int, int], reduction: int, *, is_last: bool
) -> dict[int, int]:
    """Points that go on, with the rung that they go on to.

    Args:
        losses: for each rung, the mean loss in nats of every point that has reached it.
        targets: for each point, the highest rung that it was ever sent to, from 0.
        reduction: η, of how many points one goes on.
        is_last: whether no further points will be asked for.
    """
    found: dict[int, int] = {}
    for rung, reached in enumerate(losses[:-1]):
        keep = len(reached) // reduction
        if is_last and reached:
            keep = max(1, keep)
        # Of equal losses the point that was asked for first goes on.
        best = sorted(reached, key=lambda point: (reached[point], point))[:keep]
        found |= {point: rung + 1 for point in best if targets[point] == rung}
    return found
