"""The delta rule and the gated delta rule: error-correcting memory, one decay per head or none.

Equation, for every batch row and value head (decay 1 for the delta rule):

    u_t = beta_t (v_t − exp(log_decay_t) S_{t-1}ᵀ k_t)
    S_t = exp(log_decay_t) S_{t-1} + k_t u_tᵀ          o_t = scale · S_tᵀ q_t

Symbols: q, k `[B, T, H, K]`; v, out and residual u `[B, T, HV, V]`, HV a multiple of H; log_decay
`[B, T, HV]`, ≤ 0, natural log; beta `[B, T, HV]`, in (0, 1), or (0, 2) for negative eigenvalues;
S `[B, HV, K, V]`, float32 (float64 for float64 inputs). Keys should be of unit length, or
`qk_l2norm` makes them so: with longer ones the memory can grow.

Sources: Yang et al., "Parallelizing Linear Transformers with the Delta Rule" (arXiv 2406.06484),
section 3, and "Gated Delta Networks" (arXiv 2412.06464), equation 10 and section 3.3. Unlike their
chunked form, one triangular solve serves values and keys at once, and its results go straight into
the K × K map of the state across a chunk (see `delta_chunks`).

Cost: state 4·K·V bytes per head; forward about 6·K·V + 2·K² + 2·K²·V/C + C·(5·K + 3·V) FLOPs per
token and head; the backward keeps, per chunk of C tokens, a few C × C and K × K matrices and the
K × V state.
"""

from jaxtyping import Float, Int
from torch import Tensor

from kernels import reference
from kernels.dispatch import Rule, call_delta_rule
from kernels.scalar_delta_chunked import scalar_delta_chunked


def _triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor,
    log_decay: Tensor | None = None,
    scale: float,
    initial_state: Tensor | None,
    qk_l2norm: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the Triton kernels, which exist on Linux only and are imported on demand."""
    from kernels.scalar_delta_triton import scalar_delta_triton  # noqa: PLC0415

    return scalar_delta_triton(
        q,
        k,
        v,
        log_decay=log_decay,
        beta=beta,
        scale=scale,
        initial_state=initial_state,
        qk_l2norm=qk_l2norm,
        cu_seqlens=cu_seqlens,
    )


DELTA_RULE: dict[str, Rule] = {
    "reference": reference.delta_rule,
    "chunked": scalar_delta_chunked,
    "triton": _triton,
}
"""The implementations of `delta_rule`."""

GATED_DELTA_RULE: dict[str, Rule] = {
    "reference": reference.gated_delta_rule,
    "chunked": scalar_delta_chunked,
    "triton": _triton,
}
"""The implementations of `gated_delta_rule`."""


def delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    beta: Float[Tensor, "B T HV"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    return_residual: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    impl: str = "auto",
    check: bool = False,
) -> tuple[Tensor, ...]:
    """Error-correcting memory without decay: (out, final_state[, residual]).

    Args:
        q: queries.
        k: keys.
        v: values.
        beta: write strength.
        scale: factor of the read; None for K^-½.
        initial_state: memory at the start; None for an empty one. One for each batch row, or for
            each packed sequence.
        return_residual: also return u, what is written at each token, shaped as v.
        qk_l2norm: scale q and k to unit length first, x / sqrt(Σ x² + 1e-6).
        cu_seqlens: boundaries of sequences packed into one row (B = 1), from 0 to T.
        impl: `auto`, `reference`, `chunked` or `triton`; see `launch.resolve`.
        check: read every value and refuse NaN and infinity.

    Raises:
        ValueError: if an argument doesn't fit the others, or `impl` cannot serve.
    """
    return call_delta_rule(
        "delta_rule",
        DELTA_RULE,
        q,
        k,
        v,
        gates={"beta": (beta, "B T HV")},
        scale=scale,
        initial_state=initial_state,
        return_residual=return_residual,
        qk_l2norm=qk_l2norm,
        cu_seqlens=cu_seqlens,
        impl=impl,
        check=check,
    )


def gated_delta_rule(
    q: Float[Tensor, "B T H K"],
    k: Float[Tensor, "B T H K"],
    v: Float[Tensor, "B T HV V"],
    *,
    log_decay: Float[Tensor, "B T HV"],
    beta: Float[Tensor, "B T HV"],
    scale: float | None = None,
    initial_state: Float[Tensor, "N HV K V"] | None = None,
    return_residual: bool = False,
    qk_l2norm: bool = False,
    cu_seqlens: Int[Tensor, " bounds"] | None = None,
    impl: str = "auto",
    check: bool = False,
) -> tuple[Tensor, ...]:
    """Error-correcting memory that fades by one factor per head: (out, final_state[, residual]).

    Args:
        q: queries.
        k: keys.
        v: values.
        log_decay: natural log of the decay, at most 0.
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
        "gated_delta_rule",
        GATED_DELTA_RULE,
        q,
        k,
        v,
        gates={"log_decay": (log_decay, "B T HV"), "beta": (beta, "B T HV")},
        scale=scale,
        initial_state=initial_state,
        return_residual=return_residual,
        qk_l2norm=qk_l2norm,
        cu_seqlens=cu_seqlens,
        impl=impl,
        check=check,
    )
