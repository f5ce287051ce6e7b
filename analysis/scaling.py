"""Time and memory against context length: exponents, growth, and where one arm overtakes another.

Times are per sequence at a constant number of tokens per step. A linear mixer tends to an exponent
of 1, attention to 2 where it dominates; at short lengths both pay for layers that don't look at
other positions, so slopes are given between neighbouring lengths and not as one line only.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.arms import mixer_rank
from analysis.naming import name_arms
from analysis.resampling import MAX_EXACT_SEEDS, resample_weights
from analysis.stats import Array
from orchestrator.records import TRIAL_COLUMNS

LENGTH_KEYS = ("seq_len", "tokens", "micro_windows", "windows", "lr", "adam_lr")
"""Configuration keys that may change along the context axis without making another family."""

COVERAGE = 0.95

RECALL_COLUMNS = tuple(name for name in TRIAL_COLUMNS if name.endswith("_accuracy"))
"""Shares of questions about earlier tokens that a model answers."""

MEASURED = ("peak_memory_bytes", "decode_tokens_per_second", *RECALL_COLUMNS)
"""What is drawn against length beside the training time."""


def local_exponents(lengths: Array, values: Array) -> Array:
    """Slope of log value against log length between neighbours; [lengths - 1]."""
    return np.asarray(np.diff(np.log(values)) / np.diff(np.log(lengths)))


def exponent(lengths: Array, values: Array) -> float:
    """Least-squares slope of log value against log length; at least two lengths."""
    if len(lengths) < 2:
        raise ValueError(f"an exponent needs at least 2 lengths, got {len(lengths)}")
    return float(np.polyfit(np.log(lengths), np.log(values), 1)[0])


def growth_percent(first: float, last: float) -> float:
    """How much `last` is above `first`, in per cent of `first`."""
    return 100.0 * (last / first - 1.0)


def crossover(lengths: Array, first: Array, second: Array) -> float | None:
    """Length from which on `first` is larger, between logarithmically interpolated curves.

    Args:
        lengths: [lengths], ascending.
        first: [lengths], positive, such as tokens per second.
        second: the same of the other arm.

    Returns:
        The last length at which the difference turns from negative to positive; none where it
        never does, in particular where `first` is ahead everywhere.
    """
    gap = np.log(first) - np.log(second)
    turns = np.flatnonzero((gap[:-1] < 0) & (gap[1:] >= 0))
    if len(turns) == 0 or gap[-1] < 0:
        return None
    at = int(turns[-1])
    share = -gap[at] / (gap[at + 1] - gap[at])
    logs = np.log(lengths)
    return float(np.exp(logs[at] + share * (logs[at + 1] - logs[at])))


@dataclass(frozen=True, kw_only=True, slots=True)
class Crossover:
    """Where one family overtakes another.

    Attributes:
        first: label of the family that is ahead beyond it.
        second: label of the other.
        length: tokens; none where it is not bracketed by measured lengths.
        low: smallest of the middle 95 % of seed draws; NaN below two common seeds.
        high: largest of them; infinite where some draws never cross.
        words: what can be said, such as `> 8192`.
    """

    first: str
    second: str
    length: float | None
    low: float
    high: float
    words: str


def crossover_range(lengths: Array, first: Array, second: Array) -> tuple[float, float]:
    """Middle 95 % of the crossover over exact draws of the seeds.

    Args:
        lengths: [lengths], ascending.
        first: [lengths, seeds], positive.
        second: the same seeds of the other arm.

    Returns:
        NaN and NaN for one seed; a draw that never crosses counts as infinite.
    """
    n = first.shape[1]
    if not 2 <= n <= MAX_EXACT_SEEDS:
        return math.nan, math.nan
    weights, probabilities = resample_weights(n)
    found = np.array(
        [
            math.inf if (at := crossover(lengths, first @ w / n, second @ w / n)) is None else at
            for w in weights
        ]
    )
    order = np.argsort(found, kind="stable")
    cumulative = np.cumsum(probabilities[order])
    tail = (1 - COVERAGE) / 2
    ends = np.minimum(np.searchsorted(cumulative, [tail - 1e-12, 1 - tail - 1e-12]), len(found) - 1)
    return float(found[order[ends[0]]]), float(found[order[ends[1]]])


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Arms that differ in context length only.

    Attributes:
        label: name for people, without the length.
        mixer: its memory rule.
        optimizer: its optimizer.
        stack: its stack.
        lengths: measured lengths in tokens, ascending.
        seeds: seeds that every length has.
        speeds: tokens per second [lengths, seeds], pooled over learning rates.
        measures: column to its mean [lengths], NaN where not measured: peak memory, decoding speed,
            accuracies of recall, and `held_bytes`, the recurrent state and KV cache that a sequence
            of this length holds.
        out_of_memory: lengths at which a replicate ran out of memory and none was measured.
    """

    label: str
    mixer: str
    optimizer: str
    stack: str
    lengths: Array
    seeds: tuple[int, ...]
    speeds: Array
    measures: dict[str, Array]
    out_of_memory: tuple[int, ...]

    @property
    def seconds(self) -> Array:
        """Mean training seconds per sequence [lengths]."""
        return np.asarray(self.lengths / self.speeds.mean(axis=1))


