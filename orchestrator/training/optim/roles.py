"""Which parameter goes to which group, by role; the table of it, and its checks.

A role says what a parameter does, which its shape cannot: a gate's projection and an MLP's are both
matrices. `assign` gives each trainable parameter exactly one group or raises, and the table that it
returns is printed at the start of a trial and stored in its record.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from models.mixer import ROLES, ParameterInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSpec:
    """What all parameters of one group share.

    Attributes:
        name: as in logs and records.
        peak_lr: rate where the schedule's ratio is 1.
        weight_decay: λ; each update shrinks the weight by the factor 1 − rate · λ.
        claims: whether a parameter of this role and number of dimensions belongs here.
        is_decayed: whether the rate follows the schedule's decay, or only its warm-up.
        split_roles: roles whose fused projections are stepped block by block.
    """

    name: str
    peak_lr: float
    weight_decay: float
    claims: Callable[[str, int], bool]
    is_decayed: bool = True
    split_roles: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterRow:
    """One line of the parameter table.

    Attributes:
        name: as in `named_parameters`.
        shape: of the parameter.
        role: one of `models.mixer.ROLES`.
        group: name of its group.
        lr: peak rate.
        weight_decay: λ.
        schedule: `decayed`, or `constant` after the warm-up.
        blocks: (name, rows) of each part that is orthogonalised alone; empty for one whole.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    group: str
    lr: float
    weight_decay: float
    schedule: str
    blocks: tuple[tuple[str, int], ...] = ()

    def as_row(self) -> dict[str, Any]:
        """The line as plain values that survive JSON."""
        row = asdict(self)
        row["shape"] = list(self.shape)
        row["blocks"] = [list(block) for block in self.blocks]
        return row


def assign(
    parameters: Mapping[str, nn.Parameter],
    infos: Mapping[str, ParameterInfo],
    groups: Sequence[GroupSpec],
) -> list[ParameterRow]:
    """The table of all trainable parameters, in the model's order.

    Args:
        parameters: all parameters of a model by name.
        infos: role and blocks by parameter name.
        groups: of which each parameter is claimed by exactly one.

    Raises:
        ValueError: a parameter without a role, a role without a parameter, a parameter in no group
            or in two, or blocks that don't add up to the parameter's rows.
    """
    if missing := sorted(parameters.keys() - infos.keys()):
        raise ValueError(f"parameters without a role in parameter_info: {', '.join(missing)}")
    if unknown := sorted(infos.keys() - parameters.keys()):
        raise ValueError(f"parameter_info names what the model doesn't have: {', '.join(unknown)}")
    return [
        _row(name, parameter, infos[name], groups)
        for name, parameter in parameters.items()
        if parameter.requires_grad
    ]


def _row(
    name: str, parameter: nn.Parameter, info: ParameterInfo, groups: Sequence[GroupSpec]
) -> ParameterRow:
    claiming = [group for group in groups if group.claims(info.role, parameter.ndim)]
    if len(claiming) != 1:
        claimed = " and ".join(group.name for group in claiming) or "no group"
        raise ValueError(f"parameter {name} ({info.role}) is in {claimed}, not in one group")
    group = claiming[0]
    blocks = info.blocks if info.role in group.split_roles else ()
    if blocks and sum(rows for _, rows in blocks) != parameter.shape[0]:
        raise ValueError(
            f"blocks {blocks} of parameter {name} must add up to its {parameter.shape[0]} rows"
        )
    return ParameterRow(
        name=name,
        shape=tuple(parameter.shape),
        role=info.role,
        group=group.name,
        lr=group.peak_lr,
        weight_decay=group.weight_decay,
        schedule="decayed" if group.is_decayed else "constant",
        blocks=blocks,
    )


def check_roles(path: str, roles: Iterable[str]) -> None:
    """Refuses names that are no roles.

    Raises:
        ValueError: a name that `models.mixer.ROLES` doesn't have.
    """
    for role in roles:
        if role not in ROLES:
            raise ValueError(f"{path}: {role!r} is not a role; roles are {', '.join(ROLES)}")


def format_table(rows: Iterable[ParameterRow]) -> str:
    """The table as aligned text, one line per parameter under a line of headings."""
    cells = [("parameter", "shape", "role", "group", "lr", "decay", "schedule", "blocks")]
    cells += [
        (
            row.name,
            "×".join(map(str, row.shape)) or "scalar",
            row.role,
            row.group,
            f"{row.lr:g}",
            f"{row.weight_decay:g}",
            row.schedule,
            " ".join(f"{name}:{count}" for name, count in row.blocks) or "whole",
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return "\n".join(lines)
