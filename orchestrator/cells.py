"""From axis assignments to resolved, matched cells: normalise, solve, name, compare."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from models.accounting import count_parameters, softmax_reference, solve_ffn_dim
from models.configs import DecayConfig, ModelConfig
from models.routing_config import RoutingConfig
from orchestrator.axes import Assignment
from orchestrator.config import SweepSpec, TrialConfig, trial_from_dict, trial_to_dict
from orchestrator.differences import differences
from orchestrator.errors import ConfigError
from orchestrator.identity import arm_id, canonical_json, cell_id


@dataclass(frozen=True, slots=True)
class Cell:
    """One resolved configuration of a sweep.

    Attributes:
        cell_id: its identity, seed and non-semantic keys aside.
        arm_id: its identity without learning rates.
        assignment: the axis values that led to it.
        config: the dataclasses that a trial gets.
        values: the same as a plain nested dict.
    """

    cell_id: str
    arm_id: str
    assignment: Assignment
    config: TrialConfig
    values: dict[str, Any]


ComposeValues = Callable[[dict[str, Any]], dict[str, Any]]
"""Flat `path: value` of one cell → its nested, typed values, which nobody else holds."""


def resolve_cells(
    spec: SweepSpec, assignments: list[Assignment], compose: ComposeValues
) -> tuple[list[Cell], list[str]]:
    """The distinct cells of a sweep, matched by its rule, and notes worth printing.

    Raises:
        ConfigError: a value that its owner refuses, naming the cell; a matching rule that cannot
            be met; cells of a comparison with unequal budgets, data or evaluation.
    """
    matcher = _Matcher(spec)
    cells: dict[str, Cell] = {}
    merged = 0
    for assignment in assignments:
        values = compose({**spec.base, **assignment})
        values["match"] = spec.match
        try:
            config = trial_from_dict(_normalised(values))
            plain = trial_to_dict(config)
            config = matcher.matched(config, plain)
            # A number that is not finite has no identity.
            cell = Cell(cell_id(plain), arm_id(plain), assignment, config, plain)
        except ValueError as error:
            raise ConfigError(f"{error}{_where(assignment)}") from None
        merged += cell.cell_id in cells
        cells.setdefault(cell.cell_id, cell)
    notes = []
    if merged:
        notes.append(
            f"{merged} cells were equal to another one once resolved and count once "
            "(an axis that changes nothing in them)"
        )
    resolved = list(cells.values())
    if spec.purpose in ("compare", "search"):
        for group in _refuse_mismatch(spec, resolved):
            notes += differences([cell.config for cell in group], spec.match)
    return resolved, list(dict.fromkeys(notes))


def _where(assignment: Assignment) -> str:
    shown = ", ".join(f"{path}={value}" for path, value in assignment.items())
    return f" (in the cell {shown})" if shown else ""


def _normalised(values: dict[str, Any]) -> dict[str, Any]:
    """Values that have no effect in this cell set to null, so that they are not part of its id."""
    model = values["model"]
    if model["stack"] == "pure":
        model["softmax_every"] = None
        model["softmax_layers"] = None
        if model["mixer"]["name"] != "softmax":
            model["softmax"] = None
    elif model["softmax_layers"] is not None:
        model["softmax_every"] = None
    if model["mixer"].get("decay") == "none":
        model["mixer"]["dt_init"] = DecayConfig().dt_init
    routing = RoutingConfig(**model["routing"])
    if not routing.routes_error:
        model["routing"]["residual"] = RoutingConfig().residual
    return values


class _Matcher:
    """Applies `match: params`: equal non-embedding parameters at equal depth."""

    def __init__(self, spec: SweepSpec) -> None:
        self._spec = spec
        self._solved: dict[str, int] = {}

    def matched(self, config: TrialConfig, plain: dict[str, Any]) -> TrialConfig:
        """The trial with the FFN width that the rule asks for, which `plain` then has as well."""
        if self._spec.match != "params":
            return config
        if "model.ffn_dim" in self._spec.base or "model.ffn_dim" in self._spec.axes:
            raise ValueError(
                "model.ffn_dim is given although match: params solves it; remove it, or say "
                "match: depth"
            )
        key = canonical_json({"model": plain["model"]})
        if key not in self._solved:
            self._solved[key] = self._solve(config.model)
        plain["model"]["ffn_dim"] = self._solved[key]
        return replace(config, model=replace(config.model, ffn_dim=self._solved[key]))

    def _solve(self, model: ModelConfig) -> int:
        # The vocabulary only enters the embedding and the head, which the rule leaves out.
        target = count_parameters(softmax_reference(model), vocab_size=1).non_embedding
        return solve_ffn_dim(model, target)


COMPARED = ("budget.tokens", "batch.tokens", "seq_len", "data", "eval", "data_seed")
"""What cells of a comparison share, whatever the matching rule."""

DEPTH = "model.num_layers"
"""What they share besides under `match: params`, which solves widths at one depth, and `depth`."""


def _refuse_mismatch(spec: SweepSpec, cells: list[Cell]) -> list[list[Cell]]:
    """Refuses cells that would be compared, those equal along `compare_within`, but differ.

    Returns:
        The cells that are compared with each other.
    """
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        group = canonical_json([_at(cell.values, axis) for axis in spec.compare_within])
        groups.setdefault(group, []).append(cell)
    for path in _compared_paths(spec):
        for first, *others in groups.values():
            wanted = _at(first.values, path)
            second = next((cell for cell in others if _at(cell.values, path) != wanted), None)
            if second is not None:
                one, other = (canonical_json(_at(cell.values, path)) for cell in (first, second))
                rule = f" and match: {spec.match}" if path == DEPTH else ""
                raise ConfigError(
                    f"purpose: {spec.purpose}{rule} needs equal {path} in all cells, but it is "
                    f"{one} {_where(first.assignment)} and {other} {_where(second.assignment)}; "
                    f"use compare_within: [{path}] if nothing is compared across it"
                )
    return list(groups.values())


def _compared_paths(spec: SweepSpec) -> tuple[str, ...]:
    if spec.purpose == "search":
        # A search may vary the tokens of a step: its points are chosen among, not compared.
        return tuple(path for path in COMPARED if path != "batch.tokens")
    return COMPARED if spec.match == "paper" else (*COMPARED, DEPTH)


def _at(values: dict[str, Any], path: str) -> Any:
    """The value at a dotted path; None where this cell has no such key."""
    node: Any = values
    for name in path.split("."):
        node = node.get(name) if isinstance(node, dict) else None
    return node
