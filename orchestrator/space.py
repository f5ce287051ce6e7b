"""The space of a search: what its points may be made of.

    search:
      space:
        model.mixer: [softmax, deltanet]                    a choice
        schedule.warmup: {low: 0.01, high: 0.1}             a range, drawn evenly
        model.depth: {low: 2, high: 6, step: 2}             whole numbers, since both ends are
        optimizer: [adamw, muon]
        optimizer.lr:                                       conditional: the entry that holds
          - {when: {optimizer: adamw}, low: 1e-3, high: 1e-2, log: true}
          - {when: {optimizer: muon}, choices: [1e-3, 2e-3]}

Each entry is one parameter of the sampler, so that a rate of AdamW says nothing about one of Muon.
A point is the flat `path: value` dict that it sets; where no entry of a path holds, the path keeps
its base value.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from orchestrator.axes import Assignment, AxisError, Lookup, holds, in_dependency_order, shown

ENTRY_KEYS = ("when", "choices", "low", "high", "log", "step")


@dataclass(frozen=True, slots=True)
class Choices:
    """One of some values, without an order."""

    values: tuple[Any, ...]

    def ends(self) -> list[Any]:
        """Every value."""
        return list(self.values)

    def at(self, position: float) -> Any:
        """The value at a position in [0, 1)."""
        return self.values[int(position * len(self.values))]

    def __contains__(self, value: object) -> bool:
        return value in self.values

    def __str__(self) -> str:
        return f"one of {', '.join(str(value) for value in self.values)}"


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included; whole ones where both ends are.

    Attributes:
        low: smallest value.
        high: largest value.
        is_log: whether equal ratios, not equal differences, are equally likely.
        step: distance of two values from `low` on; None for every number.
    """

    low: float
    high: float
    is_log: bool = False
    step: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the values are whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def ends(self) -> list[Any]:
        """The smallest and the largest value."""
        return [self.low, self.high]

    def at(self, position: float) -> Any:
        """The value at a position in [0, 1)."""
        if self.is_log:
            low, high = math.log(self.low), math.log(self.high)
            value = math.exp(low + position * (high - low))
            value = min(max(value, self.low), self.high)
            return round(value) if self.is_whole else value
        step = self.step or (1 if self.is_whole else None)
        if step is None:
            return self.low + position * (self.high - self.low)
        steps = math.floor((self.high - self.low) / step + 1e-9) + 1
        return self.low + step * int(position * steps)

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.is_whole and not isinstance(value, int):
            return False
        if not self.low <= value <= self.high:
            return False
        steps = 0.0 if self.step is None else (value - self.low) / self.step
        return abs(steps - round(steps)) < 1e-9

    def __str__(self) -> str:
        step = "" if self.step is None else f" in steps of {self.step:g}"
        return f"{self.low:g} to {self.high:g}{step}{' (log)' if self.is_log else ''}"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One entry of the space: what the sampler draws as one variable.

    Attributes:
        path: dotted path that it sets.
        when: condition under which it holds; empty for always.
        values: what it may be.
    """

    path: str
    when: dict[str, Any]
    values: Choices | Range

    @property
    def name(self) -> str:
        """The path, with the condition where there is one."""
        return f"{self.path} {shown(self.when)}" if self.when else self.path


@dataclass(frozen=True, slots=True)
class Dimension:
    """A path of the space with its entries."""

    path: str
    parameters: tuple[Parameter, ...]

    @property
    def paths(self) -> tuple[str, ...]:
        """The path, as one of one."""
        return (self.path,)

    @property
    def conditions(self) -> frozenset[str]:
        """Paths that the entries' conditions name."""
        return frozenset(path for parameter in self.parameters for path in parameter.when)

    def active(self, point: Assignment, lookup: Lookup) -> Parameter | None:
        """The first entry that holds where the point is what it is so far."""
        where = f"search.space.{self.path}"
        for parameter in self.parameters:
            if holds(parameter.when, point, lookup, where):
                return parameter
        return None


