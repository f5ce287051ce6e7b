"""Linear attention: additive memory, with or without decay, feature map and normalised read.

Equation, for every batch row and value head, φ the feature map:

    S_t = Diag(exp(log_decay_t)) S_{t-1} + φ(k_t) v_tᵀ      o_t = scale · S_tᵀ φ(q_t)

and normalised, without decay, with the key sum z_t = z_{t-1} + φ(k_t):

    o_t = scale · S_tᵀ φ(q_t) / (scale · φ(q_t) · z_t + eps)

Symbols: q, k `[B, T, H, K]`; v and out `[B, T, HV, V]`, HV a multiple of H; log_decay `[B, T, HV]`
or `[B, T, HV, K]`, ≤ 0, natural log; φ is elu + 1 (`elu1`) or nothing (`identity`); S
`[B, HV, K, V]` and z `[B, HV, K]`, float32 (float64 for float64 inputs).

Sources: Katharopoulos et al., "Transformers are RNNs" (arXiv 2006.16236), equations 7, 18 to 20;
decay per head as in Sun et al., "Retentive Network" (arXiv 2307.08621), and per channel as in Yang
et al., "Gated Linear Attention" (arXiv 2312.06635). We add eps to the denominator, which they leave
out, and keep the scale in both parts of the quotient. The normalised form carries z as one more
column of S, since it is the memory of a value that is always 1.

Cost: state 4·K·V bytes per head, 4·K more normalised; forward 4·K·V + 2·C·(K + V) FLOPs per token
and head; the backward keeps one C × C matrix and one state per chunk of C tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kernels import launch, reference
from kernels.arguments import (
    Sizes,
    check_cu_seqlens,
    check_gate,
    check_qkv,
    check_state,
    check_values,
)
from kernels.channel_decay import channel_decay
from kernels.chunk_layout import ChunkedInputs
from kernels.scalar_decay import scalar_factors
from kernels.state_scan import scan_states

# Axis letters: B batch, T time, H heads, K key dim, V value dim, C position in a chunk, Z chunks
# of all sequences · HV.

FEATURE_MAPS = ("elu1", "identity")

State = Tensor | tuple[Tensor, Tensor]
"""A memory, or a memory and a key sum."""


def apply_feature_map(feature_map: str, *inputs: Tensor) -> tuple[Tensor, ...]:
    """φ of each of the inputs.

    elu(x) + 1 is exp(x) below zero and x + 1 above, and is written so: exp(x) − 1 + 1 would cost
    the digits of a small feature. At zero both parts would pass a gradient; `relu` gives none.

    Raises:
        ValueError: if `feature_map` is none of `FEATURE_MAPS`.
    """
    _check_feature_map(feature_map)
    if feature_map == "identity":
        return inputs
    return tuple(x.clamp(max=0).exp() + x.relu() for x in inputs)


def _chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    feature_map: str,
    normalize: bool,
    scale: float,
    initial_state: State | None,
    cu_seqlens: Tensor | None = None,
    eps: float = 1e-6,
    size: int | None = None,
) -> tuple[Tensor, State]:
    """(out, final_state) of linear attention."""
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    q_BTHK, k_BTHK = apply_feature_map(feature_map, q.to(dtype), k.to(dtype))
    v_BTHV = v.to(dtype)
    if normalize:
        v_BTHV = torch.cat([v_BTHV, torch.ones_like(v_BTHV[..., :1])], -1)
    if isinstance(initial_state, tuple):
        initial_state = torch.cat([initial_state[0], initial_state[1][..., None]], -1)
    inputs = ChunkedInputs.of(
        q_BTHK,
        k_BTHK,
        v_BTHV,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=False,
        size=size,
    )
    read, queries, keys, retention = _factors(inputs, log_decay)
    entering, final = scan_states(
        retention, keys.mT @ inputs.v, inputs.initial, inputs.chunks.active
    )
    out = inputs.join(torch.baddbmm(queries @ entering, read, inputs.v), dtype)
    state = inputs.chunks.join_states(final)
    if not normalize:
        return out.to(v.dtype), state
    out = out[..., :-1] / (out[..., -1:] + eps)
    return out.to(v.dtype), (state[..., :-1], state[..., -1])


def _factors(
    inputs: ChunkedInputs, log_decay: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Read matrix `[Z, C, C]`, decayed queries and keys `[Z, C, K]`, retention `[Z, K or 1, 1]`."""
    q_ZCK, k_ZCK = inputs.per_value_head(inputs.q), inputs.per_value_head(inputs.k)
    if log_decay is not None and log_decay.ndim == 4:
        entering, leaving, (read,) = channel_decay(inputs.split_gate(log_decay), k_ZCK, q_ZCK)
        return read, q_ZCK * entering, k_ZCK * leaving, entering[:, -1, :, None]
    read = inputs.per_value_head(inputs.q @ inputs.k.mT)
    if log_decay is None:
        return read.tril(), q_ZCK, k_ZCK, read.new_ones(len(read), 1, 1)
    between, entering = scalar_factors(inputs.split_gate(log_decay)[..., 0])
    leaving_ZC1 = between[:, -1, :, None]
    return read * between, q_ZCK * entering, k_ZCK * leaving_ZC1, entering[:, -1:]


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    log_decay: Tensor | None,
    feature_map: str,
    normalize: bool,
    scale: float,
    initial_state: State | None,
    cu_seqlens: Tensor | None,
    eps: float,
) -> tuple[Tensor, State]:
    """The same from the Triton kernels, which exist on Linux only and are imported on demand.

    A decay makes additive memory one of the delta rules without the erase: per head the gated one,
    per channel the second gated one with erase 0 and write 1.
    """
    from kernels.channel_delta_triton import gated_delta_rule_2  # noqa: PLC0415
    from kernels.linear_attention_triton import linear_attention_triton  # noqa: PLC0415
    from kernels.scalar_delta_triton import scalar_delta_triton  # noqa: PLC0415

    memory, key_sum = initial_state if isinstance(initial_state, tuple) else (initial_state, None)
    if log_decay is None:
        out, final, final_key_sum = linear_attention_triton(
            q,
            k,
            v,
            elu1=feature_map == "elu1",
            normalize=normalize,
            scale=scale,
            initial_state=memory,
            initial_key_sum=key_sum,
            cu_seqlens=cu_seqlens,
            eps=eps,
        )
        return out, ((final, final_key_sum) if normalize else final)
    q, k = apply_feature_map(feature_map, q, k)
    if log_decay.ndim == 4:
        B, T, HV, V = v.shape
        # Expanded, so that neither takes memory here.
        erase = v.new_zeros(1).expand(B, T, HV, k.shape[-1])
        out, final, _ = gated_delta_rule_2(
            q,
            k,
            v,
            log_decay=log_decay,
            erase=erase,
            write=v.new_ones(1).expand(B, T, HV, V),
            scale=scale,
            initial_state=memory,
            qk_l2norm=False,
            cu_seqlens=cu_seqlens,
        )
        return out, final
    out, final, _ = scalar_delta_triton(
        q,
        k,
        v,
        log_decay=log_decay,
        beta=None,
        scale=scale,
        initial_state=memory,
        cu_seqlens=cu_seqlens,
    )
    return out, final


