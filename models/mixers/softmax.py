"""Causal softmax attention with grouped key and value heads and rotary positions.

    a_ts = softmax_{s ≤ t}(hd^-½ (R_t q_t)·(R_s k_s))        o_t = Σ_s a_ts v_s
    y_t  = W_o o_t, or W_o (o_t ∘ σ(g_t)) with an output gate

q_t ∈ R^hd per query head, k_s, v_s ∈ R^hd per key-value head, shared by a group of query heads;
R_t turns each pair of channels (c, c + hd/2) by t · base^(−2c/hd); g_t has the size of q_t. With
`qk_norm`, q and k are RMS-normalised per head, with gains, before they are turned.

Source: Vaswani et al., arXiv 1706.03762; grouped heads arXiv 2305.13245; rotary positions arXiv
2104.09864, in the half-split pairing; layer of arXiv 2607.07953, which gates the softmax layers of
some hybrids and has no `qk_norm`.

Cost: 2 hd (T + 1) FLOPs per token and query head on average over T positions; no fixed state;
two vectors of hd per key-value head and token of cache. The backward keeps q, k, v, the output and
one number per query head and token.
"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kernels import rope, rope_tables
from models.configs import ModelConfig, SoftmaxConfig
from models.layers import Projection, RMSNorm, residual_std
from models.mixer import Mixer, MixerState

# A cache grows by doubling from here, so that appending costs constant time on average.
MIN_CACHE_TOKENS = 64


@final
class Softmax(Mixer):
    """Softmax attention; its state is the cache of turned keys and of values.

    Args:
        config: the model's shape.
        options: options of softmax layers.
    """

    def __init__(self, config: ModelConfig, options: SoftmaxConfig) -> None:
        super().__init__()
        heads = config.heads
        self.query_heads = heads.softmax_heads
        self.kv_heads = heads.softmax_kv_heads
        self.head_dim = heads.softmax_head_dim
        self.rope_base = options.rope_base
        query_width = self.query_heads * self.head_dim
        kv_width = self.kv_heads * self.head_dim
        blocks = [("q", query_width), ("k", kv_width), ("v", kv_width)]
        if options.output_gate:
            blocks.append(("gate", query_width))
        self.has_output_gate = options.output_gate
        self.tables: tuple[Tensor, Tensor] | None = None
        self.in_proj = Projection(config.d_model, tuple(blocks))
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if options.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if options.qk_norm else None
        self.out_proj = Projection(
            query_width, (("out", config.d_model),), std=residual_std(config.num_layers)
        )

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Outputs for a whole sequence from an empty cache; position t reads only up to t."""
        q, k, v, gate = self._project(x, offset=0)
        return self._finish(self._attend(q, k, v, is_causal=True), gate)

    def extend(
        self, x: Float[Tensor, "B T D"], state: MixerState
    ) -> tuple[Float[Tensor, "B T D"], MixerState]:
        """Outputs for T more tokens at once, and the cache with them; consumes `state`."""
        length = int(state["length"])
        q, k, v, gate = self._project(x, offset=length)
        state = _append(state, k, v)
        total = length + x.shape[1]
        keys, values = state["keys"][:, :, :total], state["values"][:, :, :total]
        if length == 0:
            out = self._attend(q, keys, values, is_causal=True)
        else:
            mask = torch.ones(x.shape[1], total, dtype=torch.bool, device=x.device).tril(length)
            out = self._attend(q, keys, values, mask=mask)
        return self._finish(out, gate), state

    def step(
        self, x: Float[Tensor, "B D"], state: MixerState
    ) -> tuple[Float[Tensor, "B D"], MixerState]:
        """The output for one more token, and the cache with it; consumes `state`."""
        out, state = self.extend(x[:, None], state)
        return out[:, 0], state

    def initial_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> MixerState:
        """Empty `keys` and `values`, `[B, KV, capacity, hd]`, and the number of tokens in them."""
        empty = torch.empty(batch_size, self.kv_heads, 0, self.head_dim, device=device, dtype=dtype)
        length = torch.zeros((), dtype=torch.int64)
        return {"keys": empty, "values": empty.clone(), "length": length}

    @property
    def kernel_impl(self) -> str:
        """Torch's scaled dot-product attention, which chooses its own kernel."""
        return "sdpa"

    def kv_bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """A key and a value for every key-value head."""
        return 2 * self.kv_heads * self.head_dim * dtype.itemsize

    def flops_per_token(self, seq_len: int) -> int:
        """Projections, and scores and values over (seq_len + 1) / 2 tokens on average."""
        matrices = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        return 2 * matrices + 2 * self.query_heads * self.head_dim * (seq_len + 1)

    def _project(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k (turned) and v as `[B, heads, T, hd]`, and the logits of the output gate."""
        rows = self.in_proj(x)
        heads = (self.query_heads, self.kv_heads, self.kv_heads)
        qkv, gate = rows[..., : sum(heads) * self.head_dim], rows[..., sum(heads) * self.head_dim :]
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).split(heads, dim=-2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = self._tables(offset, x.shape[1], x.device)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        return (
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            gate if self.has_output_gate else None,
        )

    def _tables(self, offset: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions offset to offset + length, from tables kept for reuse."""
        total = offset + length
        if (
            self.tables is None
            or self.tables[0].shape[0] < total
            or self.tables[0].device != device
        ):
            positions = torch.arange(max(total, MIN_CACHE_TOKENS), device=device)
            self.tables = rope_tables(positions, self.head_dim, base=self.rope_base)
        cos, sin = self.tables
        return cos[offset:total], sin[offset:total]

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None = None,
        *,
        is_causal: bool = False,
    ) -> Tensor:
        """`[B, T, h * hd]` from q, k, v as `[B, heads, T, hd]`."""
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=self.query_heads != self.kv_heads,
        )
        return out.transpose(1, 2).flatten(-2)

    def _finish(self, out: Tensor, gate: Tensor | None) -> Tensor:
        contribution: Tensor = self.out_proj(out if gate is None else out * gate.sigmoid())
        return contribution


def _append(state: MixerState, k: Tensor, v: Tensor) -> MixerState:
    """The cache with T more keys and values `[B, KV, T, hd]`; grown where they don't fit."""
    length = int(state["length"])
    total = length + k.shape[2]
    caches = {}
    for name, new in (("keys", k), ("values", v)):
        cache = state[name]
        if total > cache.shape[2]:
            capacity = max(MIN_CACHE_TOKENS, 2 * cache.shape[2], total)
            grown = cache.new_empty(*cache.shape[:2], capacity, cache.shape[3])
            grown[:, :, :length] = cache[:, :, :length]
            cache = grown
        cache[:, :, length:total] = new
        caches[name] = cache
    return {**caches, "length": torch.tensor(total)}
