"""From a sweep file and the command line to a validated `SweepSpec` and its resolved cells.

The only file that imports Hydra and OmegaConf. Hydra finds files and groups (`size`, `data`) and
parses overrides; the schema is the dataclasses of `orchestrator.config`. What leaves this file is
plain Python: dataclasses and dicts that survive JSON.
"""

import copy
import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString, Transformer
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from models.configs import MIXER_CONFIGS
from orchestrator.axes import Assignment, AxisError, Expansion, expand
from orchestrator.cells import COMPARED, Cell, resolve_cells
from orchestrator.config import SPEC_KEYS, SweepSpec, TrialConfig, dataclass_in
from orchestrator.errors import ConfigError
from orchestrator.space import Space
from orchestrator.training.optim.configs import OPTIMIZER_CONFIGS

CONF_FOLDER = Path(__file__).resolve().parent.parent / "conf"
GROUPS = ("size", "data")
"""Paths whose value chooses a YAML file in the group's folder under `conf/`."""

REGISTRIES: dict[str, dict[str, Any]] = {
    "model.mixer": MIXER_CONFIGS,
    "optimizer": OPTIMIZER_CONFIGS,
}
"""Paths whose value chooses a registered dataclass, and the registry."""

REGISTRY_DEFAULTS = {"model.mixer": "softmax", "optimizer": "adamw"}

NOT_SEARCHED = tuple(path for path in COMPARED if path != "batch.tokens")
"""Paths that all points of a search share; tokens per step may differ at an equal budget."""

LISTED_KEYS = {"base", "axes", "exclude"}

MOST_CORNERS = 512
"""Points of a search's space that are resolved to check it before anything runs."""


@dataclass(frozen=True, slots=True)
class Sweep:
    """A sweep file with its overrides, resolved.

    Attributes:
        spec: what the file and the command line say.
        cells: the resolved cells, in axis order, each once; of a search, corners of its space
            until it has asked for points.
        excluded: for each exclusion in order, the cells it removed.
        notes: sentences worth printing: dropped conditions, merged cells.
        conf_path: the sweep file.
        overrides: the command line's overrides, as typed.
        space: of a search; None for a grid.
    """

    spec: SweepSpec
    cells: list[Cell]
    excluded: list[int]
    notes: list[str]
    conf_path: Path
    overrides: list[str]
    space: Space | None = None


def load_sweep(conf: str, overrides: list[str], folder: Path) -> Sweep:
    """The sweep that a file and overrides describe; nothing is started or written.

    Args:
        conf: name of a file in `conf/`, or a path ending in .yaml or .yml.
        overrides: Hydra overrides, also lists of values: `optimizer=adamw,muon`, `seeds=range(5)`.
        folder: folder that a relative path starts from.

    Raises:
        ConfigError: anything that cannot be run as written.
    """
    path = find_conf(conf, folder)
    raw = _read(path)
    changes = [_parse_override(text) for text in overrides]
    _refuse_duplicates(changes)
    try:
        composer = _Composer(path.parent)
        as_written = _expand(raw, composer)
        if as_written.unmatched:
            raise ConfigError(f"{path.name}: {as_written.unmatched[0]}")
        changed = _with_overrides(raw, changes)
        spec = _spec(changed, path)
        expansion = _expand(changed, composer) if changes else as_written
        cells, notes = resolve_cells(spec, expansion.cells, composer.values)
        typed = {_key(change) for change in changes}
        notes += _unread(spec, composer, path, typed if changes else set(spec.base))
        space = _space(changed, composer)
    except AxisError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    dropped = [f"dropped after the overrides: {text}" for text in expansion.unmatched]
    return Sweep(spec, cells, expansion.excluded, dropped + notes, path, overrides, space)


def resolve_points(sweep: Sweep, points: list[Assignment]) -> list[Cell]:
    """The cell of each point of a search, in their order; equal cells stay.

    Raises:
        ConfigError: a point with values that their owners refuse together.
    """
    composer = _composer_beside(sweep.conf_path.parent)
    return [resolve_cells(sweep.spec, [point], composer.values)[0][0] for point in points]


@cache
def _composer_beside(folder: Path) -> "_Composer":
    """One for all points of a search: Hydra takes longer than everything else about a point."""
    return _Composer(folder)


