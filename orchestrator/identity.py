"""Names that follow from content: cells, arms, replicates.

A cell is the full resolved configuration without its seed and without what changes no result; an
arm is a cell without its learning rates; a replicate is a cell with a seed. Ids are a letter and
hexadecimal digits, so that no parser takes one for a number.
"""

import hashlib
import json
import math
from typing import Any

NON_SEMANTIC_KEYS = (
    "log",
    "checkpoint",
    "batch.micro_windows",
    "model.impl",
    "model.recompute",
    "model.compile",
)
"""Dotted paths that decide how a trial runs or what it writes, not what it computes."""

LEARNING_RATE_KEYS = ("optimizer.lr", "optimizer.adam_lr")
"""Dotted paths that a learning-rate choice ranges over."""

LATER_KEYS = {"data.mask_documents": False, "data.first_token_loss": True}
"""Dotted paths that came after ids had been given, and the values that say what was meant before:
at these they are no part of an id, so that results from before keep theirs."""

ID_HEX_DIGITS = 12
"""48 bits: among a million cells a collision has a chance of 0.2 %."""

STABLE_TYPES = frozenset((type(None), bool, int, str))
"""Types every value of which has one JSON text; most values of a configuration are of these."""


def canonical_json(value: Any) -> str:
    """The one JSON text of a value: keys sorted, no spaces, floats by their shortest form.

    Raises:
        TypeError: something without a stable form (a set, a path, an array, an object, a key that
            is no string), named by its path.
        ValueError: a number that is not finite, named by its path.
    """
    _require_stable(value, "")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def _require_stable(value: Any, path: str) -> None:
    where = path or "the value"
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} is {value}: only finite numbers have an identity")
        return
    if isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if type(item) not in STABLE_TYPES:
                _require_stable(item, f"{path}[{index}]")
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where} has the key {key!r}, which is not a string")
            if type(item) not in STABLE_TYPES:
                _require_stable(item, f"{path}.{key}" if path else key)
        return
    raise TypeError(f"{where} is a {type(value).__name__}, which has no stable JSON form")


def digest(value: Any, digits: int = ID_HEX_DIGITS) -> str:
    """Leading hexadecimal digits of the sha256 of a value's canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:digits]


def without(config: dict[str, Any], paths: tuple[str, ...]) -> dict[str, Any]:
    """A nested configuration less some dotted paths; absent ones are ignored.

    Only the dictionaries along these paths are copied, the others are those of `config`.
    """
    result = dict(config)
    for path in paths:
        *parents, last = path.split(".")
        node: Any = result
        for name in parents:
            if not isinstance(node.get(name), dict):
                break
            node[name] = dict(node[name])
            node = node[name]
        else:
            node.pop(last, None)
    return result


def cell_id(config: dict[str, Any]) -> str:
    """Id of a resolved configuration, whatever its seed, device and log cadence."""
    return "c" + digest(without(config, NON_SEMANTIC_KEYS + _unsaid(config)))


def arm_id(config: dict[str, Any]) -> str:
    """Id of a resolved configuration, whatever its seed and learning rates."""
    left_out = NON_SEMANTIC_KEYS + LEARNING_RATE_KEYS + _unsaid(config)
    return "a" + digest(without(config, left_out))


def _unsaid(config: dict[str, Any]) -> tuple[str, ...]:
    """Those of `LATER_KEYS` that are as before they came."""
    found = []
    for path, before in LATER_KEYS.items():
        group, key = path.split(".")
        values = config.get(group)
        if isinstance(values, dict) and values.get(key) is before:
            found.append(path)
    return tuple(found)


def replicate_id(cell: str, seed: int) -> str:
    """Id of one seeded run of a cell."""
    return f"{cell}-s{seed}"
