"""The specification: every memory rule as a plain loop over time.

Equation, for every batch row and value head, with memory S of shape K × V:

    S~  = Diag(exp(log_decay_t)) S_{t-1}          decay
    u_t = write_t ∘ v_t − S~ᵀ (erase_t ∘ k_t)      what is written: the residual
    S_t = S~ + k_t u_tᵀ                            write
    o_t = scale · S_tᵀ q_t                         read, after the write

Symbols: q, k `[B, T, H, K]`; v, out and residual `[B, T, HV, V]`; S `[B, HV, K, V]`, where HV is a
multiple of H and value head h reads key head h // (HV // H). log_decay ≤ 0 (natural log), erase and
write depend on the rule; a `beta` stands for both:

    linear attention      no decay, or one per head or channel; erase 0, write 1
    delta rule            no decay; beta `[B, T, HV]`
    gated delta rule      log_decay `[B, T, HV]`; beta `[B, T, HV]`
    Kimi delta rule       log_decay `[B, T, HV, K]`; beta `[B, T, HV]`
    gated delta rule 2    log_decay `[B, T, HV, K]`; erase `[B, T, HV, K]`; write `[B, T, HV, V]`

Sources: Katharopoulos et al., "Transformers are RNNs" (arXiv 2006.16236) for linear attention;
Schlag et al. (arXiv 2102.11174) and Yang et al. (arXiv 2406.06484) for the delta rule; Yang et al.,
"Gated Delta Networks" (arXiv 2412.06464) for the gated one; the Kimi team, "Kimi Linear" (arXiv
2510.26692) for decay per channel; "Linear Attention Architectures" (arXiv 2607.07953), which
states all of them in one notation. They write the memory as Sᵀ. We always decay first and take the
error against the decayed memory; the scale stands on the read.

Cost: T dependent steps of about 6·K·V FLOPs per value head, and autograd keeps T memories of K·V
numbers: right for tests, not for training. All arithmetic is float32, or float64 for float64
inputs. This file imports torch alone and calls nothing else of the project, so that it can be
checked against the papers by eye.
"""

from collections.abc import Callable
from functools import wraps
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

# Axis letters: B batch, T time, H heads, K key dim, V value dim.

Rule = Callable[..., tuple[Any, ...]]