def find_conf(conf: str, folder: Path) -> Path:
    """The sweep file of a name in `conf/` or of a path.

    Raises:
        ConfigError: there is no such file; the nearest names are listed.
    """
    if conf.endswith((".yaml", ".yml")):
        path = (folder / Path(conf).expanduser()).resolve()
        if not path.is_file():
            raise ConfigError(f"conf={conf}: there is no file {path}")
        return path
    path = CONF_FOLDER / f"{conf}.yaml"
    if path.is_file():
        return path
    names = conf_names()
    near = difflib.get_close_matches(conf, names, n=3, cutoff=0.4) or names
    raise ConfigError(
        f"conf={conf}: no such sweep in conf/; nearest: {', '.join(near)} "
        "(a path must end in .yaml)"
    )


def conf_names() -> list[str]:
    """Names of the sweeps in `conf/`."""
    groups = set(GROUPS) | {"cluster"}
    tables = {"published"}  # results of others, which a report can show beside its own
    return sorted(
        str(path.relative_to(CONF_FOLDER).with_suffix(""))
        for path in CONF_FOLDER.rglob("*.yaml")
        if path.relative_to(CONF_FOLDER).parts[0] not in groups and path.stem not in tables
    )


# The sweep file ----------------------------------------------------------------------------------


def _read(path: Path) -> dict[str, Any]:
    """The file as written: unresolved, base flattened to dotted paths."""
    try:
        loaded = OmegaConf.load(path)
        raw = OmegaConf.to_container(loaded, resolve=False)
    except (OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {_first_line(error)}") from None
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a sweep file holds keys and values, not a {type(raw).__name__}")
    for key in raw:
        if key not in SPEC_KEYS:
            raise ConfigError(f"{path.name}: unknown key {key!s}; {_nearest(str(key), SPEC_KEYS)}")
    for key, kind in (("base", dict), ("axes", dict), ("exclude", list)):
        raw[key] = raw.get(key) or kind()
        if not isinstance(raw[key], kind):
            raise ConfigError(f"{path.name}: {key} must be a {kind.__name__}, got {raw[key]!r}")
    _check_search(raw, path)
    raw["base"] = dict(_flattened(raw["base"]))
    _require_known(raw["base"], f"{path.name}: base")
    for name in raw["axes"]:
        _require_known({part.strip(): None for part in str(name).split(",")}, f"{path.name}: axes")
    for rule in raw["exclude"]:
        if not isinstance(rule, dict):
            raise ConfigError(
                f"{path.name}: exclude holds conditions {{path: value}}, got {rule!r}"
            )
        _require_known(rule, f"{path.name}: exclude")
    return {str(key): value for key, value in raw.items()}


def _check_search(raw: dict[Any, Any], path: Path) -> None:
    """Refuse a search that is no mapping, sets unknown paths, or stands beside a grid."""
    search = raw.get("search")
    if search is None:
        return
    if not isinstance(search, dict) or not isinstance(search.get("space", {}), dict):
        raise ConfigError(f"{path.name}: search and search.space hold keys and values")
    space = search.setdefault("space", {})
    _require_known(space, f"{path.name}: search.space")
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


def _require_known(paths: dict[str, Any], where: str) -> None:
    known = known_paths()
    for path in paths:
        if path in known or path.rpartition(".")[0] in mapping_paths():
            continue
        if any(name.startswith(f"{path}.") for name in known):
            raise ConfigError(f"{where}: {path} holds keys of its own; set one of them")
        raise ConfigError(f"{where}: unknown key {path}; {_nearest(path, known)}")


@cache
def known_paths() -> frozenset[str]:
    """Every dotted path that some trial has, whatever its mixer and optimizer."""
    paths = set(_paths(TrialConfig)) | {*GROUPS, *REGISTRIES}
    for cls in MIXER_CONFIGS.values():
        paths |= {f"model.mixer.{path}" for path in _paths(cls)}
    for option in OPTIMIZER_CONFIGS.values():
        paths |= {f"optimizer.{path}" for path in _paths(option)}
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


def _paths(cls: type[Any]) -> Iterator[str]:
    hints = get_type_hints(cls)
    for item in fields(cls):
        nested = dataclass_in(hints[item.name])
        if nested is None:
            yield item.name
        else:
            yield from (f"{item.name}.{path}" for path in _paths(nested))


def _spec(raw: dict[str, Any], path: Path) -> SweepSpec:
    """The typed sweep; `base`, `axes` and `exclude` stay as they are, for the cells to resolve."""
    typed = {key: value for key, value in raw.items() if key not in LISTED_KEYS}
    space: dict[str, Any] = {}
    if typed.get("search"):  # its paths have dots and its values stay as they are
        space = typed["search"].get("space", {})
        typed["search"] = {key: v for key, v in typed["search"].items() if key != "space"}
    seeds = typed.get("seeds")
    if isinstance(seeds, str):
        typed["seeds"] = _sweep_values(_parse_override(f"seeds={seeds}"))
    elif isinstance(seeds, int):
        typed["seeds"] = [seeds]
    try:
        merged = OmegaConf.merge(OmegaConf.structured(SweepSpec), typed)
        if space:
            OmegaConf.update(merged, "search", {"space": space}, merge=True)
        spec = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path.name}: {_explained(error, _spec_paths())}") from None
    except ValueError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    assert isinstance(spec, SweepSpec)
    spec.base, spec.axes, spec.exclude = raw["base"], raw["axes"], raw["exclude"]
    _check_spec(spec, path)
    return spec


