"""From axes, conditions and exclusions to the list of cells, each a flat `path: value` dict.

    axes:
      model.mixer: [softmax, deltanet]          a grid axis
      optimizer: [adamw, muon]
      optimizer.lr:                             a conditional axis: the entries whose `when` holds
        - {when: {optimizer: adamw}, values: [1e-3, 3e-3]}
        - {when: {optimizer: muon},  values: [3e-4, 1e-3]}
      "seq_len, batch.tokens":                  a zipped axis: paths that move together
        - [256, 512]
        - [512, 1024]
    exclude:
      - {model.mixer: softmax, optimizer: muon}

A condition holds where the cell has the value, or one of the values in a list. Where no entry of a
conditional axis holds, the cell keeps its base value.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

Assignment = dict[str, Any]
Lookup = Callable[[str], Any]
"""Value of a dotted path where no axis sets it; raises KeyError for an unknown path."""


class AxisError(ValueError):
    """An axis, condition or exclusion that cannot mean what it says."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """The cells of a grid and what became of its rules.

    Attributes:
        cells: one assignment for each cell, in axis order, the last axis fastest.
        excluded: for each exclusion in order, how many cells it removed first.
        unmatched: sentences on conditions and exclusions that matched no cell.
    """

    cells: list[Assignment]
    excluded: list[int]
    unmatched: list[str]


@dataclass(frozen=True, slots=True)
class _Entry:
    """Values of an axis where a condition holds; the empty condition always does."""

    when: dict[str, Any]
    values: list[Any]


@dataclass(frozen=True, slots=True)
class _Axis:
    paths: tuple[str, ...]
    entries: list[_Entry]
    conditions: frozenset[str] = field(default_factory=frozenset)


def expand(axes: dict[str, Any], exclude: list[dict[str, Any]], lookup: Lookup) -> Expansion:
    """The cells that axes and exclusions describe.

    Args:
        axes: dotted path, or several joined by commas, to its values.
        exclude: conditions; a cell that meets all entries of one of them is left out.
        lookup: value of a path that no axis sets.

    Raises:
        AxisError: an empty or repeated value, a malformed entry, conditions in a circle, or a
            path in a condition that does not exist.
    """
    parsed = [_parse(name, values) for name, values in axes.items()]
    unmatched: list[str] = []
    cells: list[Assignment] = [{}]
    for axis in in_dependency_order(parsed):
        cells = _apply(axis, cells, lookup, unmatched)
    order = [path for axis in parsed for path in axis.paths]
    cells = [{path: cell[path] for path in order if path in cell} for cell in cells]
    kept, excluded = _exclude(cells, exclude, lookup, unmatched)
    return Expansion(cells=kept, excluded=excluded, unmatched=unmatched)


def _parse(name: str, values: Any) -> _Axis:
    paths = tuple(path.strip() for path in name.split(","))
    if not isinstance(values, list):
        raise AxisError(f"axes.{name} must be a list of values, got {values!r}")
    if not values:
        raise AxisError(f"axes.{name} has no values; remove the axis or give it some")
    conditional = [isinstance(v, dict) and "values" in v for v in values]
    if any(conditional) and not all(conditional):
        raise AxisError(f"axes.{name} mixes plain values with entries of `when` and `values`")
    entries = [_entry(name, v) for v in values] if all(conditional) else [_Entry({}, values)]
    for entry in entries:
        _check_values(name, paths, entry.values)
    return _Axis(paths, entries, frozenset(path for entry in entries for path in entry.when))


def _entry(name: str, value: dict[str, Any]) -> _Entry:
    unknown = set(value) - {"when", "values"}
    if unknown:
        raise AxisError(
            f"axes.{name} has an entry with {', '.join(sorted(unknown))}; only `when` and "
            "`values` are known"
        )
    when, values = value.get("when", {}), value["values"]
    if not isinstance(when, dict) or not isinstance(values, list) or not values:
        raise AxisError(
            f"axes.{name} needs entries of the form {{when: {{path: value}}, values: [...]}}, "
            f"got {value!r}"
        )
    return _Entry(when, values)


def _check_values(name: str, paths: tuple[str, ...], values: list[Any]) -> None:
    for index, value in enumerate(values):
        if value in values[:index]:
            raise AxisError(f"axes.{name} holds {value!r} twice")
        if len(paths) > 1 and not (isinstance(value, list) and len(value) == len(paths)):
            raise AxisError(
                f"axes.{name} zips {len(paths)} paths, so each value must be a list of "
                f"{len(paths)}, got {value!r}"
            )


class Conditional(Protocol):
    """Something that sets paths and may hold only where other paths have some value."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Dotted paths that it sets."""

    @property
    def conditions(self) -> frozenset[str]:
        """Dotted paths that its conditions name."""


