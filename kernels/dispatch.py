"""One call of a delta rule: check the arguments, choose the implementation, call it."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from kernels import launch
from kernels.arguments import (
    check_cu_seqlens,
    check_gate,
    check_qkv,
    check_state,
    check_values,
)

Rule = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""An implementation of a delta rule: checked arguments to (out, final_state, residual).

It takes q, k, v, then by keyword the rule's gates, `scale` (a float), `initial_state` (or None),
`qk_l2norm` and `cu_seqlens` (or None).
"""


def call_delta_rule(
    op: str,
    rules: Mapping[str, Rule],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Mapping[str, tuple[Tensor, str]],
    scale: float | None,
    initial_state: Tensor | None,
    return_residual: bool,
    qk_l2norm: bool,
    cu_seqlens: Tensor | None,
    impl: str,
    check: bool,
) -> tuple[Any, ...]:
    """(out, final_state), and the residual where it is asked for.

    Args:
        op: the public name, for `launch.resolve`.
        rules: the rule's implementations by name.
        q: queries.
        k: keys.
        v: values.
        gates: each gate of the rule with the axes that it must have, such as `B T HV K`.
        scale: factor of the read, or None for K^-½.
        initial_state: memory at the start, or None for an empty one.
        return_residual: whether the residual is returned.
        qk_l2norm: whether q and k are scaled to unit length first.
        cu_seqlens: boundaries of packed sequences, or None.
        impl: name of the implementation, or `auto`.
        check: whether every value is read, to refuse NaN, infinity and growing decays.

    Raises:
        ValueError: if an argument doesn't fit, or the implementation cannot serve.
    """
    sizes = check_qkv(q, k, v)
    num_sequences = check_cu_seqlens(cu_seqlens, sizes.B, sizes.T)
    for name, (gate, axes) in gates.items():
        check_gate(name, gate, sizes.shape(axes), v)
    if initial_state is not None:
        check_state("initial_state", initial_state, (num_sequences, *sizes.state[1:]), v)
    values = {name: gate for name, (gate, _) in gates.items()}
    if check:
        check_values({"q": q, "k": k, "v": v, **values, "initial_state": initial_state})

    name = launch.resolve(impl, v.device, op)
    # Mixed precision would run the products inside in 16 bit; the state is float32 by contract.
    is_mixed = torch.is_autocast_enabled(v.device.type)
    with torch.autocast(v.device.type, enabled=False) if is_mixed else nullcontext():
        out, final_state, residual = rules[name](
            q,
            k,
            v,
            **values,
            scale=sizes.K**-0.5 if scale is None else scale,
            initial_state=initial_state,
            qk_l2norm=qk_l2norm,
            cu_seqlens=cu_seqlens,
        )
    return (out, final_state, residual) if return_residual else (out, final_state)
