"""Kimi Delta Attention: the delta rule on a memory that forgets key channel by key channel.

    S~ = Diag(α_t) S_{t−1}        u_t = β_t (v_t − S~ᵀ k_t)        S_t = S~ + k_t u_tᵀ
    o_t = K^-½ S_tᵀ q_t
    α_t = exp(−exp(A_log) · softplus(W_up W_down x_t + dt_bias))

q_t, k_t ∈ R^K: unit vectors; v_t ∈ R^V; β_t = σ(·) ∈ (0, 1), or (0, 2) with negative eigenvalues;
α_t ∈ (0, 1]^K for each value head, in float32, through a bottleneck of V rows. The output is
normalised and multiplied by σ of a gate that passes a second such bottleneck and has a bias.

Source: Kimi Linear, arXiv 2510.26692, section 3; layer of arXiv 2607.07953. No lower bound on the
log decay, as there.

Cost per token and value head: 7 K V FLOPs; 4 K V bytes of state, whatever the length.
"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from kernels import kimi_delta_rule, kimi_delta_rule_step
from models.configs import KimiDeltaConfig, ModelConfig
from models.layers import DecayGate, Projection, split_heads
from models.mixer import MixerState
from models.recurrent import Gates, RecurrentMixer, Remembered


@final
class KimiDelta(RecurrentMixer):
    """The delta rule with one write strength per value head and a decay per key channel.

    Args:
        config: the model's shape.
        options: the rule's options.
    """

    def __init__(self, config: ModelConfig, options: KimiDeltaConfig) -> None:
        heads = config.heads
        super().__init__(
            config,
            gate_blocks=(("beta", heads.value_heads),),
            output_activation="sigmoid",
        )
        rank = heads.value_dim
        self.bottleneck = Projection(config.d_model, (("decay", rank), ("output", rank)))
        self.decay_up = Projection(rank, (("decay", heads.value_heads * heads.key_dim),))
        self.output_up = Projection(rank, (("output", self.value_width),), has_bias=True)
        self.decay = DecayGate(heads.value_heads, heads.key_dim, options.dt_init)
        self.beta_scale = 2.0 if options.negative_eigenvalues else 1.0

    @property
    def op(self) -> str:
        """`kimi_delta_rule`."""
        return "kimi_delta_rule"

    def gates(self, x: Float[Tensor, "... D"], rows: tuple[Tensor, ...]) -> Gates:
        """Write strength from the fused projection, decay and output gate from the bottleneck."""
        (beta,) = rows
        decay, output = self.bottleneck.split(self.bottleneck(x))
        return Gates(
            rule=(self.decay(self.decay_up(decay)), self.beta_scale * beta.sigmoid()),
            output=split_heads(self.output_up(output), self.heads.value_heads),
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
        """The channel-decayed delta rule over a sequence."""
        log_decay, beta = gates
        out, state, *written = kimi_delta_rule(
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
        """The channel-decayed delta rule for one token."""
        log_decay, beta = gates
        out, state, *written = kimi_delta_rule_step(
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