def _spec_paths() -> tuple[str, ...]:
    return tuple(_paths(SweepSpec))


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
    _require_known(dict.fromkeys(spec.compare_within), f"{path.name}: compare_within")
    if spec.adaptive is not None:
        for comparison in spec.adaptive.comparisons:
            for condition in (comparison.first, comparison.second):
                _require_known(condition, f"{path.name}: adaptive.comparisons")


# The command line --------------------------------------------------------------------------------


def _parse_override(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ConfigError(f"override {text!r}: {_first_line(error)}") from None
    if override.is_delete() or override.is_add() or override.is_force_add():
        raise ConfigError(f"override {text!r}: write key=value; keys are neither added nor removed")
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(
            f"override {text!r}: give a list, range() or choice(); it must be discrete"
        )
    if "shuffle" in text:
        raise ConfigError(f"override {text!r}: shuffle() differs at every call, so it is refused")
    return override


def _key(override: Override) -> str:
    return str(override.key_or_group).replace("/", ".").removeprefix("base.")


def _refuse_duplicates(changes: list[Override]) -> None:
    keys = [_key(change) for change in changes]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"override {key} is given {keys.count(key)} times; give it once")


def _sweep_values(override: Override) -> list[Any]:
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


def _with_overrides(raw: dict[str, Any], changes: list[Override]) -> dict[str, Any]:
    """The file's content with the command line's values: of the sweep, of an axis, or of `base`."""
    result = copy.deepcopy(raw)
    swept = {part.strip(): name for name in result["axes"] for part in str(name).split(",")}
    space = (result.get("search") or {}).get("space", {})
    for change in changes:
        key, values = _key(change), _sweep_values(change)
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
            _require_known({key: None}, "override")
            if space:
                raise ConfigError(
                    f"override {key}: a search has no axes; put {key} into search.space"
                )
            result["axes"][key] = values
            result["base"].pop(key, None)
        else:
            _require_known({key: None}, "override")
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


# Trials ------------------------------------------------------------------------------------------


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


