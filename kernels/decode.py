"""One token of every memory rule: the recurrence's four lines, for generation.

Equation: that of `kernels.reference` for a single token,

    S~ = Diag(exp(log_decay)) S    u = write ∘ v − S~ᵀ (erase ∘ k)
    S' = S~ + k uᵀ                 o = scale · S'ᵀ q

Symbols: q, k `[B, H, K]`; v, out and residual u `[B, HV, V]`, HV a multiple of H; gates as in the
ops over whole sequences, without their time axis; S `[B, HV, K, V]`, float32 (float64 for float64
inputs).

Sources: those of `kernels.reference`, which these steps equal token by token.

Cost: about 6·K·V FLOPs per value head; the memory is read and written once, which is what bounds
the speed. Gradients flow through a step, unless `in_place` writes the new memory over the old one.

A step that needs no gradients can be one Triton kernel (`decode_triton`), which moves the memory
once; the lines below, which torch can differentiate, move it several times. A CUDA device takes the
kernel once it has passed `tests/gpu` there (`launch.PROVEN_OPS`, under the name "decode").
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kernels.arguments import Sizes, check_gate, check_qkv, check_state, state_dtype
from kernels.launch import PROVEN_OPS, is_interpreted
from kernels.linear_attention import (
    FEATURE_MAPS,
    State,
    apply_feature_map,
    check_decay,
    check_memory,
)
from kernels.norm import l2_norm

# Axis letters: B batch, H heads, K key dim, V value dim.


def linear_attention_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B HV V"],
    *,
    state: State,
    log_decay: Float[Tensor, "B HV"] | Float[Tensor, "B HV K"] | None = None,
    feature_map: str = "identity",
    normalize: bool = False,
    scale: float | None = None,
    in_place: bool = False,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "B HV V"], State]:
    """One token of `linear_attention`: (out, new state).

    Args:
        q: query.
        k: key.
        v: value.
        state: memory before the token; with `normalize` the pair of memory and key sum.
        log_decay: natural log of the decay per head or key channel; not normalised.
        feature_map: `elu1` or `identity`, of q and k.
        normalize: divide the read by that of the key sum.
        scale: factor of the read; None for K^-½.
        in_place: write the new state over `state`; only without gradients.
        eps: added to the denominator.

    Raises:
        ValueError: if an argument doesn't fit the others.
    """
    sizes = _check_token(q, k, v)
    check_decay(log_decay, sizes, v, axes="B HV", normalize=normalize)
    memory, key_sum = check_memory("state", state, sizes.state, v, normalize=normalize)
    if in_place:
        _check_in_place(q, k, v, memory, log_decay)
    served = _kernel_serves(q, k, v, memory, log_decay, key_sum, in_place=in_place)
    if served and feature_map in FEATURE_MAPS:
        out, memory, _, key_sum = _kernel_step(
            q,
            k,
            v,
            memory,
            log_decay=log_decay,
            key_sum=key_sum,
            scale=scale,
            elu=feature_map == "elu1",
            eps=eps,
            in_place=in_place,
        )
        return out, (memory if key_sum is None else (memory, key_sum))
    q_BHK, k_BHK, v_BHV = _prepared(q, k, v, sizes)
    q_BHK, k_BHK = apply_feature_map(feature_map, q_BHK, k_BHK)
    memory = _decayed(memory, log_decay, in_place=in_place)
    memory = _written(memory, k_BHK, v_BHV, in_place=in_place)
    scale = sizes.K**-0.5 if scale is None else scale
    out = scale * _read(memory, q_BHK)
    if key_sum is None:
        return out.to(v.dtype), memory
    key_sum = key_sum.add_(k_BHK) if in_place else key_sum + k_BHK
    out = out / (scale * (q_BHK * key_sum).sum(-1, keepdim=True) + eps)
    return out.to(v.dtype), (memory, key_sum)


def delta_rule_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B HV V"],
    *,
    beta: Float[Tensor, "B HV"],
    state: Float[Tensor, "B HV K V"],
    scale: float | None = None,
    return_residual: bool = False,
    qk_l2norm: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """One token of `delta_rule`: (out, new state[, residual]).

    Args:
        q: query.
        k: key.
        v: value.
        beta: write strength.
        state: memory before the token.
        scale: factor of the read; None for K^-½.
        return_residual: also return u, what is written, shaped as v.
        qk_l2norm: scale q and k to unit length first.
        in_place: write the new state over `state`; only without gradients.

    Raises:
        ValueError: if an argument doesn't fit the others.
    """
    gates = {"beta": (beta, "B HV")}
    return _delta_step(q, k, v, gates, state, scale, return_residual, qk_l2norm, in_place)


def gated_delta_rule_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B HV V"],
    *,
    log_decay: Float[Tensor, "B HV"],
    beta: Float[Tensor, "B HV"],
    state: Float[Tensor, "B HV K V"],
    scale: float | None = None,
    return_residual: bool = False,
    qk_l2norm: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """One token of `gated_delta_rule`: (out, new state[, residual]).

    Args:
        q: query.
        k: key.
        v: value.
        log_decay: natural log of the decay, at most 0.
        beta: write strength.
        state: memory before the token.
        scale: factor of the read; None for K^-½.
        return_residual: also return u, what is written, shaped as v.
        qk_l2norm: scale q and k to unit length first.
        in_place: write the new state over `state`; only without gradients.

    Raises:
        ValueError: if an argument doesn't fit the others.
    """
    gates = {"log_decay": (log_decay, "B HV"), "beta": (beta, "B HV")}
    return _delta_step(q, k, v, gates, state, scale, return_residual, qk_l2norm, in_place)


def kimi_delta_rule_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B HV V"],
    *,
    log_decay: Float[Tensor, "B HV K"],
    beta: Float[Tensor, "B HV"],
    state: Float[Tensor, "B HV K V"],
    scale: float | None = None,
    return_residual: bool = False,
    qk_l2norm: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """One token of `kimi_delta_rule`: (out, new state[, residual]).

    Args:
        q: query.
        k: key.
        v: value.
        log_decay: natural log of each key channel's decay, at most 0.
        beta: write strength.
        state: memory before the token.
        scale: factor of the read; None for K^-½.
        return_residual: also return u, what is written, shaped as v.
        qk_l2norm: scale q and k to unit length first.
        in_place: write the new state over `state`; only without gradients.

    Raises:
        ValueError: if an argument doesn't fit the others.
    """
    gates = {"log_decay": (log_decay, "B HV K"), "beta": (beta, "B HV")}
    return _delta_step(q, k, v, gates, state, scale, return_residual, qk_l2norm, in_place)


def gated_delta_rule_2_step(
    q: Float[Tensor, "B H K"],
    k: Float[Tensor, "B H K"],
    v: Float[Tensor, "B HV V"],
    *,
    log_decay: Float[Tensor, "B HV K"],
    erase: Float[Tensor, "B HV K"],
    write: Float[Tensor, "B HV V"],
    state: Float[Tensor, "B HV K V"],
    scale: float | None = None,
    return_residual: bool = False,
    qk_l2norm: bool = False,
    in_place: bool = False,
) -> tuple[Tensor, ...]:
    """One token of `gated_delta_rule_2`: (out, new state[, residual]).

    Args:
        q: query.
        k: key.
        v: value.
        log_decay: natural log of each key channel's decay, at most 0.
        erase: strength of the erasure, per key channel.
        write: strength of the write, per value channel.
        state: memory before the token.
        scale: factor of the read; None for K^-½.
        return_residual: also return u, what is written, shaped as v.
        qk_l2norm: scale q and k to unit length first.
        in_place: write the new state over `state`; only without gradients.

    Raises:
        ValueError: if an argument doesn't fit the others.
    """
    gates = {
        "log_decay": (log_decay, "B HV K"),
        "erase": (erase, "B HV K"),
        "write": (write, "B HV V"),
    }
    return _delta_step(q, k, v, gates, state, scale, return_residual, qk_l2norm, in_place)


def _delta_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gates: Mapping[str, tuple[Tensor, str]],
    state: Tensor,
    scale: float | None,
    return_residual: bool,  # noqa: FBT001 (private; every caller passes it by the same name)
    qk_l2norm: bool,  # noqa: FBT001
    in_place: bool,  # noqa: FBT001
) -> tuple[Tensor, ...]:
    """One token of the delta rule whose gates these are."""
    sizes = _check_token(q, k, v)
    for name, (gate, axes) in gates.items():
        check_gate(name, gate, sizes.shape(axes), v)
    check_state("state", state, sizes.state, v)
    named = {name: gate for name, (gate, _) in gates.items()}
    if in_place:
        _check_in_place(q, k, v, state, *named.values())
    if _kernel_serves(q, k, v, state, *named.values(), in_place=in_place):
        beta = named.get("beta")
        out, memory, residual, _ = _kernel_step(
            q,
            k,
            v,
            state,
            log_decay=named.get("log_decay"),
            erase=named.get("erase", beta),
            write=named.get("write", beta),
            scale=scale,
            unit=qk_l2norm,
            keep_residual=return_residual,
            in_place=in_place,
        )
        return (out, memory, residual) if return_residual else (out, memory)
    strengths = {name: gate.to(state.dtype) for name, gate in named.items()}
    q_BHK, k_BHK, v_BHV = _prepared(q, k, v, sizes)
    if qk_l2norm:
        q_BHK, k_BHK = l2_norm(q_BHK), l2_norm(k_BHK)
    if "beta" in strengths:
        erase = write = strengths["beta"][..., None]
    else:
        erase, write = strengths["erase"], strengths["write"]

    memory = _decayed(state, strengths.get("log_decay"), in_place=in_place)
    residual = write * v_BHV - _read(memory, erase * k_BHK)
    memory = _written(memory, k_BHK, residual, in_place=in_place)
    out = (sizes.K**-0.5 if scale is None else scale) * _read(memory, q_BHK)
    if return_residual:
        return out.to(v.dtype), memory, residual.to(v.dtype)
    return out.to(v.dtype), memory


def _kernel_serves(*tensors: Tensor | None, in_place: bool) -> bool:
    """Whether the Triton kernel takes a step of these q, k, v, memory, gates."""
    given = [x for x in tensors if x is not None]
    v, memory = given[2], given[3]
    if memory.dtype != torch.float32 or (in_place and not memory.is_contiguous()):
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return False
    on_device = v.is_cuda and "decode" in PROVEN_OPS
    return on_device or (is_interpreted() and v.dtype == torch.float32)


def _kernel_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Tensor,
    *,
    scale: float | None,
    in_place: bool,
    log_decay: Tensor | None = None,
    erase: Tensor | None = None,
    write: Tensor | None = None,
    key_sum: Tensor | None = None,
    unit: bool = False,
    elu: bool = False,
    keep_residual: bool = False,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """(out, new memory, residual, new key sum) from the Triton kernel, imported on demand."""
    from kernels import decode_triton  # noqa: PLC0415

    is_compiling = torch.compiler.is_compiling()
    gates = (None if x is None else x[:, None] for x in (log_decay, erase, write))
    arguments: tuple[Any, ...] = (
        q[:, None],
        k[:, None],
        v[:, None],
        *gates,
        memory,
        key_sum,
        q.shape[-1] ** -0.5 if scale is None else scale,
        eps,
        unit,
        elu,
        keep_residual,
    )
    if in_place:
        update = decode_triton.recurrent_in_place_op if is_compiling else decode_triton.recurrent_
        out, residual = update(*arguments)
    else:
        run = decode_triton.recurrent_op if is_compiling else decode_triton.recurrent
        out, memory, residual, new_key_sum = run(*arguments)
        key_sum = None if key_sum is None else new_key_sum
    return out[:, 0], memory, residual[:, 0] if keep_residual else residual, key_sum


def _check_token(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    """Sizes of one token's q, k `[B, H, K]` and v `[B, HV, V]`."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected one token, without time")
    return check_qkv(q[:, None], k[:, None], v[:, None])


