"""Causal softmax attention with grouped key and value heads and rotary positions.

    a_ts = softmax_{s ≤ t}(hd^-½ (R_t q_t)·(R_s k_s))        o_t = Σ_s a_ts v_s
    y_t  = W_o o_t, or W_o (o_t ∘ σ(g_t)) with an output gate

q_t ∈ R^hd per query head, k_s, v_s ∈ R^hd per key-value head, shared by a group of query heads;
R_t turns each pair of channels (c, c + hd/2) by t · base^(−2c/hd); g_t has the size of q_t. With
`qk_norm`, q and k are RMS-normalised per head, with gains, before they are turned. With a window of
w tokens, t reads s only where t − w < s ≤ t.

Source: Vaswani et al., arXiv 1706.03762; grouped heads arXiv 2305.13245; rotary positions arXiv
2104.09864, in the half-split pairing; layer of arXiv 2607.07953, which gates the softmax layers of
some hybrids and has no `qk_norm`.

Cost: 2 hd (T + 1) FLOPs per token and query head on average over T positions; no fixed state; two
vectors of hd per key-value head and token of cache, at most w of them under a window. The backward
keeps q, k, v, the output and one number per query head and token.
"""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from kernels import rope, rope_tables
from models.configs import ModelConfig, SoftmaxConfig
from models.documents import Documents
from models.kv_cache import MIN_CAPACITY, append, empty_cache
from models.layers import Projection, RMSNorm, residual_std, split_heads
from models.mixer import Mixer, MixerState


@final
class Softmax(Mixer):
    """Softmax attention; its state is the cache of turned keys and of values.

    Args:
        config: the model's shape.
        options: options of softmax layers.
    """

    # Its tables are made once and kept, and it writes into halves of its output, where tracing
    # cannot follow.
    uncompiled = ("_turned",)

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
        self.window = options.window
        self.has_output_gate = options.output_gate
        self.tables: tuple[Tensor, Tensor] | None = None
        self.in_proj = Projection(config.d_model, tuple(blocks), role="attention_matrix")
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps) if options.qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps) if options.qk_norm else None
        self.out_proj = Projection(
            query_width, (("out", config.d_model),), std=residual_std(config.num_layers)
        )

    def forward(
        self, x: Float[Tensor, "B T D"], documents: Documents | None = None
    ) -> Float[Tensor, "B T D"]:
        """Outputs for a whole sequence from an empty cache; position t reads only up to t."""
        if documents is None:
            q, k, v, gate = self._project(x, offset=0)
            return self._finish(self._attend(q, k, v), gate)
        # Windows as rows again, so that positions stay as small as without documents.
        q, k, v, gate = self._project(x.view(documents.num_windows, documents.seq_len, -1), 0)
        out = self._attend_apart(q, k, v, documents)
        return self._finish(out, None if gate is None else gate.flatten(0, 1))[None]

    def extend(
        self, x: Float[Tensor, "B T D"], state: MixerState
    ) -> tuple[Float[Tensor, "B T D"], MixerState]:
        """Outputs for T more tokens at once, and the cache with them; consumes `state`."""
        q, k, v, gate = self._project(x, offset=int(state["length"]))
        keys, values, after = append(state, k, v, self.window)
        return self._finish(self._attend(q, keys, values), gate), after

    def step(
        self, x: Float[Tensor, "B D"], state: MixerState
    ) -> tuple[Float[Tensor, "B D"], MixerState]:
        """The output for one more token, and the cache with it; consumes `state`."""
        out, after = self.extend(x[:, None], state)
        return out[:, 0], after

    def initial_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> MixerState:
        """An empty cache; see `models.kv_cache`."""
        shape = (batch_size, self.kv_heads, self.head_dim)
        return empty_cache(shape, self.window, device, dtype)

    @property
    def kernel_impl(self) -> str:
        """Torch's scaled dot-product attention, which chooses its own kernel."""
        return "sdpa"

    def kv_bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """A key and a value for every key-value head; nothing where a window bounds them."""
        if self.window is not None:
            return 0
        return 2 * self.kv_heads * self.head_dim * dtype.itemsize

    def flops_per_token(self, seq_len: int) -> int:
        """Projections, and scores and values of the tokens read, on average over positions."""
        matrices = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        full = min(seq_len, self.window or seq_len)
        # Tokens before the window is full read 1, 2, …, all later ones `full`.
        reads = full * (full + 1) // 2 + (seq_len - full) * full
        return 2 * matrices + 4 * self.query_heads * self.head_dim * reads // seq_len

    def _project(self, x: Tensor, offset: int) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k (turned) and v as `[B, heads, T, hd]`, and the logits of the output gate."""
        heads = [self.query_heads, self.kv_heads]
        widths = [sum(heads) * self.head_dim, self.kv_heads * self.head_dim]
        if self.has_output_gate:
            widths.append(self.query_heads * self.head_dim)
        qk, v, *gate = self.in_proj(x).split_with_sizes(widths, dim=-1)
        qk, v = split_heads(qk, sum(heads)), split_heads(v, self.kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split_with_sizes(heads, dim=-2)
            qk = torch.cat([self.q_norm(q), self.k_norm(k)], -2)
        q, k = self._turned(qk, offset).split_with_sizes(heads, dim=-2)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), gate[0] if gate else None

    def _turned(self, qk: Tensor, offset: int) -> Tensor:
        """Queries and keys `[B, T, heads, hd]`, turned by the angles of positions from `offset`."""
        cos, sin = self._tables(offset, qk.shape[1], qk.device)
        return rope(qk, cos, sin)

    def _tables(self, offset: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions offset to offset + length, from tables kept for reuse."""
        total = offset + length
        if (
            self.tables is None
            or self.tables[0].shape[0] < total
            or self.tables[0].device != device
        ):
            # Tables made under inference mode could not be saved for a later backward.
            with torch.inference_mode(mode=False):
                positions = torch.arange(max(total, MIN_CAPACITY), device=device)
                self.tables = rope_tables(positions, self.head_dim, base=self.rope_base)
        cos, sin = self.tables
        return cos[offset:total], sin[offset:total]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """`[B, T, h * hd]` from q, k, v as `[B, heads, T, hd]`; k and v may start before q."""
        num_queries, num_keys = q.shape[2], k.shape[2]
        is_windowed = self.window is not None and num_keys > self.window
        mask: Tensor | None = None
        is_causal = False
        if num_queries > 1 and num_queries == num_keys and not is_windowed:
            is_causal = True
        elif num_queries > 1:
            # How many tokens key j lies before query i; both end with the same token.
            ages = torch.arange(num_queries, device=q.device)[:, None]
            ages = ages + (num_keys - num_queries) - torch.arange(num_keys, device=q.device)
            mask = ages >= 0
            if self.window is not None:
                mask &= ages < self.window
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=self.query_heads != self.kv_heads,
        )
        return out.transpose(1, 2).flatten(-2)

    def _attend_apart(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> Tensor:
        """`[W T, h * hd]` from windows `[W, heads, T, hd]`, each part reading only itself."""
        rows = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v)]
        outs = []
        for length, tokens in documents.groups:
            parts = [row.index_select(0, tokens).view(-1, length, *row.shape[1:]) for row in rows]
            outs.append(self._attend(*(part.transpose(1, 2) for part in parts)).flatten(0, 1))
        return torch.cat(outs).index_select(0, documents.order)

    def _finish(self, out: Tensor, gate: Tensor | None) -> Tensor:
        contribution: Tensor = self.out_proj(out if gate is None else out * gate.sigmoid())
        return contribution
