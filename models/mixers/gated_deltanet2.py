"""Gated DeltaNet-2: erasing by key channel and writing by value channel are separate decisions.

    S~ = Diag(α_t) S_{t−1}        u_t = w_t ∘ v_t − S~ᵀ (b_t ∘ k_t)        S_t = S~ + k_t u_tᵀ
    o_t = K^-½ S_tᵀ q_t
    α_t = exp(−exp(A_log) · softplus(a_t + dt_bias))

q_t, k_t ∈ R^K: unit vectors; v_t ∈ R^V; b_t = σ(·) ∈ (0, 1)^K, or (0, 2)^K with negative
eigenvalues; w_t = σ(·) ∈ (0, 1)^V; α_t ∈ (0, 1]^K in float32. Erase gate and decay belong to key
heads and are repeated for the value heads that share one. The output is normalised and multiplied
by SiLU of a gate. `full` projects every gate at full rank; `lowrank` passes decay and output gate
through bottlenecks of V rows, the output gate with a bias.

Source: arXiv 2607.07953 section 3 and its public code, whose full-rank layer starts `dt_bias` at
one (`dt_init: ones`).

Cost per token and value head: 7 K V FLOPs; 4 K V bytes of state, whatever the length.
"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from kernels import gated_delta_rule_2, gated_delta_rule_2_step
from models.configs import GatedDeltaNet2Config, ModelConfig
from models.layers import Blocks, DecayGate, Projection, split_heads
from models.mixer import MixerState
from models.recurrent import Gates, RecurrentMixer, Remembered


@final
class GatedDeltaNet2(RecurrentMixer):
    """The delta rule with channel-wise decay, erase gate and write gate.

    Args:
        config: the model's shape.
        options: the rule's options.
    """

    def __init__(self, config: ModelConfig, options: GatedDeltaNet2Config) -> None:
        heads = config.heads
        key_width = heads.key_heads * heads.key_dim
        value_width = heads.value_heads * heads.value_dim
        gates: Blocks = (("erase", key_width), ("write", value_width))
        if options.variant == "full":
            gates += (("a", key_width), ("z", value_width))
        super().__init__(config, gate_blocks=gates, output_activation="silu")
        self.bottleneck: Projection | None = None
        if options.variant == "lowrank":
            rank = heads.value_dim
            self.bottleneck = Projection(config.d_model, (("decay", rank), ("output", rank)))
            self.decay_up = Projection(rank, (("decay", key_width),))
            self.output_up = Projection(rank, (("output", value_width),), has_bias=True)
        self.decay = DecayGate(heads.key_heads, heads.key_dim, options.dt_init)
        self.erase_scale = 2.0 if options.negative_eigenvalues else 1.0

    @property
    def op(self) -> str:
        """`gated_delta_rule_2`."""
        return "gated_delta_rule_2"

    def gates(self, x: Float[Tensor, "... D"], rows: tuple[Tensor, ...]) -> Gates:
        """Erase, write, decay and output gate, the first and third repeated per value head."""
        if self.bottleneck is None:
            erase, write, a, z = rows
        else:
            erase, write = rows
            decay, output = self.bottleneck.split(self.bottleneck(x))
            a, z = self.decay_up(decay), self.output_up(output)
        heads = self.heads
        erase = self.erase_scale * erase.sigmoid()
        return Gates(
            rule=(
                self._per_value_head(self.decay(a)),
                self._per_value_head(split_heads(erase, heads.key_heads)),
                split_heads(write.sigmoid(), heads.value_heads),
            ),
            output=split_heads(z, heads.value_heads),
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
        """The channel-gated delta rule over a sequence."""
        log_decay, erase, write = gates
        out, state, *written = gated_delta_rule_2(
            q,
            k,
            v,
            log_decay=log_decay,
            erase=erase,
            write=write,
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
        """The channel-gated delta rule for one token."""
        log_decay, erase, write = gates
        out, state, *written = gated_delta_rule_2_step(
            q,
            k,
            v,
            log_decay=log_decay,
            erase=erase,
            write=write,
            state=memory["memory"],
            return_residual=return_written,
            qk_l2norm=True,
            in_place=True,
        )
        return Remembered(out, {"memory": state}, written[0] if written else None)

    def rule_flops(self) -> int:
        """Decay, what the key returns, the write, the read."""
        return 7 * self.heads.key_dim * self.heads.value_dim

    def _per_value_head(self, per_key_head: Tensor) -> Tensor:
        """`[..., H, K]` as `[..., HV, K]`: value head h reads key head h // (HV / H)."""
        repeats = self.heads.value_heads // self.heads.key_heads
        return per_key_head if repeats == 1 else per_key_head.repeat_interleave(repeats, dim=-2)