class _Composer:
    """Composes one trial's values; Hydra runs once for each choice of groups."""

    def __init__(self, beside: Path) -> None:
        _store_schema()
        self._search = beside if beside != CONF_FOLDER and self._has_groups(beside) else None
        self._bases: dict[tuple[str, ...], tuple[DictConfig, dict[str, Any]]] = {}
        self._missing: dict[tuple[str, ...], set[str]] = {}
        self._typed: dict[tuple[Any, ...], Any] = {}
        self._options: dict[tuple[str, str], DictConfig] = {}
        self.read: set[str] = {*GROUPS, *REGISTRIES}

    @staticmethod
    def _has_groups(folder: Path) -> bool:
        return any((folder / group).is_dir() for group in GROUPS)

    def values(self, flat: dict[str, Any]) -> dict[str, Any]:
        """Nested, typed values of the trial that a flat `path: value` dict describes."""
        config, plain = self._base(flat)
        self._refuse_missing(flat)
        settings = {p: v for p, v in flat.items() if p not in GROUPS and p not in REGISTRIES}
        if any(isinstance(v, str) and "${" in v for v in settings.values()):
            return self._interpolated(config, flat, settings)
        result = copy.deepcopy(plain)
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
            raise KeyError(f"unknown key {path}; {_nearest(path, known_paths())}")
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
            raise ConfigError(_group_error(error, groups)) from None
        except OmegaConfBaseException as error:
            raise ConfigError(_explained(error, known_paths())) from None
        missing = self._missing[groups] = set(OmegaConf.missing_keys(config))
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
            if root and owner:
                if (root, owner) not in self._options:
                    options = REGISTRIES[root][owner](name=owner)
                    self._options[root, owner] = OmegaConf.structured(options)
                config = self._options[root, owner]
            inside = path.removeprefix(f"{root}.") if root else path
            _update(config, inside, value, path)
            node = OmegaConf.select(config, inside)
            self._typed[key] = (
                OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
            )
        return copy.deepcopy(self._typed[key])

    def _interpolated(
        self, config: DictConfig, flat: dict[str, Any], settings: dict[str, Any]
    ) -> dict[str, Any]:
        trial = copy.deepcopy(config)
        for root, registry in REGISTRIES.items():
            name = _chosen(root, flat)
            options = OmegaConf.structured(registry[name](name=name))
            OmegaConf.update(trial, root, options, merge=False)
        for path, value in settings.items():
            if OmegaConf.select(trial, path, default=_ABSENT) is not _ABSENT:
                self.read.add(path)
                _update(trial, path, value, path)
        try:
            plain = OmegaConf.to_container(trial, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            shown = ", ".join(f"{path}={value}" for path, value in flat.items())
            raise ConfigError(
                f"{error.full_key or 'a value'}: {_first_line(error)} (in the cell {shown})"
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
    registry = REGISTRIES[root]
    if name not in registry:
        near = difflib.get_close_matches(str(name), registry, n=3, cutoff=0.4)
        hint = f"nearest: {', '.join(near)}; " if near else ""
        raise ConfigError(f"{root}={name}: no such option; {hint}known: {', '.join(registry)}")
    return str(name)


def _defaults(root: str, flat: dict[str, Any]) -> dict[str, Any]:
    name = _chosen(root, flat)
    return asdict(REGISTRIES[root][name](name=name))


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
        raise ConfigError(f"{path}={value!r}: {_first_line(error)}") from None


def _space(raw: dict[str, Any], composer: _Composer) -> Space | None:
    values = (raw.get("search") or {}).get("space")
    if not values:
        return None
    return Space(values, lambda path: composer.lookup(raw["base"], path))


def _expand(raw: dict[str, Any], composer: _Composer) -> Expansion:
    space = _space(raw, composer)
    if space is not None:
        corners, unmet = space.corners(MOST_CORNERS)
        return Expansion(corners, [], [f"search.space: no point meets {name}" for name in unmet])
    return expand(raw["axes"], raw["exclude"], lambda path: composer.lookup(raw["base"], path))


def _unread(spec: SweepSpec, composer: _Composer, path: Path, asked: set[str]) -> list[str]:
    """Notes on base values that no cell has a place for, for example options of an absent mixer.

    Raises:
        ConfigError: such a value among those `asked` for: typed on the command line, or in a file
            that no override has emptied.
    """
    unread = [key for key in spec.base if key not in composer.read]
    for key in unread:
        if key in asked:
            raise ConfigError(f"{path.name}: {key} is set, but no cell of this sweep reads it")
    return [f"no cell is left that reads {key}" for key in unread]


# Sentences ---------------------------------------------------------------------------------------


def _nearest(name: str, names: Iterable[str]) -> str:
    known = sorted(names)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    if not near:
        last = name.split(".")[-1]
        near = [k for k in known if k.split(".")[-1] == last][:3]
    return f"nearest: {', '.join(near)}" if near else f"known: {', '.join(known)}"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


def _explained(error: OmegaConfBaseException, names: Iterable[str]) -> str:
    key = getattr(error, "full_key", None) or getattr(error, "key", None)
    text = _first_line(error)
    if key and "not in" in text:
        return f"unknown key {key}; {_nearest(str(key), names)}"
    return f"{key}: {text}" if key else text


def _group_error(error: HydraException, groups: tuple[str, ...]) -> str:
    """One sentence for a group option that does not exist, with the options that do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    for choice in groups:
        group, name = choice.split("=", 1)
        if f"'{group}/{name}'" in lines[0]:
            options = [line for line in lines[2:] if not line.startswith(("Config", "provider"))]
            near = difflib.get_close_matches(name, options, n=3, cutoff=0.4)
            hint = f"nearest: {', '.join(near)}; " if near else ""
            return f"{group}={name}: no such option; {hint}known: {', '.join(options)}"
    return lines[0]
