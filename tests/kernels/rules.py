"""Every memory rule as data, its inputs, and one call of it with all gradients."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import kernels
from kernels.channel_delta import GATED_DELTA_RULE_2, KIMI_DELTA_RULE
from kernels.linear_attention import LINEAR_ATTENTION
from kernels.scalar_delta import DELTA_RULE, GATED_DELTA_RULE

Draw = Callable[[tuple[int, ...], torch.Generator], Tensor]


@dataclass(frozen=True)
class Rule:
    """One public op with the options that make it a rule of its own.

    Attributes:
        op: the op over whole sequences.
        step: the op over one token.
        gates: the axes of each gate; log_decay is drawn at most 0, all others in (0, 1).
        options: what the op is called with besides.
    """

    op: Callable[..., Any]
    step: Callable[..., Any]
    gates: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_residual(self) -> bool:
        return self.op is not kernels.linear_attention

    @property
    def is_normalized(self) -> bool:
        return bool(self.options.get("normalize"))


NORMALIZED = {"feature_map": "elu1", "normalize": True}
SCALAR_DECAY, CHANNEL_DECAY = {"log_decay": "B T HV"}, {"log_decay": "B T HV K"}
BETA = {"beta": "B T HV"}

RULES = {
    "linear": Rule(kernels.linear_attention, kernels.linear_attention_step),
    "linear-normalized": Rule(
        kernels.linear_attention, kernels.linear_attention_step, options=NORMALIZED
    ),
    "linear-scalar-decay": Rule(
        kernels.linear_attention, kernels.linear_attention_step, SCALAR_DECAY
    ),
    "linear-channel-decay": Rule(
        kernels.linear_attention, kernels.linear_attention_step, CHANNEL_DECAY
    ),
    "delta": Rule(kernels.delta_rule, kernels.delta_rule_step, BETA),
    "gated-delta": Rule(
        kernels.gated_delta_rule, kernels.gated_delta_rule_step, SCALAR_DECAY | BETA
    ),
    "kimi-delta": Rule(kernels.kimi_delta_rule, kernels.kimi_delta_rule_step, CHANNEL_DECAY | BETA),
    "gated-delta-2": Rule(
        kernels.gated_delta_rule_2,
        kernels.gated_delta_rule_2_step,
        CHANNEL_DECAY | {"erase": "B T HV K", "write": "B T HV V"},
    ),
}
DELTA_RULES = {name: rule for name, rule in RULES.items() if rule.has_residual}
DECAYING_RULES = {name: rule for name, rule in RULES.items() if "log_decay" in rule.gates}

TABLES: dict[str, dict[str, Any]] = {
    "linear_attention": LINEAR_ATTENTION,
    "delta_rule": DELTA_RULE,
    "gated_delta_rule": GATED_DELTA_RULE,
    "kimi_delta_rule": KIMI_DELTA_RULE,
    "gated_delta_rule_2": GATED_DELTA_RULE_2,
}
"""The implementations of every public op."""

IMPLS = ("chunked",)
"""Implementations that are compared with the loop on this machine."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def uniform(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=source, dtype=torch.float64)


def normal(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=source, dtype=torch.float64)


def mild_decay(shape: tuple[int, ...], source: torch.Generator) -> Tensor:
    """Between 0 and −1 a token."""
    return -uniform(shape, source)


def constant(value: float) -> Draw:
    return lambda shape, _: torch.full(shape, value, dtype=torch.float64)


def unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=-1)


def draw_inputs(
    rule: Rule,
    *,
    B: int = 1,
    T: int,
    H: int = 1,
    HV: int | None = None,
    K: int = 16,
    V: int = 16,
    sequences: int | None = None,
    log_decay: Draw = mild_decay,
    strength: Draw = uniform,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Float64 inputs by name, keys of unit length, with an initial state that isn't zero."""
    source = generator(seed)
    HV = H if HV is None else HV
    sizes = {"B": B, "T": T, "HV": HV, "K": K, "V": V}
    inputs = {
        "q": normal((B, T, H, K), source),
        "k": unit(normal((B, T, H, K), source)),
        "v": normal((B, T, HV, V), source),
    }
    for name, axes in rule.gates.items():
        shape = tuple(sizes[axis] for axis in axes.split())
        inputs[name] = (log_decay if name == "log_decay" else strength)(shape, source)
    count = B if sequences is None else sequences
    inputs["initial_state"] = normal((count, HV, K, V), source)
    if rule.is_normalized:
        inputs["initial_key_sum"] = 1 + uniform((count, HV, K), source)
    return inputs


def call(
    rule: Rule, inputs: Mapping[str, Tensor], *, impl: str, **options: Any
) -> dict[str, Tensor]:
    """The rule's results by name: out, final_state, and final_key_sum or residual."""
    named = dict(inputs)
    q, k, v = (named.pop(name) for name in "qkv")
    initial, key_sum = named.pop("initial_state", None), named.pop("initial_key_sum", None)
    if initial is not None:
        options["initial_state"] = (initial, key_sum) if rule.is_normalized else initial
    if rule.has_residual:
        options["return_residual"] = True
    out, state, *residual = rule.op(q, k, v, **named, **rule.options, impl=impl, **options)
    if rule.is_normalized:
        return {"out": out, "final_state": state[0], "final_key_sum": state[1]}
    results = {"out": out, "final_state": state}
    return results | ({"residual": residual[0]} if residual else {})


def evaluate(
    rule: Rule,
    inputs: Mapping[str, Tensor],
    *,
    impl: str,
    dtype: torch.dtype = torch.float64,
    results: tuple[str, ...] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """The rule's results, and the gradients `d_…` of all inputs.

    The loss contracts the named results, or all of them, with random numbers that depend on
    nothing but the result's name and shape, so that no gradient is trivial and all calls agree.
    """
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in inputs.items()}
    outputs = call(rule, leaves, impl=impl, **options)
    chosen = {name: x for name, x in outputs.items() if results is None or name in results}
    cotangents = [
        normal(tuple(x.shape), generator(len(name))).to(x.dtype) for name, x in chosen.items()
    ]
    gradients = torch.autograd.grad(list(chosen.values()), list(leaves.values()), cotangents)
    named = {f"d_{name}": x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach() for name, x in outputs.items()} | named
