"""The shell around every recurrent memory rule, shared by all mixers but softmax.

For the block's normalised input x:

    q, k, v, gate rows = W_in x                     one fused projection, no bias
    q, k, v            = silu(conv4([q, k, v]))     causal, depthwise, no bias
    out                = rule(φ(q), φ(k), v, gates)
    y                  = W_out (RMSNorm(out) ∘ act(z))    z only where the rule has an output gate

φ normalises each head to unit length, x · rsqrt(Σx² + 1e-6), except in normalised linear attention.
No positions are encoded. A mixer adds its gates and its rule through the abstract methods below;
each serves a whole sequence (`... = B T`) and a single token (`... = B`) alike.

Source: arXiv 2607.07953 section 4 and its public code, which builds on flash-linear-attention.

Memory per sequence: the rule's own in float32 and three inputs of the convolution.
"""

from abc import abstractmethod
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kernels import l2_norm, resolve, short_conv, short_conv_step
from models.configs import ModelConfig
from models.documents import Documents
from models.layers import (
    CONV_WIDTH,
    Blocks,
    Projection,
    RMSNorm,
    ShortConvolution,
    residual_std,
    split_heads,
)
from models.mixer import Mixer, MixerState
from models.residuals import plain_error, read_before, reads_before


class Gates(NamedTuple):
    """What a rule reads besides q, k and v.

    Attributes:
        rule: the rule's own gates, in the order in which its mixer makes and reads them.
        output: logits of the output gate, `[..., HV, V]`; None where the layer has none.
        head_log_decay: the decay among the rule's gates where it is one number per value head,
            `[..., HV]`; what errors before or after the decay differ by.
    """

    rule: tuple[Tensor, ...] = ()
    output: Tensor | None = None
    head_log_decay: Tensor | None = None


class Remembered(NamedTuple):
    """What a rule returns.

    Attributes:
        out: `[..., HV, V]`.
        memory: the memory after the last token.
        written: u, what was added to the memory, `[..., HV, V]`; None where it wasn't asked for or
            the rule corrects nothing.
    """

    out: Tensor
    memory: MixerState
    written: Tensor | None = None


class Signals(NamedTuple):
    """What other layers can be told about this one's memory.

    Attributes:
        value: what was to be stored, after convolution and SiLU, `[..., HV, V]`.
        error: what the memory had wrong, as `models.residuals` defines it; None if not asked for.
    """

    value: Tensor
    error: Tensor | None