LINEAR_ATTENTION: dict[str, Callable[..., tuple[Any, ...]]] = {
    "reference": reference.linear_attention,
    "chunked": _chunked,
    "triton": _triton,
}
"""The implementations of `linear_attention`."""


def linear_attention(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    log_decay: Float[Tensor, "B T HV"] | Float[Tensor, "B T HV K"] | None = None,
    feature_map: str = "identity",
    normalize: bool = False,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    impl: str = "auto",
    check: bool = False,
    eps: float = 1e-6,
) -> tuple[Float[Tensor, "B T HV V"], State]:
    """Additive memory: (out, final_state); the state of the normalised form is the pair (S, z).

    Args:
        q: queries.
        k: keys.
        v: values.
        log_decay: natural log of the decay per head or key channel, at most 0; not normalised.
        feature_map: `elu1` or `identity`, of q and k.
        normalize: divide the read by that of the key sum.
        scale: factor of the read; None for K^-½.
        initial_state: memory at the start, or memory and key sum; None for an empty one. One for
            each batch row, or for each packed sequence.
        cu_seqlens: boundaries of sequences packed into one row (B = 1), from 0 to T.
        impl: `auto`, `reference`, `chunked` or `triton`; see `launch.resolve`.
        check: read every value and refuse NaN, infinity and a positive log_decay.
        eps: added to the denominator.

    Raises:
        ValueError: if an argument doesn't fit the others, or `impl` cannot serve.
    """
    sizes = check_qkv(q, k, v)
    num_sequences = check_cu_seqlens(cu_seqlens, sizes.B, sizes.T)
    _check_feature_map(feature_map)
    check_decay(log_decay, sizes, v, axes="B T HV", normalize=normalize)
    memory = key_sum = None
    if initial_state is not None:
        expected = (num_sequences, *sizes.state[1:])
        memory, key_sum = check_memory(
            "initial_state", initial_state, expected, v, normalize=normalize
        )
    if check:
        inputs = {"q": q, "k": k, "v": v, "log_decay": log_decay}
        check_values({**inputs, "initial_state": memory, "initial_state[1]": key_sum})

    name = launch.resolve(impl, v.device, "linear_attention")
    # Mixed precision would run the products inside in 16 bit; the state is float32 by contract.
    with torch.autocast(v.device.type, enabled=False):
        return LINEAR_ATTENTION[name](
            q,
            k,
            v,
            log_decay=log_decay,
            feature_map=feature_map,
            normalize=normalize,
            scale=sizes.K**-0.5 if scale is None else scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            eps=eps,
        )


