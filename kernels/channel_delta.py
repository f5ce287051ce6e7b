"""Kimi delta rule and gated delta rule 2: error-correcting memory with a decay per key channel.

Equation, for every batch row and value head:

    S~  = Diag(exp(log_decay_t)) S_{t-1}
    u_t = write_t ∘ v_t − S~ᵀ (erase_t ∘ k_t)
    S_t = S~ + k_t u_tᵀ                                o_t = scale · S_tᵀ q_t

Symbols: q, k `[B, T, H, K]`; v, out and residual u `[B, T, HV, V]`, HV a multiple of H; log_decay
`[B, T, HV, K]`, ≤ 0, natural log; erase `[B, T, HV, K]` and write `[B, T, HV, V]`, in (0, 1), of
the gated delta rule 2; the Kimi rule has one beta `[B, T, HV]` for both; S `[B, HV, K, V]`, float32
(float64 for float64 inputs). Where erase differs between channels, I − k (erase ∘ k)ᵀ isn't
symmetric and its norm can exceed 1: without decay the memory may grow.

Sources: Kimi team, "Kimi Linear" (arXiv 2510.26692), section 3; for the gated delta rule 2, "Linear
Attention Architectures" (arXiv 2607.07953). Unlike the published chunked forms, no exponent is ever
positive and none is bounded, whatever the decay (see `channel_decay`), and one triangular solve
serves values and keys at once (see `delta_chunks`).

Cost: state 4·K·V bytes per head; forward about 6·K·V + 2·K² + 2·K²·V/C + C·(5·K + 3·V) FLOPs per
token and head, and (log2(C) + 2)·K exponentials, which the backward keeps beside what the scalar
rules keep.
"""

from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from kernels import reference
from kernels.channel_decay import channel_decay
from kernels.chunk_layout import ChunkedInputs
from kernels.delta_chunks import ChunkFactors, delta_chunks
from kernels.dispatch import Rule, call_delta_rule

# Axis letters: B batch, T time, H heads, K key dim, V value dim, C position in a chunk, Z chunks
# of all sequences · HV.


def _chunked(
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
    cu_seqlens: Tensor | None = None,
    size: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, final_state, residual); erase and write may also be one number per head."""
    inputs = ChunkedInputs.of(
        q,
        k,
        v,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        qk_l2norm=qk_l2norm,
        size=size,
    )
    q_ZCK, k_ZCK = inputs.per_value_head(inputs.q), inputs.per_value_head(inputs.k)
    erased_ZCK = inputs.split_gate(erase) * k_ZCK
    entering, leaving, (read_gram, erase_gram) = channel_decay(
        inputs.split_gate(log_decay), k_ZCK, q_ZCK, erased_ZCK
    )
    factors = ChunkFactors(
        erase=erase_gram,
        read=read_gram,
        targets=inputs.split_gate(write) * inputs.v,
        erase_keys=erased_ZCK * entering,
        queries=q_ZCK * entering,
        write_keys=k_ZCK * leaving,
        retention=entering[:, -1, :, None],
    )
    out, final, residual = delta_chunks(factors, inputs.initial, inputs.chunks.active)
    return (
        inputs.join(out, v.dtype),
        inputs.chunks.join_states(final),
        inputs.join(residual, v.dtype),
    )


def _chunked_kimi(
    q: Tensor, k: Tensor, v: Tensor, *, beta: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """The Kimi rule: beta erases and writes."""
    return _chunked(q, k, v, erase=beta, write=beta, **options)


def _triton_kimi(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The Kimi rule's Triton kernels, which exist on Linux only and are imported on demand."""
    from kernels import channel_delta_triton  # noqa: PLC0415

    return channel_delta_triton.kimi_delta_rule(*args, **options)


def _triton(*args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Those of the gated delta rule 2, likewise."""
    from kernels import channel_delta_triton  # noqa: PLC0415

    return channel_delta_triton.gated_delta_rule_2(*args, **options)


KIMI_DELTA_RULE: dict[str, Rule] = {
    "reference": reference.kimi_delta_rule,
    "chunked": _chunked_kimi,
    "triton": _triton_kimi,
}
"""The implementations of `kimi_delta_rule`."""

GATED_DELTA_RULE_2: dict[str, Rule] = {
    "reference": reference.gated_delta_rule_2,
    "chunked": _chunked,
    "triton": _triton,
}
"""The implementations of `gated_delta_rule_2`."""


def kimi_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    log_decay: Float[Tensor, "B T HV K"],
    beta: Float[Tensor, "B T HV"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    return_residual: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    impl: str = "auto",
    check: bool = False,
) -> tuple[Tensor, ...]:
    """Error-correcting memory whose key channels fade apart: (out, final_state[, residual]).

    Args:
        q: queries.
        k: keys.
        v: values.
        log_decay: natural log of each key channel's decay, at most 0.
        beta: write strength.
        scale: factor of the read; None for K^-½.
        initial_state: memory at the start; None for an empty one. One for each batch row, or for
            each packed sequence.
        return_residual: also return u, what is written at each token, shaped as v.
        qk_l2norm: scale q and k to unit length first, x / sqrt(Σ x² + 1e-6).
        cu_seqlens: boundaries of sequences packed into one row (B = 1), from 0 to T.
        impl: `auto`, `reference`, `chunked` or `triton`; see `launch.resolve`.
        check: read every value and refuse NaN, infinity and a positive log_decay.

    Raises:
        ValueError: if an argument doesn't fit the others, or `impl` cannot serve.
    """
    return call_delta_rule(
        "kimi_delta_rule",
        KIMI_DELTA_RULE,
        q,
        k,
        v,
        gates={"log_decay": (log_decay, "B T HV K"), "beta": (beta, "B T HV")},
        scale=scale,
        initial_state=initial_state,
        return_residual=return_residual,
        qk_l2norm=qk_l2norm,
        cu_seqlens=cu_seqlens,
        impl=impl,
        check=check,
    )


def gated_delta_rule_2(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    log_decay: Float[Tensor, "B T HV K"],
    erase: Float[Tensor, "B T HV K"],
    write: Float[Tensor, "B T HV V"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    return_residual: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    impl: str = "auto",
    check: bool = False,
) -> tuple[Tensor, ...]:
    """The Kimi rule with channel-wise erase and write: (out, final_state[, residual]).

    Args:
        q: queries.
        k: keys.
        v: values.
        log_decay: natural log of each key channel's decay, at most 0.
        erase: strength of the erasure, per key channel.
        write: strength of the write, per value channel.
        scale: factor of the read; None for K^-½.
        initial_state: memory at the start; None for an empty one. One for each batch row, or for
            each packed sequence.
        return_residual: also return u, what is written at each token, shaped as v.
        qk_l2norm: scale q and k to unit length first, x / sqrt(Σ x² + 1e-6).
        cu_seqlens: boundaries of sequences packed into one row (B = 1), from 0 to T.
        impl: `auto`, `reference`, `chunked` or `triton`; see `launch.resolve`.
        check: read every value and refuse NaN, infinity and a positive log_decay.

    Raises:
        ValueError: if an argument doesn't fit the others, or `impl` cannot serve.
    """
    return call_delta_rule(
        "gated_delta_rule_2",
        GATED_DELTA_RULE_2,
        q,
        k,
        v,
        gates={
            "log_decay": (log_decay, "B T HV K"),
            "erase": (erase, "B T HV K"),
            "write": (write, "B T HV V"),
        },
        scale=scale,
        initial_state=initial_state,
        return_residual=return_residual,
        qk_l2norm=qk_l2norm,
        cu_seqlens=cu_seqlens,
        impl=impl,
        check=check,
    )
