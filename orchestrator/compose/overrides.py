"""The command line's overrides: what they say, and a sweep file's content with them applied."""

import copy
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString, Transformer
from hydra.errors import HydraException

from orchestrator.compose.keys import require_known
from orchestrator.compose.sentences import first_line
from orchestrator.config import SPEC_KEYS
from orchestrator.errors import ConfigError
from orchestrator.store_uri import without_secret

LISTED_KEYS = {"base", "axes", "exclude"}
"""Keys of a sweep file that hold paths of trials."""


def parsed(texts: list[str]) -> list[Override]:
    """The overrides of a command line, each key once.

    Raises:
        ConfigError: one that cannot be read, or a key that is given twice.
    """
    changes = [parse_override(text) for text in texts]
    keys = [key_of(change) for change in changes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"override {key} is given {keys.count(key)} times; give it once")
    return changes


def parse_override(text: str) -> Override:
    """One override in Hydra's grammar.

    Raises:
        ConfigError: it cannot be read, adds or removes a key, or has no fixed list of values.
    """
    shown = without_secret(text)
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"override {shown!r}: {first_line(error)}") from None
    if override.is_delete() or override.is_add() or override.is_force_add():
        raise ConfigError(
            f"override {shown!r}: write key=value; keys are neither added nor removed"
        )
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(
            f"override {shown!r}: give a list, range() or choice(); it must be discrete"
        )
    if "shuffle" in text:
        raise ConfigError(f"override {shown!r}: shuffle() differs at every call, so it is refused")
    return override


def key_of(override: Override) -> str:
    """The dotted path that an override sets; `base.` may be written or left out."""
    return str(override.key_or_group).replace("/", ".").removeprefix("base.")


def sweep_values(override: Override) -> list[Any]:
    """The values of an override, also of one that has a single one."""
    if override.is_sweep_override():
        values = list(override.sweep_iterator(transformer=Transformer.identity))
        return [_plain(value) for value in values]
    value = _plain(override.value())
    return value if isinstance(value, list) else [value]


def _plain(value: Any) -> Any:
    if isinstance(value, QuotedString):
        return value.text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(_plain(key)): _plain(item) for key, item in value.items()}
    return value


def with_overrides(raw: dict[str, Any], changes: list[Override]) -> dict[str, Any]:
    """The file's content with the command line's values: of the sweep, of an axis, or of `base`.

    Args:
        raw: as `sweep_file.read_sweep_file` returns it.
        changes: each key once.

    Raises:
        ConfigError: an unknown key, or one that cannot be set like this.
    """
    result = copy.deepcopy(raw)
    swept = {part.strip(): name for name in result["axes"] for part in str(name).split(",")}
    space = (result.get("search") or {}).get("space", {})
    for change in changes:
        key, values = key_of(change), sweep_values(change)
        name = key.split(".")[0]
        if key.startswith("axes."):
            result["axes"][key.removeprefix("axes.")] = values
        elif name in SPEC_KEYS:
            _set_spec(result, key, values, change)
        elif key in space:
            _narrow(result, key, values, change)
        elif key in swept:
            _replace_axis(result["axes"], swept[key], key, values)
        elif change.is_sweep_override():
            require_known({key: None}, "override")
            if space:
                raise ConfigError(
                    f"override {key}: a search has no axes; put {key} into search.space"
                )
            result["axes"][key] = values
            result["base"].pop(key, None)
        else:
            require_known({key: None}, "override")
            result["base"][key] = _plain(change.value())
    return result


def _set_spec(result: dict[str, Any], key: str, values: list[Any], change: Override) -> None:
    if key in LISTED_KEYS:
        raise ConfigError(f"override {key}: name the path itself, e.g. budget.tokens=1_000_000")
    if key.startswith("search.space"):
        raise ConfigError(
            f"override {key}: name the path itself, e.g. optimizer=adamw or optimizer=adamw,muon"
        )
    value = values if key in ("seeds", "compare_within") else _plain(change.value())
    if change.is_sweep_override() and key not in ("seeds", "compare_within"):
        raise ConfigError(f"override {key}: takes one value, since it is no property of a cell")
    *parents, last = (f"{key}.name" if key == "cluster" else key).split(".")
    node = result
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value


def _narrow(result: dict[str, Any], key: str, values: list[Any], change: Override) -> None:
    """Fix a path of a search's space to one value, or let it choose among those typed."""
    if change.is_sweep_override():
        result["search"]["space"][key] = values
    else:
        del result["search"]["space"][key]
        result["base"][key] = _plain(change.value())


def _replace_axis(axes: dict[str, Any], name: str, key: str, values: list[Any]) -> None:
    if name != key:
        raise ConfigError(f"override {key}: it is zipped with others in axes.{name}; override that")
    axes[name] = values