def _check_feature_map(feature_map: str) -> None:
    if feature_map not in FEATURE_MAPS:
        raise ValueError(f"{feature_map=} is none of {', '.join(FEATURE_MAPS)}")


def check_decay(
    log_decay: Tensor | None, sizes: Sizes, v: Tensor, *, axes: str, normalize: bool
) -> None:
    """Refuses a decay of wrong shape or dtype, or one beside the normalised read.

    Args:
        log_decay: decay per head or key channel, or None.
        sizes: of the call.
        v: values of the call.
        axes: axes of a decay per head; one per channel has K beside them.
        normalize: whether the read is normalised.

    Raises:
        ValueError: if the decay doesn't fit.
    """
    if log_decay is None:
        return
    if normalize:
        raise ValueError("log_decay is given with normalize=True; expected one of the two")
    is_per_channel = log_decay.ndim > len(axes.split())
    check_gate("log_decay", log_decay, sizes.shape(axes + " K" * is_per_channel), v)


def check_memory(
    name: str, state: State, expected: tuple[int, ...], v: Tensor, *, normalize: bool
) -> tuple[Tensor, Tensor | None]:
    """The memory and, normalised, the key sum of a state, after their checks.

    Raises:
        ValueError: if there is a pair where one tensor is expected or the reverse, or a shape,
            dtype or device doesn't fit.
    """
    if not normalize:
        if isinstance(state, tuple):
            raise ValueError(f"{name} is a pair; expected one tensor with normalize=False")
        check_state(name, state, expected, v)
        return state, None
    if not isinstance(state, tuple) or len(state) != 2:
        raise ValueError(
            f"{name} is a {type(state).__name__}; expected the pair (memory, key sum) with "
            "normalize=True"
        )
    check_state(f"{name}[0]", state[0], expected, v)
    check_state(f"{name}[1]", state[1], expected[:-1], v)
    return state