class RecurrentMixer(Mixer):
    """A memory rule in the common shell; see the module's docstring.

    Args:
        config: the model's shape.
        gate_blocks: rows of the fused projection after q, k and v.
        output_activation: `silu` or `sigmoid` of the output gate; None without one.
        has_normalizer: the memory includes the running sum of keys.
    """

    # Chunked forms and Triton launches; both are kernels, and nothing is left in them to fuse.
    uncompiled = ("remember", "_reads")

    def __init__(
        self,
        config: ModelConfig,
        *,
        gate_blocks: Blocks = (),
        output_activation: str | None = None,
        has_normalizer: bool = False,
    ) -> None:
        super().__init__()
        heads = config.heads
        self.heads = heads
        self.impl = config.impl
        self.output_activation = output_activation
        self.has_normalizer = has_normalizer
        self.key_width = heads.key_heads * heads.key_dim
        self.value_width = heads.value_heads * heads.value_dim
        self.conv_width = 2 * self.key_width + self.value_width
        qkv = (("q", self.key_width), ("k", self.key_width), ("v", self.value_width))
        self.in_proj = Projection(config.d_model, qkv + gate_blocks)
        self.conv = ShortConvolution(self.conv_width)
        self.out_norm = RMSNorm(heads.value_dim, config.norm_eps)
        self.out_proj = Projection(
            self.value_width, (("out", config.d_model),), std=residual_std(config.num_layers)
        )

    @property
    @abstractmethod
    def op(self) -> str:
        """Name of the rule in `kernels`."""

    @abstractmethod
    def gates(self, x: Float[Tensor, "... D"], rows: tuple[Tensor, ...]) -> Gates:
        """The rule's gates from the block's input and the gate blocks of the projection."""

    @abstractmethod
    def remember(
        self,
        q: Float[Tensor, "B T H K"],
        k: Float[Tensor, "B T H K"],
        v: Float[Tensor, "B T HV V"],
        gates: tuple[Tensor, ...],
        memory: MixerState | None,
        *,
        return_written: bool,
        cu_seqlens: Int[Tensor, " bounds"] | None,
    ) -> Remembered:
        """The rule over a sequence, from an empty memory where `memory` is None.

        With `cu_seqlens`, over every part of the one row (B = 1) that these cut.
        """

    @abstractmethod
    def remember_one(
        self,
        q: Float[Tensor, "B H K"],
        k: Float[Tensor, "B H K"],
        v: Float[Tensor, "B HV V"],
        gates: tuple[Tensor, ...],
        memory: MixerState,
        *,
        return_written: bool,
    ) -> Remembered:
        """The rule for one token; writes the new memory over the old one."""

    @abstractmethod
    def rule_flops(self) -> int:
        """Forward FLOPs of the rule for one token and one value head."""

    def forward(
        self, x: Float[Tensor, "B T D"], documents: Documents | None = None
    ) -> Float[Tensor, "B T D"]:
        """Outputs for a whole sequence from an empty memory; position t reads only up to t."""
        return self.routed(x, None, documents=documents)[0]

    def extend(
        self, x: Float[Tensor, "B T D"], state: MixerState
    ) -> tuple[Float[Tensor, "B T D"], MixerState]:
        """Outputs for T more tokens at once, and the memory after them; consumes `state`."""
        return self.routed(x, state)[:2]

    def step(
        self, x: Float[Tensor, "B D"], state: MixerState
    ) -> tuple[Float[Tensor, "B D"], MixerState]:
        """The output for one more token, and the memory after it; consumes `state`."""
        return self.routed(x, state)[:2]

    def routed(
        self,
        x: Float[Tensor, "... D"],
        state: MixerState | None,
        *,
        shift: Float[Tensor, "... HV V"] | None = None,
        residual: str | None = None,
        documents: Documents | None = None,
    ) -> tuple[Float[Tensor, "... D"], MixerState, Signals]:
        """Outputs, memory and signals, for a sequence `[B, T, D]` or for one token `[B, D]`.

        Args:
            x: the block's normalised input.
            state: the memory before; consumed. None for an empty one, with a sequence only.
            shift: added to the values to store.
            residual: the error to return: `written`, `decayed` or `paper`; None for none.
            documents: the parts of a row that is a whole batch, see `Mixer.forward`; without a
                memory before only.
        """
        cu_seqlens = None if documents is None else documents.cu_seqlens
        qkv, rows = self._project(x)
        convolved, window = self._convolve(qkv, state, cu_seqlens)
        q, k, v = self._split_heads(convolved)
        if shift is not None:
            v = v + shift
        gates = self.gates(x, rows)
        needs_read = residual in ("decayed", "paper")
        if x.ndim == 3:
            remembered = self.remember(
                q,
                k,
                v,
                gates.rule,
                state,
                return_written=residual is not None,
                cu_seqlens=cu_seqlens,
            )
            read = self._reads(k, gates, state, remembered, cu_seqlens) if needs_read else None
        else:
            assert state is not None, "one token needs the memory before it"
            # Before the rule, which writes over the memory.
            read = read_before(l2_norm(k), state["memory"]) if needs_read else None
            remembered = self.remember_one(
                q, k, v, gates.rule, state, return_written=residual is not None
            )
        error = remembered.written
        if read is not None and residual is not None:
            error = plain_error(v, read, log_decay=gates.head_log_decay, residual=residual)
        out = self._finish(remembered.out, gates.output)
        return out, {**remembered.memory, "window": window}, Signals(v, error)

    def initial_state(
        self, batch_size: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> MixerState:
        """Zeros: `memory` and `normalizer` of the rule, and the `window` of convolution inputs."""
        heads = self.heads
        shapes: dict[str, tuple[int, ...]] = {
            "memory": (heads.value_heads, heads.key_dim, heads.value_dim)
        }
        if self.has_normalizer:
            shapes["normalizer"] = (heads.value_heads, heads.key_dim)
        state = {
            name: torch.zeros(batch_size, *shape, device=device, dtype=torch.float32)
            for name, shape in shapes.items()
        }
        window = torch.zeros(
            batch_size, CONV_WIDTH - 1, self.conv_width, device=device, dtype=dtype
        )
        return state | {"window": window}

    def kv_bytes_per_token(self, dtype: torch.dtype = torch.float32) -> int:
        """Zero: recurrent memory does not grow."""
        return 0

    @property
    def kernel_impl(self) -> str:
        """The implementation that serves the rule on the device of the parameters."""
        return resolve(self.impl, self.in_proj.weight.device, self.op)

    def flops_per_token(self, seq_len: int) -> int:
        """Projections, convolution and rule; the same at every length."""
        matrices = sum(
            part.weight.numel() for part in self.modules() if isinstance(part, Projection)
        )
        filters = self.conv.weight.numel()
        return 2 * (matrices + filters) + self.heads.value_heads * self.rule_flops()

    def _convolve(
        self, qkv: Tensor, state: MixerState | None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if state is None:
            return short_conv(qkv, self.conv.weight, cu_seqlens=cu_seqlens)
        if qkv.ndim == 2:
            return short_conv_step(qkv, self.conv.weight, window=state["window"])
        convolved, window = short_conv(qkv, self.conv.weight, window=state["window"])
        # The window is a view of all T convolution inputs, which a kept state would hold alive.
        return convolved, window.clone()

    def _reads(
        self,
        k: Tensor,
        gates: Gates,
        state: MixerState | None,
        remembered: Remembered,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        assert remembered.written is not None, f"{self.op} has no error to route"
        return reads_before(
            k,
            remembered.written,
            log_decay=gates.head_log_decay,
            memory=None if state is None else state["memory"],
            impl=self.impl,
            cu_seqlens=cu_seqlens,
        )

    def _project(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Channels of the convolution, and the gate blocks."""
        rows = self.in_proj.rows[3:]
        qkv, *gate_rows = self.in_proj(x).split_with_sizes([self.conv_width, *rows], dim=-1)
        return qkv, tuple(gate_rows)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.heads
        q, k, v = qkv.split_with_sizes([self.key_width, self.key_width, self.value_width], dim=-1)
        return (
            split_heads(q, heads.key_heads),
            split_heads(k, heads.key_heads),
            split_heads(v, heads.value_heads),
        )

    def _finish(self, out: Tensor, gate: Tensor | None) -> Tensor:
        if self.output_activation is None or gate is None:
            normed: Tensor = self.out_norm(out)
        else:
            normed = self.out_norm.gated(out, gate, self.output_activation)
        contribution: Tensor = self.out_proj(normed.flatten(-2))
        return contribution
