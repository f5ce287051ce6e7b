"""From a sweep file and the command line to a validated `SweepSpec` and its resolved cells.

    sweep_file   a YAML file of `conf/` or the user's, read and checked    conf_folder, keys
    overrides    the command line's values, over those of the file
    composer     one cell's values: Hydra's groups, registered options, single values

The only package that imports Hydra and OmegaConf. Hydra finds files and groups (`size`, `data`) and
parses overrides; the schema is the dataclasses of `orchestrator.config`. What leaves this package
is plain Python: dataclasses and dicts that survive JSON.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.axes import Assignment, AxisError, Expansion, expand
from orchestrator.cells import Cell, resolve_cells
from orchestrator.compose.composer import Composer
from orchestrator.compose.conf_folder import find_conf
from orchestrator.compose.overrides import key_of, parsed, with_overrides
from orchestrator.compose.sweep_file import read_sweep_file, typed_spec
from orchestrator.config import SweepSpec
from orchestrator.errors import ConfigError
from orchestrator.space import Space

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
    raw = read_sweep_file(path)
    changes = parsed(overrides)
    try:
        composer = Composer(path.parent)
        as_written = _expand(raw, composer)
        if as_written.unmatched:
            raise ConfigError(f"{path.name}: {as_written.unmatched[0]}")
        changed = with_overrides(raw, changes)
        spec = typed_spec(changed, path)
        expansion = _expand(changed, composer) if changes else as_written
        cells, notes = resolve_cells(spec, expansion.cells, composer.values)
        typed = {key_of(change) for change in changes}
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
def _composer_beside(folder: Path) -> Composer:
    """One for all points of a search: Hydra takes longer than everything else about a point."""
    return Composer(folder)


def _space(raw: dict[str, Any], composer: Composer) -> Space | None:
    values = (raw.get("search") or {}).get("space")
    if not values:
        return None
    return Space(values, lambda path: composer.lookup(raw["base"], path))


def _expand(raw: dict[str, Any], composer: Composer) -> Expansion:
    space = _space(raw, composer)
    if space is not None:
        corners, unmet = space.corners(MOST_CORNERS)
        return Expansion(corners, [], [f"search.space: no point meets {name}" for name in unmet])
    return expand(raw["axes"], raw["exclude"], lambda path: composer.lookup(raw["base"], path))


def _unread(spec: SweepSpec, composer: Composer, path: Path, asked: set[str]) -> list[str]:
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
