"""A sweep file: read and checked as written, and its typed form."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from orchestrator.cells import COMPARED
from orchestrator.compose.keys import paths_of, require_known
from orchestrator.compose.overrides import LISTED_KEYS, parse_override, sweep_values
from orchestrator.compose.sentences import explained, first_line, nearest
from orchestrator.config import SPEC_KEYS, SweepSpec
from orchestrator.errors import ConfigError

NOT_SEARCHED = tuple(path for path in COMPARED if path != "batch.tokens")
"""Paths that all points of a search share; tokens per step may differ at an equal budget."""


def read_sweep_file(path: Path) -> dict[str, Any]:
    """The file as written: unresolved, base flattened to dotted paths.

    Raises:
        ConfigError: it cannot be read, or holds what no sweep or no trial has.
    """
    try:
        loaded = OmegaConf.load(path)
        raw = OmegaConf.to_container(loaded, resolve=False)
    except (OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {first_line(error)}") from None
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a sweep file holds keys and values, not a {type(raw).__name__}")
    for key in raw:
        if key not in SPEC_KEYS:
            raise ConfigError(f"{path.name}: unknown key {key!s}; {nearest(str(key), SPEC_KEYS)}")
    for key, kind in (("base", dict), ("axes", dict), ("exclude", list)):
        raw[key] = raw.get(key) or kind()
        if not isinstance(raw[key], kind):
            raise ConfigError(f"{path.name}: {key} must be a {kind.__name__}, got {raw[key]!r}")
    _check_search(raw, path)
    raw["base"] = dict(_flattened(raw["base"]))
    require_known(raw["base"], f"{path.name}: base")
    for name in raw["axes"]:
        require_known({part.strip(): None for part in str(name).split(",")}, f"{path.name}: axes")
    for rule in raw["exclude"]:
        if not isinstance(rule, dict):
            raise ConfigError(
                f"{path.name}: exclude holds conditions {{path: value}}, got {rule!r}"
            )
        require_known(rule, f"{path.name}: exclude")
    return {str(key): value for key, value in raw.items()}


def _check_search(raw: dict[Any, Any], path: Path) -> None:
    """Refuse a search that is no mapping, sets unknown paths, or stands beside a grid."""
    search = raw.get("search")
    if search is None:
        return
    if not isinstance(search, dict) or not isinstance(search.get("space", {}), dict):
        raise ConfigError(f"{path.name}: search and search.space hold keys and values")
    space = search.setdefault("space", {})
    require_known(space, f"{path.name}: search.space")
    for key in ("axes", "exclude"):
        if raw[key]:
            raise ConfigError(
                f"{path.name}: {key} belongs to a grid; a search says it all in search.space, "
                "with conditions (`when`) where a value needs another"
            )
    for name in space:
        owner = next((p for p in NOT_SEARCHED if name == p or name.startswith(f"{p}.")), None)
        if owner is not None:
            raise ConfigError(
                f"{path.name}: search.space.{name} would compare losses across {owner}; "
                "search each value under a name of its own"
            )


def _flattened(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def typed_spec(raw: dict[str, Any], path: Path) -> SweepSpec:
    """The typed sweep; `base`, `axes` and `exclude` stay as they are, for the cells to resolve.

    Args:
        raw: as `read_sweep_file` returns it, overrides applied.
        path: of the file, for errors.

    Raises:
        ConfigError: a value of another type than its key's, or one that the sweep refuses.
    """
    typed = {key: value for key, value in raw.items() if key not in LISTED_KEYS}
    space: dict[str, Any] = {}
    if typed.get("search"):  # its paths have dots and its values stay as they are
        space = typed["search"].get("space", {})
        typed["search"] = {key: v for key, v in typed["search"].items() if key != "space"}
    seeds = typed.get("seeds")
    if isinstance(seeds, str):
        typed["seeds"] = sweep_values(parse_override(f"seeds={seeds}"))
    elif isinstance(seeds, int):
        typed["seeds"] = [seeds]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(SweepSpec), typed)
        if space:
            OmegaConf.update(merged, "search", {"space": space}, merge=True)
        spec = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path.name}: {explained(error, paths_of(SweepSpec))}") from None
    except ValueError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    assert isinstance(spec, SweepSpec)
    spec.base, spec.axes, spec.exclude = raw["base"], raw["axes"], raw["exclude"]
    _check_spec(spec, path)
    return spec


def _check_spec(spec: SweepSpec, path: Path) -> None:
    if not spec.name or set(spec.name) - set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-"
    ):
        raise ConfigError(
            f"{path.name}: name={spec.name!r} must be letters, digits, '.', '_' and '-' only"
        )
    if spec.name.startswith(".") or spec.name in ("data", "artifacts"):
        raise ConfigError(
            f"{path.name}: name={spec.name!r} is reserved under the root; choose another"
        )
    if not spec.seeds:
        raise ConfigError(f"{path.name}: seeds is empty; give at least one")
    for seed in spec.seeds:
        if seed < 0:
            raise ConfigError(f"{path.name}: seeds holds {seed}; seeds are 0 or more")
        if spec.seeds.count(seed) > 1:
            raise ConfigError(f"{path.name}: seeds holds {seed} {spec.seeds.count(seed)} times")
    require_known(dict.fromkeys(spec.compare_within), f"{path.name}: compare_within")
    if spec.adaptive is not None:
        for comparison in spec.adaptive.comparisons:
            for condition in (comparison.first, comparison.second):
                require_known(condition, f"{path.name}: adaptive.comparisons")