class Space:
    """The dimensions of a search, each after those that its conditions name."""

    def __init__(self, values: dict[str, Any], lookup: Lookup) -> None:
        """Reads `search.space`.

        Args:
            values: as in the sweep file.
            lookup: value of a path that the space does not set.

        Raises:
            AxisError: an entry that cannot mean what it says.
        """
        self._lookup = lookup
        self.dimensions = in_dependency_order(
            [Dimension(path, tuple(_parameters(path, v))) for path, v in values.items()]
        )

    @property
    def parameters(self) -> list[Parameter]:
        """Every entry of every dimension."""
        return [parameter for dimension in self.dimensions for parameter in dimension.parameters]

    def draw(self, value_of: Callable[[Parameter], Any]) -> Assignment:
        """The point whose active parameters have the values that `value_of` gives, in order."""
        point: Assignment = {}
        for dimension in self.dimensions:
            parameter = dimension.active(point, self._lookup)
            if parameter is not None:
                point[dimension.path] = value_of(parameter)
        return point

    def active(self, point: Assignment) -> list[Parameter] | None:
        """The parameters that a point sets; None for a point that this space cannot give."""
        found: list[Parameter] = []
        for dimension in self.dimensions:
            parameter = dimension.active(point, self._lookup)
            if (parameter is None) != (dimension.path not in point):
                return None
            if parameter is not None:
                if point[dimension.path] not in parameter.values:
                    return None
                found.append(parameter)
        return found if len(found) == len(point) else None

    def corners(self, most: int) -> tuple[list[Assignment], list[str]]:
        """Points with every combination of choices, all ranges at one end; evenly thinned out.

        Args:
            most: largest number of points that is wanted.

        Returns:
            The points, and the names of parameters whose condition none of them meets.

        Raises:
            AxisError: a condition that names a path that does not exist.
        """
        unmet = {parameter.name for parameter in self.parameters}
        corners: list[Assignment] = []
        for end in (0, -1):
            points: list[Assignment] = [{}]
            for dimension in self.dimensions:
                points = [wide for point in points for wide in self._widened(dimension, point, end)]
                unmet -= {p.name for x in points if (p := dimension.active(x, self._lookup))}
                points = _thinned(points, most)
            corners += [point for point in points if point not in corners]
        return _thinned(corners, most), sorted(unmet)

    def _widened(self, dimension: Dimension, point: Assignment, end: int) -> Iterator[Assignment]:
        parameter = dimension.active(point, self._lookup)
        if parameter is None:
            yield point
            return
        is_range = isinstance(parameter.values, Range)
        for value in [parameter.values.ends()[end]] if is_range else parameter.values.ends():
            yield {**point, dimension.path: value}


def _thinned(points: list[Assignment], most: int) -> list[Assignment]:
    if len(points) <= most:
        return points
    return [points[index * len(points) // most] for index in range(most)]


def _parameters(path: str, value: Any) -> Iterator[Parameter]:
    where = f"search.space.{path}"
    if isinstance(value, dict):
        yield Parameter(path, {}, _values(where, value))
    elif isinstance(value, list) and value and all(isinstance(v, dict) for v in value):
        for entry in value:
            when = entry.get("when", {})
            if not isinstance(when, dict):
                raise AxisError(f"{where}: when={when!r} must map paths to values")
            yield Parameter(path, when, _values(where, entry))
    elif isinstance(value, list):
        yield Parameter(path, {}, _choices(where, value))
    else:
        raise AxisError(
            f"{where}={value!r} is one value; give a list of choices or {{low: …, high: …}}, or "
            "move it to base"
        )


def _values(where: str, entry: dict[str, Any]) -> Choices | Range:
    unknown = sorted(set(entry) - set(ENTRY_KEYS))
    if unknown:
        raise AxisError(f"{where} has {unknown[0]}; an entry knows {', '.join(ENTRY_KEYS)}")
    if "choices" in entry:
        if set(entry) - {"choices", "when"}:
            raise AxisError(f"{where} has choices and a range; give one of them")
        return _choices(where, entry["choices"])
    return _range(where, entry)


def _choices(where: str, values: Any) -> Choices:
    if not isinstance(values, list) or not values:
        raise AxisError(f"{where} needs a list of at least one choice, got {values!r}")
    for index, value in enumerate(values):
        if value in values[:index]:
            raise AxisError(f"{where} holds {value!r} twice")
    return Choices(tuple(values))


def _range(where: str, entry: dict[str, Any]) -> Range:
    low, high = entry.get("low"), entry.get("high")
    for name, value in (("low", low), ("high", high)):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise AxisError(f"{where} needs a number as {name}, got {value!r}")
        if not math.isfinite(value):
            raise AxisError(f"{where}: {name}={value} must be finite")
    assert low is not None
    assert high is not None
    is_log, step = entry.get("log", False), entry.get("step")
    if not low < high:
        raise AxisError(f"{where}: low={low:g} must be less than high={high:g}")
    if not isinstance(is_log, bool):
        raise AxisError(f"{where}: log={is_log!r} must be true or false")
    if is_log and low <= 0:
        raise AxisError(f"{where}: low={low:g} must be positive with log: true")
    if step is None:
        return Range(low, high, is_log)
    if is_log:
        raise AxisError(f"{where} has log and step; give one of them, or choices")
    if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step <= high - low:
        raise AxisError(f"{where}: step={step!r} must be positive and at most {high - low:g}")
    if isinstance(low, int) and isinstance(high, int) and not isinstance(step, int):
        raise AxisError(f"{where}: step={step!r} must be whole, as low and high are")
    return Range(low, high, is_log, step)
