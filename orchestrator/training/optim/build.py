"""The registry of optimizers: name → (options, builder), and the one function that builds them."""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor, nn

from models.mixer import ROLES, ParameterInfo
from orchestrator.training.optim.adamw import AdamW
from orchestrator.training.optim.configs import AdamWConfig, MuonConfig, OptimizerConfig
from orchestrator.training.optim.muon import Muon
from orchestrator.training.optim.optimizer import Group, Optimizer, UpdateRule, fp32_weights
from orchestrator.training.optim.roles import GroupSpec, ParameterRow, assign, check_roles

# Hidden matrices, whose singular values mean something; also the zero-initialised routing
# projections, as in the published recipe. Gate projections are small and end in a nonlinearity:
# they stay with Adam unless `role_groups` says otherwise.
MATRIX_ROLES = frozenset({"matrix", "attention_matrix", "routing_matrix"})

SPLIT_ROLES = {"blocks": frozenset(ROLES), "attention": frozenset({"attention_matrix"})}
"""Roles of the matrices that `optimizer.split` takes apart; none where it is `fused`."""


class DescribedModel(Protocol):
    """A module that knows what its parameters are for."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, by name."""

    def parameter_info(self) -> dict[str, ParameterInfo]:
        """Role and blocks of each parameter, by the same names."""


def build_optimizer(config: OptimizerConfig, model: DescribedModel) -> Optimizer:
    """The optimizer of a model, with every rate at zero until `set_lr_ratio`.

    Build it after the model has reached its device: state lives where the weights are.

    Args:
        config: of a registered optimizer.
        model: whose trainable parameters are to be moved.

    Raises:
        ValueError: an unknown optimizer, or a parameter in no group or in two.
        TypeError: options of another class than the optimizer's.
    """
    if config.name not in OPTIMIZERS:
        raise ValueError(
            f"optimizer={config.name!r} must be one of {', '.join(sorted(OPTIMIZERS))}"
        )
    config_class, specs_of, rule_of = OPTIMIZERS[config.name]
    if not isinstance(config, config_class):
        raise TypeError(
            f"optimizer {config.name!r} takes {config_class.__name__}, got {type(config).__name__}"
        )
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    specs = specs_of(config)
    table = assign(dict(model.named_parameters()), model.parameter_info(), specs)
    weights = fp32_weights(parameters)
    groups = []
    for spec in specs:
        rows = [row for row in table if row.group == spec.name]
        if rows:
            own = {row.name: weights[row.name] for row in rows}
            groups.append(Group(spec, rule_of(config, spec, rows, own)))
    return Optimizer(parameters, weights, table, groups)


def resolved_choices(config: OptimizerConfig, device_type: str) -> dict[str, Any]:
    """What the configuration leaves to a variant or a device, as it is really done; JSON-ready."""
    if not isinstance(config, MuonConfig):
        return {}
    step = config.matrix_step()
    choices: dict[str, Any] = {name: getattr(step, name) for name in step.__slots__}
    return choices | {"arithmetic": resolve_arithmetic(config.arithmetic, device_type)}


def resolve_arithmetic(arithmetic: str, device_type: str) -> str:
    """`fp32` or `bf16`; `auto` is bf16 where tensor cores make it cheap, on CUDA."""
    if arithmetic != "auto":
        return arithmetic
    return "bf16" if device_type == "cuda" else "fp32"


def is_decayed_by_shape(role: str, ndim: int) -> bool:
    """Whether Adam's weight decay reaches a parameter: all but 1-D tensors and biases."""
    return ndim != 1 and role != "bias"


def _adamw_specs(config: AdamWConfig) -> list[GroupSpec]:
    return _adam_specs(config.lr, config.weight_decay, lambda role: True)


def _adamw_rule(
    config: AdamWConfig, spec: GroupSpec, rows: list[ParameterRow], weights: dict[str, Tensor]
) -> UpdateRule:
    return AdamW(weights, betas=config.betas, eps=config.eps, weight_decay=spec.weight_decay)


def _muon_specs(config: MuonConfig) -> list[GroupSpec]:
    check_roles("optimizer.role_groups", config.role_groups)

    def is_matrix(role: str) -> bool:
        default = "matrix" if role in MATRIX_ROLES else "adam"
        return config.role_groups.get(role, default) == "matrix"

    matrix = GroupSpec(
        name="matrix",
        peak_lr=config.lr,
        weight_decay=config.weight_decay,
        claims=lambda role, ndim: is_matrix(role),
        split_roles=SPLIT_ROLES.get(config.split, frozenset()),
    )
    rest = _adam_specs(
        config.adam_lr,
        config.adam_weight_decay,
        lambda role: not is_matrix(role),
        is_decayed=config.adam_schedule == "decayed",
    )
    return [matrix, *rest]


def _muon_rule(
    config: MuonConfig, spec: GroupSpec, rows: list[ParameterRow], weights: dict[str, Tensor]
) -> UpdateRule:
    if spec.name != "matrix":
        return AdamW(
            weights,
            betas=config.adam_betas,
            eps=config.adam_eps,
            weight_decay=spec.weight_decay,
        )
    device_type = next(iter(weights.values())).device.type
    return Muon(
        weights,
        {row.name: row.blocks for row in rows},
        config.matrix_step(),
        momentum=config.momentum,
        second_moment_beta=config.second_moment_beta,
        weight_decay=spec.weight_decay,
        arithmetic=resolve_arithmetic(config.arithmetic, device_type),
    )


def _adam_specs(
    lr: float, weight_decay: float, claims: Callable[[str], bool], *, is_decayed: bool = True
) -> list[GroupSpec]:
    """The Adam group with weight decay and the one without."""
    return [
        GroupSpec(
            name="adam",
            peak_lr=lr,
            weight_decay=weight_decay,
            claims=lambda role, ndim: claims(role) and is_decayed_by_shape(role, ndim),
            is_decayed=is_decayed,
        ),
        GroupSpec(
            name="adam_no_decay",
            peak_lr=lr,
            weight_decay=0.0,
            claims=lambda role, ndim: claims(role) and not is_decayed_by_shape(role, ndim),
            is_decayed=is_decayed,
        ),
    ]


OPTIMIZERS: dict[str, tuple[type[OptimizerConfig], Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (AdamWConfig, _adamw_specs, _adamw_rule),
    "muon": (MuonConfig, _muon_specs, _muon_rule),
}
"""Every optimizer by its name: options, the groups they make, and the rule of each group."""