def build_families(trials: pd.DataFrame) -> tuple[Family, ...]:
    """Families with a speed at two lengths or more; empty where length does not vary.

    Args:
        trials: `Sweep.trials`, of all groups.
    """
    if trials["seq_len"].nunique() < 2:
        return ()
    arms = trials.drop_duplicates("arm_id")
    keys = {row["arm_id"]: _family_key(row) for _, row in arms.iterrows()}
    rows = trials.assign(family=trials["arm_id"].map(keys))
    firsts = rows.drop_duplicates("family").assign(
        arm_id=lambda frame: frame["family"], seq_len=0, batch_tokens=0, tokens=0, config_json=None
    )
    labels = name_arms(firsts)
    families = []
    for key, members in rows.groupby("family", sort=False):
        family = _build_family(labels[str(key)], members)
        if family is not None:
            families.append(family)
    return tuple(sorted(families, key=lambda f: (mixer_rank(f.mixer), f.label)))


FAMILY_COLUMNS = (
    "mixer",
    "stack",
    "softmax_every",
    "routing",
    "residual",
    "dt_init",
    "optimizer",
    "optimizer_variant",
    "size",
    "precision",
)


def _family_key(row: "pd.Series[Any]") -> str:
    facts = [str(row[name]) for name in FAMILY_COLUMNS]
    try:
        config = json.loads(row["config_json"]) if row["config_json"] else None
    except ValueError:
        config = None
    return json.dumps([facts, _without_lengths(config)], sort_keys=True)


def _without_lengths(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_lengths(v) for k, v in value.items() if k not in LENGTH_KEYS}
    return value


def _build_family(label: str, members: pd.DataFrame) -> Family | None:
    timed = members[members["tokens_per_second"].notna()]
    table = timed.pivot_table(
        index="seq_len", columns="seed", values="tokens_per_second", aggfunc="mean"
    ).dropna(axis=1)
    if len(table) < 2 or table.shape[1] == 0:
        return None
    blown = members[members["failure_class"].isin(["oom_gpu", "oom_host"])]
    lost = sorted(set(blown["seq_len"]) - set(table.index))
    first = members.iloc[0]

    def means(column: str) -> Array:
        return timed.groupby("seq_len")[column].mean().reindex(table.index).to_numpy(dtype=float)

    measures = {name: means(name) for name in MEASURED}
    lengths = table.index.to_numpy(dtype=float)
    measures["held_bytes"] = means("state_bytes") + lengths * means("kv_bytes_per_token")
    return Family(
        label=label,
        mixer=str(first["mixer"]),
        optimizer=str(first["optimizer"]),
        stack=str(first["stack"]),
        lengths=lengths,
        seeds=tuple(int(seed) for seed in table.columns),
        speeds=table.to_numpy(dtype=float),
        measures=measures,
        out_of_memory=tuple(int(length) for length in lost),
    )


def scaling_sentences(families: tuple[Family, ...]) -> list[str]:
    """What the timings say: growth of every family, and where it overtakes softmax."""
    sentences = []
    for family in families:
        per_token = family.seconds / family.lengths
        grown = growth_percent(float(per_token[0]), float(per_token[-1]))
        lost = ", ".join(f"{length:,}" for length in family.out_of_memory)
        sentences.append(
            f"{family.label}: from {family.lengths[0]:,.0f} to {family.lengths[-1]:,.0f} tokens of "
            f"context the time per token changes by {grown:+.0f} %"
            + (f"; out of memory at {lost}." if lost else ".")
        )
    for found in find_crossovers(families):
        interval = ""
        if math.isfinite(found.low):
            high = f"{found.high:,.0f}" if math.isfinite(found.high) else "beyond"
            interval = f" (middle 95 % of seed draws {found.low:,.0f} to {high})"
        sentences.append(
            f"{found.first} trains faster than {found.second} {found.words}{interval}."
        )
    return sentences


def find_crossovers(families: tuple[Family, ...]) -> list[Crossover]:
    """Where each family overtakes the softmax family of its optimizer in training speed."""
    found = []
    for base in families:
        if base.mixer != "softmax":
            continue
        others = [f for f in families if f.mixer != "softmax" and f.optimizer == base.optimizer]
        found += [_crossover_of(other, base) for other in others]
    return found


def _pick(family: Family, lengths: Array, seeds: list[int]) -> Array:
    columns = [family.seeds.index(seed) for seed in seeds]
    return family.speeds[np.isin(family.lengths, lengths)][:, columns]


def _crossover_of(family: Family, base: Family) -> Crossover:
    lengths = np.array(sorted(set(family.lengths) & set(base.lengths)))
    seeds = [seed for seed in family.seeds if seed in base.seeds]
    length, low, high = None, math.nan, math.nan
    if len(lengths) < 2 or not seeds:
        words = "no common lengths and seeds"
    else:
        first, second = (_pick(each, lengths, seeds) for each in (family, base))
        length = crossover(lengths, first.mean(axis=1), second.mean(axis=1))
        ahead = first.mean(axis=1) >= second.mean(axis=1)
        if length is not None:
            low, high = crossover_range(lengths, first, second)
            words = f"from {length:,.0f} tokens on"
        elif ahead.all():
            words = f"at every length from {lengths[0]:,.0f} tokens"
        else:
            words = f"not up to {lengths[-1]:,.0f} tokens"
    return Crossover(
        first=family.label, second=base.label, length=length, low=low, high=high, words=words
    )
