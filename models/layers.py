"""The parts that layers are made of: projections, norms, the gated MLP, convolution and decay.

B batch, T time, H heads, K key dim, V value dim, D model dim, F hidden width of the MLP.
Every part that owns parameters is a `Layer`: it initialises itself from a generator and states the
role of each parameter. Initial values follow section 4 of arXiv 2607.07953 and its public code:
matrices normal with standard deviation 0.02, those that write into the residual stream divided by
sqrt(2 L), convolutions uniform within 1/sqrt(width), gains one, biases zero.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import rms_norm, rms_norm_gated, swiglu
from models.mixer import Layer, ParameterInfo, unset_parameter

Blocks = tuple[tuple[str, int], ...]
"""Logical blocks of a fused projection along its rows, as (name, number of rows)."""

INIT_STD = 0.02
CONV_WIDTH = 4

# Step sizes of a log-uniform decay start, and the floor under them (Mamba's, kept by Kimi Delta
# Attention).
DT_MIN, DT_MAX, DT_FLOOR = 1e-3, 1e-1, 1e-4
# exp(A_log) starts uniform between these.
DECAY_RATE_MIN, DECAY_RATE_MAX = 1.0, 16.0


def residual_std(num_layers: int) -> float:
    """Standard deviation for matrices that write into the residual stream, twice per layer."""
    return INIT_STD / math.sqrt(2 * num_layers)


def uniform(shape: torch.Size, bound: float, generator: torch.Generator) -> Tensor:
    """Numbers uniform within −bound to bound."""
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


def split_heads(x: Float[Tensor, "... R"], heads: int) -> Float[Tensor, "... H C"]:
    """The last axis as heads and their channels, without a copy."""
    return x.view(*x.shape[:-1], heads, -1)


class Projection(Layer):
    """A matrix without bias, or several that read the same input fused along their rows.

    Args:
        in_dim: width of the input.
        blocks: names and rows of the fused matrices.
        std: standard deviation of the initial values.
        role: one of `models.mixer.ROLES`.
        has_bias: add a bias that starts at zero.
        is_uniform: draw from a uniform distribution instead of a normal one.
    """

    def __init__(
        self,
        in_dim: int,
        blocks: Blocks,
        *,
        std: float = INIT_STD,
        role: str = "matrix",
        has_bias: bool = False,
        is_uniform: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = blocks
        self.is_uniform = is_uniform
        self.std = std
        self.role = role
        self.rows = [rows for _, rows in blocks]
        self.weight = unset_parameter(sum(self.rows), in_dim)
        self.bias = unset_parameter(sum(self.rows)) if has_bias else None

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws the matrix; the bias starts at zero."""
        with torch.no_grad():
            if self.is_uniform:
                draws = uniform(self.weight.shape, math.sqrt(3) * self.std, generator)
            else:
                draws = torch.randn(self.weight.shape, generator=generator) * self.std
            self.weight.copy_(draws)
            if self.bias is not None:
                self.bias.zero_()

    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """The matrix with its blocks, and the bias."""
        fused = self.blocks if len(self.blocks) > 1 else ()
        roles = {"weight": ParameterInfo(self.role, fused)}
        if self.bias is not None:
            roles["bias"] = ParameterInfo("bias")
        return roles

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... R"]:
        """All rows, fused; split them with `split`."""
        return F.linear(x, self.weight, self.bias)

    def split(self, rows: Float[Tensor, "... R"]) -> tuple[Tensor, ...]:
        """The blocks of a fused output, in the order of `blocks`."""
        return rows.split_with_sizes(self.rows, dim=-1)


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) times a gain, computed in float32 (arXiv 1910.07467).

    Args:
        dim: channels that are normalised together, the last axis.
        eps: added to the mean square.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = unset_parameter(dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """The gain starts at one; nothing is drawn."""
        with torch.no_grad():
            self.weight.fill_(1.0)

    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """The gain."""
        return {"weight": ParameterInfo("norm")}

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """The normalised input, in its dtype."""
        return rms_norm(x, self.weight, eps=self.eps)

    def gated(
        self, x: Float[Tensor, "... D"], gate: Float[Tensor, "... D"], activation: str
    ) -> Float[Tensor, "... D"]:
        """The normalised input times `silu` or `sigmoid` of the gate."""
        return rms_norm_gated(x, gate, self.weight, eps=self.eps, activation=activation)


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) ∘ W_up x), gate and up fused (arXiv 2002.05202).

    Args:
        d_model: D.
        ffn_dim: F.
        num_layers: L, for the initial scale of the down projection.
    """

    def __init__(self, d_model: int, ffn_dim: int, num_layers: int) -> None:
        super().__init__()
        self.gate_up = Projection(d_model, (("gate", ffn_dim), ("up", ffn_dim)))
        self.down = Projection(ffn_dim, (("down", d_model),), std=residual_std(num_layers))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """The MLP's contribution to the residual stream."""
        contribution: Tensor = self.down(swiglu(self.gate_up(x)))
        return contribution


