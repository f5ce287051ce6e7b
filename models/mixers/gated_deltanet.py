"""Gated DeltaNet: the delta rule on a memory that each value head forgets at a learned rate.

    S~ = α_t S_{t−1}        u_t = β_t (v_t − S~ᵀ k_t)        S_t = S~ + k_t u_tᵀ
    o_t = K^-½ S_tᵀ q_t
    α_t = exp(−exp(A_log) · softplus(a_t + dt_bias))

q_t, k_t ∈ R^K: unit vectors; v_t ∈ R^V; β_t = σ(·) ∈ (0, 1), or (0, 2) with negative eigenvalues;
α_t ∈ (0, 1], one per value head, in float32; a_t a projection of the input. The output is
normalised and multiplied by SiLU of a full-rank gate.

Source: Yang et al., arXiv 2412.06464, equation 10; layer of arXiv 2607.07953, whose `dt_bias`
starts at one (`dt_init: ones`). Our default is the log-uniform start of Kimi Delta Attention, so
that rules are compared with the same memory at the start.

Cost per token and value head: 7 K V FLOPs; 4 K V bytes of state, whatever the length.
"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from kernels import gated_delta_rule, gated_delta_rule_step
from models.configs import GatedDeltaNetConfig, ModelConfig
from models.layers import DecayGate, split_heads
from models.mixer import MixerState
from models.recurrent import Gates, RecurrentMixer, Remembered


@final
class GatedDeltaNet(RecurrentMixer):
    """The delta rule with one write strength and one decay per value head.

    Args:
        config: the model's shape.
        options: the rule's options.
    """

    def __init__(self, config: ModelConfig, options: GatedDeltaNetConfig) -> None:
        heads = config.heads
        super().__init__(
            config,
            gate_blocks=(
                ("z", heads.value_heads * heads.value_dim),
                ("beta", heads.value_heads),
                ("a", heads.value_heads),
            ),
            output_activation="silu",
        )
        self.decay = DecayGate(heads.value_heads, None, options.dt_init)
        self.beta_scale = 2.0 if options.negative_eigenvalues else 1.0

    @property
    def op(self) -> str:
        """`gated_delta_rule`."""
        return "gated_delta_rule"

    def gates(self, x: Float[Tensor, "... D"], rows: tuple[Tensor, ...]) -> Gates:
        """Write strength, decay and output gate, all from the fused projection."""
        z, beta, a = rows
        log_decay = self.decay(a)
        return Gates(
            rule=(log_decay, self.beta_scale * beta.sigmoid()),
            output=split_heads(z, self.heads.value_heads),
            head_log_decay=log_decay,
        )

    def remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: tuple[Tensor, ...],
        memory: MixerState | None,
        *,
        return_written: bool,
        cu_seqlens: Tensor | None,
    ) -> Remembered:
        """The gated delta rule over a sequence."""
        log_decay, beta = gates
        out, state, *written = gated_delta_rule(
            q,
            k,
            v,
            log_decay=log_decay,
            beta=beta,
            initial_state=None if memory is None else memory["memory"],
            return_residual=return_written,
            qk_l2norm=True,
            cu_seqlens=cu_seqlens,
            impl=self.impl,
        )
        return Remembered(out, {"memory": state}, written[0] if written else None)

    def remember_one(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: tuple[Tensor, ...],
        memory: MixerState,
        *,
        return_written: bool,
    ) -> Remembered:
        """The gated delta rule for one token."""
        log_decay, beta = gates
        out, state, *written = gated_delta_rule_step(
            q,
            k,
            v,
            log_decay=log_decay,
            beta=beta,
            state=memory["memory"],
            return_residual=return_written,
            qk_l2norm=True,
            in_place=True,
        )
        return Remembered(out, {"memory": state}, written[0] if written else None)

    def rule_flops(self) -> int:
        """Decay, what the key returns, the write, the read."""
        return 7 * self.heads.key_dim * self.heads.value_dim
