"""One trial's values, composed by Hydra from groups, registered options and single values."""

import copy
import difflib
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from orchestrator.compose.conf_folder import CONF_FOLDER, GROUPS
from orchestrator.compose.keys import REGISTRIES, known_paths, mapping_paths
from orchestrator.compose.sentences import explained, first_line, group_error, nearest
from orchestrator.config import TrialConfig
from orchestrator.errors import ConfigError

REGISTRY_DEFAULTS = {"model.mixer": "softmax", "optimizer": "adamw"}


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra initialised on `conf/`, whatever was initialised around it."""
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF_FOLDER), version_base="1.3"):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def _store_schema() -> None:
    """The schema as a Hydra node, so that YAML holds values and code the defaults."""
    store = ConfigStore.instance()
    store.store(name="trial_schema", node=TrialConfig)
    defaults = ["trial_schema", {"size": "nano"}, {"data": "sotu"}, "_self_"]
    store.store(name="trial", node={"defaults": defaults})


class Composer:
    """Composes one trial's values; Hydra runs once for each choice of groups.

    Attributes:
        read: paths that some trial so far had a place for.
    """

    def __init__(self, beside: Path) -> None:
        """Makes one for the sweep files of a folder, which may hold groups of its own."""
        _store_schema()
        self._search = beside if beside != CONF_FOLDER and self._has_groups(beside) else None
        self._bases: dict[tuple[str, ...], tuple[DictConfig, dict[str, Any]]] = {}
        self._missing: dict[tuple[str, ...], set[str]] = {}
        self._interpolated_groups: set[tuple[str, ...]] = set()
        self._typed: dict[tuple[Any, ...], Any] = {}
        self._schemas: dict[tuple[str, ...], DictConfig] = {}
        self.read: set[str] = {*GROUPS, *REGISTRIES}

    @staticmethod
    def _has_groups(folder: Path) -> bool:
        return any((folder / group).is_dir() for group in GROUPS)

    def values(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Nested, typed values of the trial that a flat `path: value` dict describes.

        Raises:
            ConfigError: a group, registered option or value that does not exist or fit, or a path
                that is left without a value.
        """
        config, plain = self._base(flat)
        self._refuse_missing(flat)
        settings = {p: v for p, v in flat.items() if p not in GROUPS and p not in REGISTRIES}
        if _groups(flat) in self._interpolated_groups or any(
            isinstance(v, str) and "${" in v for v in settings.values()
        ):
            return self._interpolated(config, flat, settings)
        result: dict[str, Any] = _copied(plain)
        for path, value in settings.items():
            parent = path.rpartition(".")[0]
            if not _has(plain, parent if parent in mapping_paths() else path):
                continue  # an option of another mixer or optimizer
            self.read.add(path)
            *parents, last = path.split(".")
            node = result
            for name in parents:
                node = node[name]
            node[last] = self._converted(flat, config, path, value)
        return result

    def lookup(self, flat: dict[str, Any], path: str) -> Any:
        """Value of a path where no axis sets it; raises KeyError for an unknown path."""
        if path in flat:
            return flat[path]
        if path not in known_paths():
            raise KeyError(f"unknown key {path}; {nearest(path, known_paths())}")
        node: Any = self._base(flat)[1]
        for name in path.split("."):
            node = node.get(name) if isinstance(node, dict) else None
        return node.get("name") if isinstance(node, dict) else node

    def _base(self, flat: dict[str, Any]) -> tuple[DictConfig, dict[str, Any]]:
        """The trial before single values: its groups composed, its registered options chosen."""
        for group in GROUPS:
            if not isinstance(flat.get(group, ""), str):
                raise ConfigError(f"{group}={flat[group]}: must name a file in conf/{group}")
        groups = _groups(flat)
        if groups not in self._bases:
            self._bases[groups] = self._composed(groups)
        config, plain = self._bases[groups]
        model = {**plain["model"], "mixer": _defaults("model.mixer", flat)}
        return config, {**plain, "model": model, "optimizer": _defaults("optimizer", flat)}

    def _composed(self, groups: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
        search = [f"hydra.searchpath=[file://{self._search}]"] if self._search else []
        try:
            with _hydra():
                config = compose("trial", overrides=[*search, *groups])
        except HydraException as error:
            raise ConfigError(group_error(error, groups)) from None
        except OmegaConfBaseException as error:
            raise ConfigError(explained(error, known_paths())) from None
        missing = self._missing[groups] = set(OmegaConf.missing_keys(config))
        if "${" in OmegaConf.to_yaml(config):  # to be resolved again with each cell's values
            self._interpolated_groups.add(groups)
        plain = OmegaConf.to_container(config, resolve=not missing)
        assert isinstance(plain, dict)
        return config, {str(key): value for key, value in plain.items()}

    def _refuse_missing(self, flat: dict[str, Any]) -> None:
        missing = self._missing[_groups(flat)] | {p for p, v in flat.items() if v == MISSING}
        for path in sorted(missing):
            if flat.get(path, MISSING) == MISSING:
                shown = ", ".join(f"{key}={value}" for key, value in flat.items())
                raise ConfigError(f"{path} has no value and needs one (in the cell {shown})")

    def _converted(self, flat: dict[str, Any], config: DictConfig, path: str, value: Any) -> Any:
        """The value as the schema's type; `"3e-4"` becomes a float, `1.5` into an int raises."""
        root = next((root for root in REGISTRIES if path.startswith(f"{root}.")), None)
        owner = _chosen(root, flat) if root else None
        key = (root, owner, path, repr(value))
        if key not in self._typed:
            schema = self._schema(path, root, owner, flat, config)
            inside = path.removeprefix(f"{root}.") if root else path
            _update(schema, inside, value, path)
            node = OmegaConf.select(schema, inside)
            self._typed[key] = (
                OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
            )
        return _copied(self._typed[key])

    def _schema(
        self,
        path: str,
        root: str | None,
        owner: str | None,
        flat: dict[str, Any],
        config: DictConfig,
    ) -> DictConfig:
        """Where values of one path are converted.

        One for each path, since a value of its parent, such as null, would change its type.
        """
        place = (path, root, owner) if root and owner else (path, *_groups(flat))
        if place not in self._schemas:
            self._schemas[place] = (
                _options(root, owner) if root and owner else copy.deepcopy(config)
            )
        return self._schemas[place]

    def _interpolated(
        self, config: DictConfig, flat: dict[str, Any], settings: dict[str, Any]
    ) -> dict[str, Any]:
        trial = copy.deepcopy(config)
        for root in REGISTRIES:
            OmegaConf.update(trial, root, _options(root, _chosen(root, flat)), merge=False)
        for path, value in settings.items():
            if OmegaConf.select(trial, path, default=_ABSENT) is not _ABSENT:
                self.read.add(path)
                _update(trial, path, value, path)
        try:
            plain = OmegaConf.to_container(trial, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            shown = ", ".join(f"{path}={value}" for path, value in flat.items())
            raise ConfigError(
                f"{error.full_key or 'a value'}: {first_line(error)} (in the cell {shown})"
            ) from None
        assert isinstance(plain, dict)
        return {str(key): value for key, value in plain.items()}


def _groups(flat: dict[str, Any]) -> tuple[str, ...]:
    """What Hydra is asked to compose: one file of each group that a cell names."""
    return tuple(f"{group}={flat[group]}" for group in GROUPS if group in flat)


def _chosen(root: str, flat: dict[str, Any]) -> str:
    """The registered name that a cell chooses for its mixer or optimizer.

    Raises:
        ConfigError: a name that the registry does not have.
    """
    name = flat.get(root, REGISTRY_DEFAULTS[root])
    options = REGISTRIES[root]
    if name not in options:
        near = difflib.get_close_matches(str(name), options, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}; " if near else ""
        raise ConfigError(f"{root}={name}: no such option; {hint}known: {', '.join(options)}")
    return str(name)


def _options(root: str, name: str) -> DictConfig:
    """The typed defaults of a registered option."""
    options: DictConfig = OmegaConf.structured(REGISTRIES[root][name](name=name))
    return options


def _defaults(root: str, flat: dict[str, Any]) -> dict[str, Any]:
    return _registered_defaults(root, _chosen(root, flat))


@functools.cache
def _registered_defaults(root: str, name: str) -> dict[str, Any]:
    """Defaults of a registered option; not to be written to."""
    return asdict(REGISTRIES[root][name](name=name))


def _copied(value: Any) -> Any:
    """Plain values, copied; `copy.deepcopy` takes five times as long, and there are many cells."""
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copied(item) for item in value]
    return value


_ABSENT = object()


def _has(values: dict[str, Any], path: str) -> bool:
    node: Any = values
    for name in path.split("."):
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
    return True


def _update(config: DictConfig, inside: str, value: Any, path: str) -> None:
    try:
        OmegaConf.update(config, inside, value, merge=False)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}={value!r}: {first_line(error)}") from None
