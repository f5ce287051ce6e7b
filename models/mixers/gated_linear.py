"""Gated linear attention: additive memory, a normalised read, and a gate on what is read.

    S_t = γ_t S_{t−1} + φ(k_t) v_tᵀ        z_t = γ_t z_{t−1} + φ(k_t)        φ = ELU + 1
    y_t = W_o ( (S_tᵀ φ(q_t) / (φ(q_t)·z_t + ε)) ∘ σ(W_g x_t) )

q_t, k_t ∈ R^K, v_t ∈ R^V straight from their projections: no convolution, no positions, no norm
inside. γ_t is 1, or exp(−exp(A_log) · softplus(a_t + dt_bias)) per value head (`decay: head`) or
per key channel of each (`channel`), where it acts on the rows of S and z. The gate has full width.

Source: Katharopoulos et al., arXiv 2006.16236, for the read; decays as in RetNet, arXiv 2307.08621
(there constant), and Gated Linear Attention, arXiv 2312.06635. With decay, too, we divide by the
faded sum of keys, where both of these normalise the output instead. z is then carried as one more
value column of S, the memory of a value that is always one.

Cost per token and value head: 4 K (V + 1) FLOPs, 5 K (V + 1) with decay; 4 K (V + 1) bytes of
state, whatever the length.
"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from kernels import linear_attention, linear_attention_step, resolve
from kernels.linear_attention import State
from models.configs import GatedLinearConfig, ModelConfig
from models.documents import Documents
from models.layers import Blocks, DecayGate, Projection, residual_std, split_heads
from models.mixer import Mixer, MixerState

EPS = 1e-6


@final
class GatedLinear(Mixer):
    """Additive memory with a normalised read and an output gate; see the module's docstring.

    Args:
        config: the model's shape.
        options: the rule's options.
    """

    uncompiled = ("_remember",)

    def __init__(self, config: ModelConfig, options: GatedLinearConfig) -> None:
        super().__init__()
        heads = config.heads
        self.heads = heads
        self.impl = config.impl
        key_width = heads.key_heads * heads.key_dim
        value_width = heads.value_heads * heads.value_dim
        blocks: Blocks = (
            ("q", key_width),
            ("k", key_width),
            ("v", value_width),
            ("gate", value_width),
        )
        self.decay: DecayGate | None = None
        if options.decay != "none":
            channels = heads.key_dim if options.decay == "channel" else None
            blocks += (("a", heads.value_heads * (channels or 1)),)
            self.decay = DecayGate(heads.value_heads, channels, options.dt_init)
        self.in_proj = Projection(config.d_model, blocks)
        self.out_proj = Projection(
            value_width, (("out", config.d_model),), std=residual_std(config.num_layers)
        )

    @property
    def kernel_impl(self) -> str:
        """The implementation that serves linear attention on the device of the parameters."""
        return resolve(self.impl, self.in_proj.weight.device, "linear_attention")

    def forward(
        self, x: Float[Tensor, "B T D"], documents: Documents | None = None
    ) -> Float[Tensor, "B T D"]:
        """Outputs for a whole sequence from an empty memory; position t reads only up to t."""
        return self._mix(x, None, None if documents is None else documents.cu_seqlens)[0]

    def extend(
        self, x: Float[Tensor, "B T D"], state: MixerState
    ) -> tuple[Float[Tensor, "B T D"], MixerState]:
        """Outputs for T more tokens at once, and the memory after them; consumes `state`."""
        return self._mix(x, state)

    def step(
        self, x: Float[Tensor, "B D"], state: MixerState
    ) -> tuple[Float[Tensor, "B D"], MixerState]:
        """The output for one more token, and the memory after it; consumes `state`."""
        return self._mix(x, state)

    def initial_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> MixerState:
        """Zeros: `memory` and `normalizer`, or, with decay, both in one `[B, HV, K, V + 1]`."""
        heads = self.heads
        shapes: dict[str, tuple[int, ...]] = {
            "memory": (heads.value_heads, heads.key_dim, heads.value_dim),
            "normalizer": (heads.value_heads, heads.key_dim),
        }
        if self.decay is not None:
            shapes = {"memory": (heads.value_heads, heads.key_dim, heads.value_dim + 1)}
        return {
            name: torch.zeros(batch_size, *shape, device=device, dtype=torch.float32)
            for name, shape in shapes.items()
        }

    def kv_bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """Zero: recurrent memory does not grow."""
        return 0

    def flops_per_token(self, seq_len: int) -> int:
        """Projections and rule; the same at every length."""
        matrices = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        return 2 * matrices + self.heads.value_heads * self.rule_flops()

    def rule_flops(self) -> int:
        """The write and the read of S and z, and their decay, for one token and value head."""
        per_number = 4 if self.decay is None else 5
        return per_number * self.heads.key_dim * (self.heads.value_dim + 1)

    def _mix(
        self, x: Tensor, state: MixerState | None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, MixerState]:
        q, k, v, gate, *decay = self.in_proj.split(self.in_proj(x))
        q, k = split_heads(q, self.heads.key_heads), split_heads(k, self.heads.key_heads)
        v = split_heads(v, self.heads.value_heads)
        if self.decay is None:
            read, memory = self._remember(q, k, v, None, state, cu_seqlens)
        else:
            values = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
            sums, memory = self._remember(q, k, values, self.decay(decay[0]), state, cu_seqlens)
            read = sums[..., :-1] / (sums[..., -1:] + EPS)
        contribution: Tensor = self.out_proj(read.flatten(-2) * gate.sigmoid())
        return contribution, memory

    def _remember(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        state: MixerState | None,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, MixerState]:
        """The rule over a sequence or for one token; normalised where there is no decay."""
        before: State | None = None
        if state is not None:
            before = state["memory"] if self.decay else (state["memory"], state["normalizer"])
        if q.ndim == 4:
            out, after = linear_attention(
                q,
                k,
                v,
                log_decay=log_decay,
                feature_map="elu1",
                normalize=self.decay is None,
                scale=1.0,
                initial_state=before,
                cu_seqlens=cu_seqlens,
                impl=self.impl,
                eps=EPS,
            )
        else:
            assert before is not None, "one token needs the memory before it"
            out, after = linear_attention_step(
                q,
                k,
                v,
                state=before,
                log_decay=log_decay,
                feature_map="elu1",
                normalize=self.decay is None,
                scale=1.0,
                in_place=True,
                eps=EPS,
            )
        if isinstance(after, Tensor):
            return out, {"memory": after}
        return out, {"memory": after[0], "normalizer": after[1]}
