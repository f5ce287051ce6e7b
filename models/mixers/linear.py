"""Linear attention: every token adds its value to the memory under its key, and nothing is erased.

    S_t = S_{t−1} + φ(k_t) v_tᵀ        z_t = z_{t−1} + φ(k_t)
    o_t = S_tᵀ φ(q_t) / (φ(q_t)·z_t + ε)        normalised, φ = ELU + 1
    o_t = K^-½ S_tᵀ φ(q_t)                      unnormalised, φ(x) = x / √(Σx² + 1e-6)

q_t, k_t ∈ R^K, v_t ∈ R^V after convolution and SiLU, S ∈ R^{K×V} and z ∈ R^K zero at the start.
Normalised, q and k keep their length: the features of unit vectors would all lie near one, and
every read close to a plain mean.

Source: Katharopoulos et al., arXiv 2006.16236, equations 7 and 16 to 20; the unnormalised form is
the linear transformer in the public code of arXiv 2607.07953. That code also keeps dead projection
rows so that the rule has the parameters of DeltaNet: `unused_beta`.

Cost per token and value head: 4 K V FLOPs; 4 K V bytes of state (4 K more for z), whatever the
length.
"""

from typing import final

from jaxtyping import Float
from torch import Tensor

from kernels import l2_norm, linear_attention, linear_attention_step
from kernels.linear_attention import State
from models.configs import LinearConfig, ModelConfig
from models.layers import Blocks
from models.mixer import MixerState
from models.recurrent import Gates, RecurrentMixer, Remembered


def _gate_blocks(config: ModelConfig, options: LinearConfig) -> Blocks:
    return (("unused_beta", config.heads.value_heads),) if options.unused_beta else ()


def _named(state: State) -> MixerState:
    if isinstance(state, Tensor):
        return {"memory": state}
    memory, normalizer = state
    return {"memory": memory, "normalizer": normalizer}


@final
class Linear(RecurrentMixer):
    """Additive memory with ELU + 1 features and a running normaliser.

    Args:
        config: the model's shape.
        options: the rule's options.
    """

    def __init__(self, config: ModelConfig, options: LinearConfig) -> None:
        super().__init__(
            config,
            gate_blocks=_gate_blocks(config, options),
            has_normalizer=True,
        )

    @property
    def op(self) -> str:
        """`linear_attention`."""
        return "linear_attention"

    def gates(self, x: Float[Tensor, "... D"], rows: tuple[Tensor, ...]) -> Gates:
        """None: additive memory has no gates."""
        return Gates()

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
        """Normalised linear attention over a sequence; nothing written is returned."""
        initial = None if memory is None else (memory["memory"], memory["normalizer"])
        out, state = linear_attention(
            q,
            k,
            v,
            feature_map="elu1",
            normalize=True,
            initial_state=initial,
            cu_seqlens=cu_seqlens,
            impl=self.impl,
        )
        return Remembered(out, _named(state))

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
        """Normalised linear attention for one token."""
        out, state = linear_attention_step(
            q,
            k,
            v,
            feature_map="elu1",
            normalize=True,
            state=(memory["memory"], memory["normalizer"]),
            in_place=True,
        )
        return Remembered(out, _named(state))

    def rule_flops(self) -> int:
        """The write and the read of S and of z."""
        return 4 * self.heads.key_dim * (self.heads.value_dim + 1)


@final
class LinearUnnormalized(RecurrentMixer):
    """Additive memory over unit keys, read without a normaliser.

    Args:
        config: the model's shape.
        options: the rule's options.
    """

    def __init__(self, config: ModelConfig, options: LinearConfig) -> None:
        super().__init__(config, gate_blocks=_gate_blocks(config, options))

    @property
    def op(self) -> str:
        """`linear_attention`."""
        return "linear_attention"

    def gates(self, x: Float[Tensor, "... D"], rows: tuple[Tensor, ...]) -> Gates:
        """None: additive memory has no gates."""
        return Gates()

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
        """Additive memory over a sequence; it corrects nothing, so nothing written is returned."""
        out, state = linear_attention(
            l2_norm(q),
            l2_norm(k),
            v,
            feature_map="identity",
            normalize=False,
            initial_state=None if memory is None else memory["memory"],
            cu_seqlens=cu_seqlens,
            impl=self.impl,
        )
        return Remembered(out, _named(state))

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
        """Additive memory for one token."""
        out, state = linear_attention_step(
            l2_norm(q),
            l2_norm(k),
            v,
            feature_map="identity",
            normalize=False,
            state=memory["memory"],
            in_place=True,
        )
        return Remembered(out, _named(state))

    def rule_flops(self) -> int:
        """The write and the read."""
        return 4 * self.heads.key_dim * self.heads.value_dim