def _check_in_place(*inputs: Tensor | None) -> None:
    """Refuses to overwrite a memory that the backward would need."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise ValueError("in_place=True with inputs that require gradients; expected torch.no_grad")


def _prepared(q: Tensor, k: Tensor, v: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the memory's dtype, with one query and key head for each value head."""
    dtype, group = state_dtype(v.dtype), sizes.HV // sizes.H
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if group > 1:
        q, k = q.repeat_interleave(group, 1), k.repeat_interleave(group, 1)
    return q, k, v


def _decayed(memory: Tensor, log_decay: Tensor | None, *, in_place: bool) -> Tensor:
    """What is left of the memory after the decay, per head `[B, HV]` or channel `[B, HV, K]`."""
    if log_decay is None:
        return memory
    decay = log_decay.to(memory.dtype).exp().unflatten(1, (-1, 1) if log_decay.ndim == 2 else (-1,))
    return memory.mul_(decay[..., None]) if in_place else memory * decay[..., None]


def _written(memory: Tensor, k: Tensor, residual: Tensor, *, in_place: bool) -> Tensor:
    """The memory plus k residualᵀ."""
    if in_place:
        return memory.addcmul_(k[..., :, None], residual[..., None, :])
    return torch.addcmul(memory, k[..., :, None], residual[..., None, :])


def _read(memory: Tensor, key: Tensor) -> Tensor:
    """Sᵀ k for every head."""
    return (key[..., None, :] @ memory)[..., 0, :]