class ShortConvolution(Layer):
    """A causal depthwise convolution over the last `CONV_WIDTH` tokens, without bias.

    Args:
        channels: channels, each with a filter of its own.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = unset_parameter(channels, CONV_WIDTH)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Uniform within 1/sqrt(width), torch's own start for a depthwise convolution."""
        bound = CONV_WIDTH**-0.5
        with torch.no_grad():
            self.weight.copy_(uniform(self.weight.shape, bound, generator))

    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """The filters."""
        return {"weight": ParameterInfo("convolution")}


class DecayGate(Layer):
    """Log decay −exp(A_log) · softplus(a + dt_bias) ≤ 0 per head, or per channel of each head.

    `A_log` starts as the logarithm of a number uniform in [1, 16]; `dt_bias` at one (`ones`) or at
    softplus⁻¹(dt) with dt log-uniform in [1e-3, 0.1] (`loguniform`). With `ones` the median decay
    at a zero logit is 1.4e-5 per token: the layer starts almost without memory.

    Args:
        heads: H, decay rates.
        channels: K for a decay per channel of each head; None for one decay per head.
        dt_init: `loguniform` or `ones`.
    """

    def __init__(self, heads: int, channels: int | None, dt_init: str) -> None:
        super().__init__()
        self.heads = heads
        self.channels = channels
        self.dt_init = dt_init
        self.a_log = unset_parameter(heads)
        self.dt_bias = unset_parameter(heads * (channels or 1))

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws rates and, for `loguniform`, step sizes."""
        rates = torch.rand(self.a_log.shape, generator=generator)
        with torch.no_grad():
            self.a_log.copy_((DECAY_RATE_MIN + (DECAY_RATE_MAX - DECAY_RATE_MIN) * rates).log())
            if self.dt_init == "ones":
                self.dt_bias.fill_(1.0)
            else:
                fraction = torch.rand(self.dt_bias.shape, generator=generator)
                log_dt = math.log(DT_MIN) + fraction * math.log(DT_MAX / DT_MIN)
                dt = log_dt.exp().clamp(min=DT_FLOOR)
                # softplus⁻¹(dt) = log(e^dt − 1), without the cancellation at small dt.
                self.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """Rates and biases, which no weight decay should pull towards a memory of its choice."""
        return {"a_log": ParameterInfo("decay_vector"), "dt_bias": ParameterInfo("decay_vector")}

    def forward(self, logits: Float[Tensor, "... R"]) -> Tensor:
        """Log decay in float32, `[..., H]` or `[..., H, K]`, from one logit for each number."""
        wide = torch.promote_types(self.dt_bias.dtype, torch.float32)
        step = F.softplus(logits.to(wide) + self.dt_bias.to(wide))
        rate = self.a_log.to(wide).exp()
        if self.channels is None:
            return -rate * step
        return -rate[:, None] * split_heads(step, self.heads)


class Embedding(Layer):
    """A table of token vectors, normal with standard deviation 0.02.

    Args:
        vocab_size: number of tokens.
        d_model: D.
    """

    def __init__(self, vocab_size: int, d_model: int) -> None:
        super().__init__()
        self.weight = unset_parameter(vocab_size, d_model)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Draws the table."""
        with torch.no_grad():
            self.weight.copy_(torch.randn(self.weight.shape, generator=generator) * INIT_STD)

    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """The table."""
        return {"weight": ParameterInfo("embedding")}

    def forward(self, tokens: Tensor) -> Tensor:
        """The vector of each token."""
        return F.embedding(tokens, self.weight)