def _per_sequence(rule: Rule) -> Rule:
    """The rule with `cu_seqlens`: packed sequences run one by one and are laid side by side."""

    @wraps(rule)
    def packed(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        initial_state: Any,
        cu_seqlens: Tensor | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        if cu_seqlens is None:
            return rule(q, k, v, initial_state=initial_state, **options)
        bounds = cu_seqlens.tolist()
        parts = []
        for i, (start, end) in enumerate(pairwise(bounds)):
            gates = {n: x[:, start:end] for n, x in options.items() if isinstance(x, Tensor)}
            first = _map_state(itemgetter(slice(i, i + 1)), initial_state)
            row = (x[:, start:end] for x in (q, k, v))
            parts.append(rule(*row, initial_state=first, **{**options, **gates}))
        outs, states, *residuals = zip(*parts, strict=True)
        pair = isinstance(states[0], tuple)
        state = tuple(map(torch.cat, zip(*states, strict=True))) if pair else torch.cat(states)
        return (torch.cat(outs, 1), state, *(torch.cat(rows, 1) for rows in residuals))

    return packed


def _map_state(change: Callable[[Tensor], Tensor], state: Any) -> Any:
    """`change` of a memory, of a pair of memory and key sum, or nothing for none."""
    if isinstance(state, tuple):
        return tuple(map(change, state))
    return None if state is None else change(state)


@_per_sequence
def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    feature_map: str,
    normalize: bool,
    scale: float,
    initial_state: Tensor | tuple[Tensor, Tensor] | None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
    """Additive memory: (out, final memory), or (out, (final memory, final key sum)) normalised.

    The normalised read is o_t = scale S_tᵀ q_t / (scale q_t · z_t + eps), z_t the sum of the keys
    up to t; q and k stand for their images under `feature_map`.
    """
    q_BTHK, k_BTHK, v_BTHV = _prepared(q, k, v)
    if feature_map == "elu1":
        q_BTHK, k_BTHK = _elu1(q_BTHK), _elu1(k_BTHK)
    first = initial_state[0] if isinstance(initial_state, tuple) else initial_state
    state = _start(first, k_BTHK, v_BTHV)
    key_sum = torch.zeros_like(k_BTHK[:, 0])
    if isinstance(initial_state, tuple):
        key_sum = initial_state[1]

    outs = []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = q_BTHK[:, t], k_BTHK[:, t], v_BTHV[:, t]
        if log_decay is not None:
            decay = log_decay[:, t].to(state.dtype).exp()
            decay = decay[..., None] if decay.ndim == 2 else decay
            state = decay[..., None] * state
        state = state + _outer(k_t, v_t)
        out = scale * _read(state, q_t)
        if normalize:
            key_sum = key_sum + k_t
            out = out / (scale * (q_t * key_sum).sum(-1, keepdim=True) + eps)
        outs.append(out)
    out_BTHV = torch.stack(outs, 1).to(v.dtype)
    return out_BTHV, ((state, key_sum) if normalize else state)


@_per_sequence
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Error-correcting memory: (out, final memory, residual)."""
    q_BTHK, k_BTHK, v_BTHV = _prepared(q, k, v, unit=qk_l2norm)
    state = _start(initial_state, k_BTHK, v_BTHV)
    beta_BTH = beta.to(state.dtype)

    outs, residuals = [], []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = q_BTHK[:, t], k_BTHK[:, t], v_BTHV[:, t]
        residual = beta_BTH[:, t, :, None] * (v_t - _read(state, k_t))
        state = state + _outer(k_t, residual)
        outs.append(scale * _read(state, q_t))
        residuals.append(residual)
    return _stacked(outs, v), state, _stacked(residuals, v)


@_per_sequence
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Error-correcting memory that fades by one factor per head: (out, final memory, residual)."""
    q_BTHK, k_BTHK, v_BTHV = _prepared(q, k, v, unit=qk_l2norm)
    state = _start(initial_state, k_BTHK, v_BTHV)
    decay_BTH, beta_BTH = log_decay.to(state.dtype).exp(), beta.to(state.dtype)

    outs, residuals = [], []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = q_BTHK[:, t], k_BTHK[:, t], v_BTHV[:, t]
        state = decay_BTH[:, t, :, None, None] * state
        residual = beta_BTH[:, t, :, None] * (v_t - _read(state, k_t))
        state = state + _outer(k_t, residual)
        outs.append(scale * _read(state, q_t))
        residuals.append(residual)
    return _stacked(outs, v), state, _stacked(residuals, v)


@_per_sequence
def kimi_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    beta: Tensor,
    scale: float,
    initial_state: Tensor | None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Error-correcting memory whose key channels fade apart: (out, final memory, residual)."""
    q_BTHK, k_BTHK, v_BTHV = _prepared(q, k, v, unit=qk_l2norm)
    state = _start(initial_state, k_BTHK, v_BTHV)
    decay_BTHK, beta_BTH = log_decay.to(state.dtype).exp(), beta.to(state.dtype)

    outs, residuals = [], []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = q_BTHK[:, t], k_BTHK[:, t], v_BTHV[:, t]
        state = decay_BTHK[:, t, :, :, None] * state
        residual = beta_BTH[:, t, :, None] * (v_t - _read(state, k_t))
        state = state + _outer(k_t, residual)
        outs.append(scale * _read(state, q_t))
        residuals.append(residual)
    return _stacked(outs, v), state, _stacked(residuals, v)


@_per_sequence
def gated_delta_rule_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor,
    erase: Tensor,
    write: Tensor,
    scale: float,
    initial_state: Tensor | None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same with erase strength per key channel and write strength per value channel."""
    q_BTHK, k_BTHK, v_BTHV = _prepared(q, k, v, unit=qk_l2norm)
    state = _start(initial_state, k_BTHK, v_BTHV)
    decay_BTHK = log_decay.to(state.dtype).exp()
    erase_BTHK, write_BTHV = erase.to(state.dtype), write.to(state.dtype)

    outs, residuals = [], []
    for t in range(q.shape[1]):
        q_t, k_t, v_t = q_BTHK[:, t], k_BTHK[:, t], v_BTHV[:, t]
        state = decay_BTHK[:, t, :, :, None] * state
        residual = write_BTHV[:, t] * v_t - _read(state, erase_BTHK[:, t] * k_t)
        state = state + _outer(k_t, residual)
        outs.append(scale * _read(state, q_t))
        residuals.append(residual)
    return _stacked(outs, v), state, _stacked(residuals, v)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, *, unit: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the dtype of the arithmetic, with one query and key head for each value head."""
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    if unit:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    group = v.shape[2] // k.shape[2]
    return q.repeat_interleave(group, 2), k.repeat_interleave(group, 2), v


def _start(initial_state: Tensor | None, k_BTHK: Tensor, v_BTHV: Tensor) -> Tensor:
    """The given memory, or an empty one."""
    if initial_state is not None:
        return initial_state
    return torch.zeros_like(_outer(k_BTHK[:, 0], v_BTHV[:, 0]))


def _read(state: Tensor, key: Tensor) -> Tensor:
    """Sᵀ k."""
    return torch.einsum("bhkv,bhk->bhv", state, key)


def _outer(key: Tensor, value: Tensor) -> Tensor:
    """The outer product k vᵀ."""
    return torch.einsum("bhk,bhv->bhkv", key, value)


def _elu1(x: Tensor) -> Tensor:
    """elu(x) + 1, without the digits that exp(x) - 1 + 1 would lose for negative x."""
    return x.clamp(max=0).exp() + x.relu()


def _stacked(rows: list[Tensor], v: Tensor) -> Tensor:
    return torch.stack(rows, 1).to(v.dtype)
