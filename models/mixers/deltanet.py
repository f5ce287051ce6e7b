"""DeltaNet: each key overwrites what the memory returned for it, without forgetting the rest.

    u_t = β_t (v_t − S_{t−1}ᵀ k_t)        S_t = S_{t−1} + k_t u_tᵀ        o_t = K^-½ S_tᵀ q_t

q_t, k_t ∈ R^K: unit vectors; v_t ∈ R^V; β_t = σ(·) ∈ (0, 1), or (0, 2) with negative eigenvalues;
S ∈ R^{K×V}, zero at the start.

Source: Schlag et al., arXiv 2102.11174; in parallel form Yang et al., arXiv 2406.06484; layer of
arXiv 2607.07953, without an output gate. The factor 2 on β is that of arXiv 2411.12537.

Cost per token and value head: 6 K V FLOPs; 4 K V bytes of state, whatever the length.
"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from kernels import delta_rule, delta_rule_step
from models.configs import DeltaNetConfig, ModelConfig
from models.mixer import MixerState
from models.recurrent import Gates, RecurrentMixer, Remembered


@final
class DeltaNet(RecurrentMixer):
    """The delta rule with one write strength per value head.

    Args:
        config: the model's shape.
        options: the rule's options.
    """

    def __init__(self, config: ModelConfig, options: DeltaNetConfig) -> None:
        super().__init__(config, gate_blocks=(("beta", config.heads.value_heads),))
        self.beta_scale = 2.0 if options.negative_eigenvalues else 1.0

    @property
    def op(self) -> str:
        """`delta_rule`."""
        return "delta_rule"

    def gates(self, x: Float[Tensor, "... D"], rows: tuple[Tensor, ...]) -> Gates:
        """The write strength."""
        (beta,) = rows
        return Gates((self.beta_scale * beta.sigmoid(),))

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
        """The delta rule over a sequence."""
        (beta,) = gates
        out, state, *written = delta_rule(
            q,
            k,
            v,
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
        """The delta rule for one token."""
        (beta,) = gates
        out, state, *written = delta_rule_step(
            q,
            k,
            v,
            beta=beta,
            state=memory["memory"],
            return_residual=return_written,
            qk_l2norm=True,
            in_place=True,
        )
        return Remembered(out, {"memory": state}, written[0] if written else None)

    def rule_flops(self) -> int:
        """What the key returns, the write, the read: two FLOPs for each number of the state."""
        return 6 * self.heads.key_dim * self.heads.value_dim
