"""Names of arms for people: `Gated DeltaNet · hybrid · Muon`, never an id.

A name says what tells an arm from the others of its comparison; what all share stands once, in a
subtitle.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

MIXERS = {
    "softmax": "Softmax",
    "linear": "Linear attention",
    "linear_unnormalized": "Linear, unnormalised",
    "gated_linear": "Gated linear",
    "deltanet": "DeltaNet",
    "gated_deltanet": "Gated DeltaNet",
    "kimi_delta": "Kimi Delta",
    "gated_deltanet2": "Gated DeltaNet-2",
}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon", "normuon": "NorMuon", "keller": "Keller Jordan"}
ROUTINGS = {"cler": "CLER", "cler_h": "CLER-H", "clvr": "CLVR", "attn_res": "AttnRes"}

SEPARATOR = " · "


def mixer_name(value: Any) -> str:
    """Name of a memory rule; one that is not listed is spelt from its identifier."""
    return _spelt(MIXERS, value)


def optimizer_name(value: Any) -> str:
    """Name of an optimizer; one that is not listed is spelt from its identifier."""
    return _spelt(OPTIMIZERS, value)


MOST_CHARACTERS = 40
"""Of one part of a name; a figure has no room for more. Tables have whole ids."""


def shortened(text: str) -> str:
    """One line of at most `MOST_CHARACTERS`, with an ellipsis for what is left out inside."""
    line = " ".join(text.split())
    tail = MOST_CHARACTERS // 3
    if len(line) <= MOST_CHARACTERS:
        return line
    return f"{line[: MOST_CHARACTERS - tail - 1]}…{line[-tail:]}"


def _spelt(known: Mapping[str, str], value: Any) -> str:
    text = str(value)
    if text in known:
        return known[text]
    words = shortened(text.replace("_", " "))
    return words[:1].upper() + words[1:]


def _part(column: str, value: Any) -> str:
    if column in ("mixer", "optimizer"):
        return mixer_name(value) if column == "mixer" else optimizer_name(value)
    if column == "routing":
        return "" if value == "none" else _spelt(ROUTINGS, value)
    if column in ("stack", "size"):
        return shortened(str(value))
    if column == "softmax_every":
        return f"softmax every {value:g}"
    if column == "seq_len":
        return f"{value:,.0f} tokens long"
    if column in ("tokens", "batch_tokens"):
        noun = "tokens" if column == "tokens" else "tokens a step"
        return f"{value:,.0f} {noun}"
    words = {"dt_init": "Δt", "optimizer_variant": "", "residual": "residual", "match": "match"}
    return f"{words.get(column, column)} {shortened(str(value))}".strip()


COLUMNS = (
    "mixer",
    "stack",
    "softmax_every",
    "routing",
    "residual",
    "dt_init",
    "optimizer",
    "optimizer_variant",
    "size",
    "match",
    "seq_len",
    "batch_tokens",
    "tokens",
    "precision",
)
"""What may tell arms apart, in the order in which a name says it."""


def describe_arms(trials: pd.DataFrame) -> pd.DataFrame:
    """One row per arm in order of appearance, to name it by.

    `tokens` are those of a completed replicate, null without one: a replicate that diverged has
    seen fewer, which is no other budget.
    """
    arms = trials.drop_duplicates("arm_id").copy()
    done = trials[trials["state"] == "completed"].groupby("arm_id")["tokens"].max()
    arms["tokens"] = arms["arm_id"].map(done)
    return arms


def name_arms(arms: pd.DataFrame) -> dict[str, str]:
    """A distinct name for each arm of one comparison.

    Args:
        arms: one row per arm with `arm_id`, those of `COLUMNS` and `config_json`.
    """
    shown = [name for name in COLUMNS if _varies(arms[name])]
    if arms["mixer"].notna().any() and "mixer" not in shown:
        shown.insert(0, "mixer")
    if len(arms) == 1:
        shown = [name for name in ("mixer", "stack", "optimizer") if arms[name].notna().any()]
    ids = [str(arm_id) for arm_id in arms["arm_id"]]
    labels = [_join(row, shown) for _, row in arms.iterrows()]
    return dict(zip(ids, _tell_apart(ids, labels, list(arms["config_json"])), strict=True))


def shared_facts(arms: pd.DataFrame) -> str:
    """What every arm of one comparison has in common, for a subtitle."""
    names = ["stack", "optimizer", "size", "seq_len", "tokens"]
    if len(arms) == 1:
        names.insert(0, "mixer")
    shared = [name for name in names if not _varies(arms[name]) and arms[name].notna().any()]
    parts = [_part(name, arms[name].dropna().iloc[0]) for name in shared]
    return SEPARATOR.join(part for part in parts if part)


SILENT_NULLS = ("softmax_every", "residual", "dt_init", "optimizer_variant", "tokens")
"""Null where an architecture has no such choice, which its name says already, or where nothing
completed: no difference to name."""


def _varies(values: "pd.Series[Any]") -> bool:
    return values.nunique(dropna=values.name in SILENT_NULLS) > 1


def _join(row: "pd.Series[Any]", shown: Sequence[str]) -> str:
    parts = []
    for column in shown:
        if pd.isna(row[column]):
            continue
        # A softmax model has no other kind of layer, so its stack is no news.
        if column == "stack" and row["mixer"] == "softmax" and row[column] == "pure":
            continue
        parts.append(_part(column, row[column]))
    return SEPARATOR.join(part for part in parts if part) or shortened(str(row["arm_id"]))


def _tell_apart(ids: list[str], labels: list[str], configs: list[Any]) -> list[str]:
    """Adds what differs in the configurations, then ids or numbers, to equal names."""
    twins: dict[str, list[int]] = {}
    for index, label in enumerate(labels):
        twins.setdefault(label, []).append(index)
    longer = list(labels)
    for label, members in twins.items():
        if len(members) == 1:
            continue
        flat = [_flatten(configs[index]) for index in members]
        paths = sorted({key for one in flat for key in one if not _is_rate(key)})
        differing = [p for p in paths if len({json.dumps(one.get(p)) for one in flat}) > 1]
        for index, own in zip(members, flat, strict=True):
            extra = [f"{p.rsplit('.', 1)[-1]} {shortened(str(own.get(p)))}" for p in differing[:3]]
            longer[index] = SEPARATOR.join([label, *extra])
    counts = Counter(longer)
    named = [
        f"{label} ({shortened(arm_id)})" if counts[label] > 1 else label
        for arm_id, label in zip(ids, longer, strict=True)
    ]
    if len(set(named)) == len(named):
        return named
    # Ids so long that they are equal once shortened.
    return [f"{label} #{number}" for number, label in enumerate(named, start=1)]


def _is_rate(path: str) -> bool:
    return path.rsplit(".", 1)[-1] in ("lr", "adam_lr", "seed")


def _flatten(config_json: Any) -> dict[str, Any]:
    try:
        values = json.loads(config_json) if isinstance(config_json, str) else {}
    except ValueError:
        return {}
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{prefix}.{key}" if prefix else str(key), inner)
        else:
            flat[prefix] = value

    walk("", values)
    return flat
