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
from jaxtyping import Float
from torch import Tensor

from kernels import resolve, short_conv, short_conv_step
from models.configs import ModelConfig
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


class Gates(NamedTuple):
    """What a rule reads besides q, k and v.

    Attributes:
        rule: the rule's own gates, in the order in which its mixer makes and reads them.
        output: logits of the output gate, `[..., HV, V]`; None where the layer has none.
    """

    rule: tuple[Tensor, ...] = ()
    output: Tensor | None = None


class Remembered(NamedTuple):
    """What a rule returns.

    Attributes:
        out: `[..., HV, V]`.
        memory: the memory after the last token.
    """

    out: Tensor
    memory: MixerState


class RecurrentMixer(Mixer):
    """A memory rule in the common shell; see the module's docstring.

    Args:
        config: the model's shape.
        gate_blocks: rows of the fused projection after q, k and v.
        output_activation: `silu` or `sigmoid` of the output gate; None without one.
        has_normalizer: the memory includes the running sum of keys.
    """

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
    ) -> Remembered:
        """The rule over a sequence, from an empty memory where `memory` is None."""

    @abstractmethod
    def remember_one(
        self,
        q: Float[Tensor, "B H K"],
        k: Float[Tensor, "B H K"],
        v: Float[Tensor, "B HV V"],
        gates: tuple[Tensor, ...],
        memory: MixerState,
    ) -> Remembered:
        """The rule for one token."""

    @abstractmethod
    def rule_flops(self) -> int:
        """Forward FLOPs of the rule for one token and one value head."""

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Outputs for a whole sequence from an empty memory; position t reads only up to t."""
        return self._mix(x, None)[0]

    def extend(
        self, x: Float[Tensor, "B T D"], state: MixerState
    ) -> tuple[Float[Tensor, "B T D"], MixerState]:
        """Outputs for T more tokens at once, and the memory after them; consumes `state`."""
        out, after = self._mix(x, state)
        # The window is a view of all T convolution inputs, which a kept state would hold alive.
        return out, {**after, "window": after["window"].clone()}

    def step(
        self, x: Float[Tensor, "B D"], state: MixerState
    ) -> tuple[Float[Tensor, "B D"], MixerState]:
        """The output for one more token, and the memory after it; consumes `state`."""
        qkv, rows = self._project(x)
        mixed, window = short_conv_step(qkv, self.conv.weight, window=state["window"])
        gates = self.gates(x, rows)
        out, memory = self.remember_one(*self._split_heads(mixed), gates.rule, state)
        return self._finish(out, gates.output), {**memory, "window": window}

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

    def _mix(self, x: Tensor, state: MixerState | None) -> tuple[Tensor, MixerState]:
        qkv, rows = self._project(x)
        window = None if state is None else state["window"]
        mixed, window = short_conv(qkv, self.conv.weight, window=window)
        gates = self.gates(x, rows)
        out, memory = self.remember(*self._split_heads(mixed), gates.rule, state)
        return self._finish(out, gates.output), {**memory, "window": window}

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