C = TypeVar("C", bound=Conditional)


def in_dependency_order(axes: list[C]) -> list[C]:
    """The axes so that each comes after those that its conditions name; otherwise as written.

    Raises:
        AxisError: the conditions go in a circle.
    """
    swept = {path for axis in axes for path in axis.paths}
    ordered: list[C] = []
    done: set[str] = set()
    waiting = list(axes)
    while waiting:
        ready = next((a for a in waiting if not ((a.conditions & swept) - done)), None)
        if ready is None:
            names = "; ".join(", ".join(axis.paths) for axis in waiting)
            raise AxisError(f"the conditions of these axes go in a circle: {names}")
        waiting.remove(ready)
        ordered.append(ready)
        done.update(ready.paths)
    return ordered


def _apply(
    axis: _Axis, cells: list[Assignment], lookup: Lookup, unmatched: list[str]
) -> list[Assignment]:
    matched = [0] * len(axis.entries)
    result: list[Assignment] = []
    for cell in cells:
        values: list[Any] = []
        for index, entry in enumerate(axis.entries):
            if holds(entry.when, cell, lookup, f"axes.{', '.join(axis.paths)}"):
                matched[index] += 1
                values += [value for value in entry.values if value not in values]
        for value in values:
            parts = value if len(axis.paths) > 1 else [value]
            result.append({**cell, **dict(zip(axis.paths, parts, strict=True))})
        if not values:
            result.append(cell)
    for entry, count in zip(axis.entries, matched, strict=True):
        if not count:
            unmatched.append(
                f"axes.{', '.join(axis.paths)}: no cell meets the condition {shown(entry.when)}"
            )
    return result


def _exclude(
    cells: list[Assignment], rules: list[dict[str, Any]], lookup: Lookup, unmatched: list[str]
) -> tuple[list[Assignment], list[int]]:
    counts = [0] * len(rules)
    matched = [False] * len(rules)
    kept: list[Assignment] = []
    for cell in cells:
        met = [holds(rule, cell, lookup, "exclude") for rule in rules]
        matched = [before or now for before, now in zip(matched, met, strict=True)]
        if any(met):
            counts[met.index(True)] += 1
        else:
            kept.append(cell)
    unmatched += [
        f"exclude: no cell meets {shown(rule)}"
        for rule, ever in zip(rules, matched, strict=True)
        if not ever
    ]
    return kept, counts


def holds(condition: dict[str, Any], cell: Assignment, lookup: Lookup, where: str) -> bool:
    """Whether a cell has, for each path of a condition, the value or one of the values named.

    Raises:
        AxisError: a path that does not exist; `where` says whose condition it is.
    """
    for path, wanted in condition.items():
        try:
            value = cell[path] if path in cell else lookup(path)
        except KeyError as error:
            raise AxisError(f"{where}: {error.args[0]}") from None
        if value not in (wanted if isinstance(wanted, list) else [wanted]):
            return False
    return True


def shown(condition: dict[str, Any]) -> str:
    """A condition as it is written in a sweep file."""
    return "{" + ", ".join(f"{path}: {value}" for path, value in condition.items()) + "}"
