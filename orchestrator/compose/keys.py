"""The dotted paths that a trial has, and the registries that some of them choose from."""

from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from typing import Any, get_type_hints

from models.configs import MIXER_CONFIGS
from orchestrator.compose.conf_folder import GROUPS
from orchestrator.compose.sentences import nearest
from orchestrator.config import TrialConfig, dataclass_in
from orchestrator.errors import ConfigError
from orchestrator.training.optim.configs import OPTIMIZER_CONFIGS

REGISTRIES: dict[str, dict[str, Any]] = {
    "model.mixer": MIXER_CONFIGS,
    "optimizer": OPTIMIZER_CONFIGS,
}
"""Paths whose value chooses a registered dataclass, and the registry."""


def require_known(paths: dict[str, Any], where: str) -> None:
    """Refuse paths that no trial has; `where` says who names them.

    Raises:
        ConfigError: an unknown path, with the nearest ones, or one that only groups others.
    """
    known = known_paths()
    for path in paths:
        if path in known or path.rpartition(".")[0] in mapping_paths():
            continue
        if any(name.startswith(f"{path}.") for name in known):
            raise ConfigError(f"{where}: {path} holds keys of its own; set one of them")
        raise ConfigError(f"{where}: unknown key {path}; {nearest(path, known)}")


@cache
def known_paths() -> frozenset[str]:
    """Every dotted path that some trial has, whatever its mixer and optimizer."""
    paths = set(paths_of(TrialConfig)) | {*GROUPS, *REGISTRIES}
    for cls in MIXER_CONFIGS.values():
        paths |= {f"model.mixer.{path}" for path in paths_of(cls)}
    for option in OPTIMIZER_CONFIGS.values():
        paths |= {f"optimizer.{path}" for path in paths_of(option)}
    return frozenset(paths - {"match", "model.mixer.name", "optimizer.name"})


@cache
def mapping_paths() -> frozenset[str]:
    """Dotted paths whose value is a mapping, so that any key below them is one of its entries."""
    owners: list[tuple[str, Any]] = [("model.mixer.", cls) for cls in MIXER_CONFIGS.values()]
    return frozenset(
        f"{prefix}{item.name}"
        for prefix, cls in [*owners, *(("optimizer.", o) for o in OPTIMIZER_CONFIGS.values())]
        for item in fields(cls)
        if getattr(get_type_hints(cls)[item.name], "__origin__", None) is dict
    )


def paths_of(cls: type[Any]) -> Iterator[str]:
    """The dotted paths of a dataclass's values, through the dataclasses in it."""
    hints = get_type_hints(cls)
    for item in fields(cls):
        nested = dataclass_in(hints[item.name])
        if nested is None:
            yield item.name
        else:
            yield from (f"{item.name}.{path}" for path in paths_of(nested))
