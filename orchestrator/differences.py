"""What the cells of a comparison differ in besides what is compared: said in `plan`, not refused.

Two things decide a comparison of mixers beside the mixers, and hide in options. The decay that a
gated rule starts with is one: with `dt_init: ones` it starts almost without memory, so a rule that
starts otherwise wins or loses by its start. Under `match: paper`, whose cells are as published and
so unequal in depth, width and size, everything else is the other.
"""

from collections.abc import Sequence
from typing import Any

from models.accounting import count_parameters
from orchestrator.config import TrialConfig, trial_to_dict

DECAY_START = "model.mixer.dt_init"

COMPARED = (
    "model.mixer.name",
    "model.stack",
    "model.softmax_every",
    "model.softmax_layers",
    "model.routing.kind",
    "optimizer.name",
    "optimizer.lr",
    "optimizer.adam_lr",
)
"""What a sweep is about, and what every row of its plan shows."""


def differences(configs: Sequence[TrialConfig], match: str) -> list[str]:
    """Sentences about what differs between cells beside what a sweep compares.

    Args:
        configs: of the cells, those that are compared with each other and no others.
        match: the sweep's matching rule.
    """
    notes = []
    starts: dict[str, set[str]] = {}
    for config in configs:
        if (start := _decay_start(config)) is not None:
            starts.setdefault(config.model.mixer.name, set()).add(start)
    # Where every rule is tried with the same starts, these are what is compared.
    if len({frozenset(tried) for tried in starts.values()}) > 1:
        named = ", ".join(f"{mixer} {' and '.join(sorted(s))}" for mixer, s in starts.items())
        notes.append(
            f"cells start with different decay ({DECAY_START}: {named}), so their losses compare "
            "starts as well as rules"
        )
    if match == "paper":
        notes += _unmatched(configs)
    return notes


def _unmatched(configs: Sequence[TrialConfig]) -> list[str]:
    unequal = [
        f"{path} ({', '.join(map(str, values))})"
        for path, values in _differing([trial_to_dict(config) for config in configs]).items()
        if path not in (*COMPARED, DECAY_START)
    ]
    if not unequal:
        return []
    sizes = [count_parameters(config.model, vocab_size=1).non_embedding for config in configs]
    return [
        f"match: paper leaves cells unequal in {', '.join(unequal)}; parameters outside "
        f"embedding and head are {min(sizes):,} to {max(sizes):,}"
    ]


def _decay_start(config: TrialConfig) -> str | None:
    """`dt_init` where the rule has a decay."""
    mixer: Any = config.model.mixer
    return None if getattr(mixer, "decay", None) == "none" else getattr(mixer, "dt_init", None)


def _differing(trials: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Dotted paths of what is trained, and how, with more than one value, absent ones apart."""
    values: dict[str, dict[str, Any]] = {}
    for trial in trials:
        for group in ("model", "optimizer", "schedule"):
            for path, value in _leaves(trial[group], group):
                if value is not None:
                    values.setdefault(path, {})[repr(value)] = value
    return {path: list(seen.values()) for path, seen in values.items() if len(seen) > 1}


def _leaves(node: Any, path: str) -> list[tuple[str, Any]]:
    if not isinstance(node, dict):
        return [(path, node)]
    return [leaf for key, value in node.items() for leaf in _leaves(value, f"{path}.{key}")]
