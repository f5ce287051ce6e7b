"""Cross-layer routing: what one memory layer learns reaches others past the residual stream's sum.

For memory layer l, v_l the value after convolution and SiLU (all value heads), r_l its error in one
of the forms of `models.residuals`, h the residual stream after the whole layer, p(l) the nearest
memory layer below:

    cler              v_l ← v_l + Γ_l ∘ r_{p(l)}, then the ordinary rule; emits its own r_l
    cler_h            h ← h + P_l r_l
    clvr              h ← h + P_l v_l
    surprise_gated    h ← h + P_l (v_l σ(a ‖r_l‖ / (‖v_l‖ + 1e-6) + c))        per head
    concatenated      h ← h + P_l [r_l; v_l]
    self_transform    h ← h + P_l h

Γ starts at `gamma_init`, one number per layer, value head or channel. P is a matrix of zeros, or of
rank r: a down projection in torch's default start, then an up projection of zeros. So a routed
model starts equal to its host, bit for bit, under every kind but a `cler` whose `gamma_init` isn't
0. a starts at 1, c at 0. Softmax layers neither emit nor inject and pass the error of `cler` on;
the first memory layer has a Γ that meets zero.

Source: arXiv 2607.07953 section 5 and its public code (CLER, CLER-H, CLVR and the three controls).

Cost per memory layer: value width × D parameters at full rank, r (value width + D) at rank r, two
FLOPs per token for each; one signal of the value width kept for the backward.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from models.configs import HeadLayout, ModelConfig
from models.layers import Projection
from models.mixer import Layer, ParameterInfo, unset_parameter
from models.recurrent import Signals

SIGNAL_EPS = 1e-6


class ErrorInjection(Layer):
    """Γ: how much of the lower layer's error is added to the values to store.

    Args:
        heads: the model's heads.
        shape: `scalar`, `head` or `channel`.
        start: where Γ starts.
    """

    def __init__(self, heads: HeadLayout, shape: str, start: float) -> None:
        super().__init__()
        self.shape = shape
        self.start = start
        shapes: dict[str, tuple[int, ...]] = {
            "scalar": (),
            "head": (heads.value_heads,),
            "channel": (heads.value_heads, heads.value_dim),
        }
        self.gamma = unset_parameter(*shapes[shape])

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fills Γ with its start; nothing is drawn."""
        with torch.no_grad():
            self.gamma.fill_(self.start)

    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """Γ, a matrix only where it has a number per channel."""
        role = "routing_matrix" if self.shape == "channel" else "routing_vector"
        return {"gamma": ParameterInfo(role)}

    def forward(self, error: Float[Tensor, "... HV V"]) -> Float[Tensor, "... HV V"]:
        """Γ ∘ r."""
        gamma = self.gamma[:, None] if self.shape == "head" else self.gamma
        return gamma.to(error.dtype) * error


class ZeroProjection(Layer):
    """A matrix of zeros, so that what it reads starts without effect.

    Args:
        in_dim: width of the input.
        out_dim: width of the output.
    """

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = unset_parameter(out_dim, in_dim)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Fills the matrix with zeros; nothing is drawn."""
        with torch.no_grad():
            self.weight.zero_()

    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """The matrix."""
        return {"weight": ParameterInfo("routing_matrix")}

    def forward(self, x: Float[Tensor, "... I"]) -> Float[Tensor, "... O"]:
        """W x."""
        return nn.functional.linear(x, self.weight)


class SurpriseGate(Layer):
    """σ(a ‖r‖ / (‖v‖ + 1e-6) + c) for each value head: open where the memory was wrong.

    Args:
        value_heads: HV.
    """

    def __init__(self, value_heads: int) -> None:
        super().__init__()
        self.slope = unset_parameter(value_heads)
        self.offset = unset_parameter(value_heads)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Slope one, offset zero; nothing is drawn."""
        with torch.no_grad():
            self.slope.fill_(1.0)
            self.offset.zero_()

    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """Slope and offset."""
        return {name: ParameterInfo("routing_vector") for name in ("slope", "offset")}

    def forward(
        self, value: Float[Tensor, "... HV V"], error: Float[Tensor, "... HV V"]
    ) -> Float[Tensor, "... HV V"]:
        """The gated value."""
        surprise = _norm(error) / (_norm(value) + SIGNAL_EPS)
        gate = (self.slope * surprise + self.offset).sigmoid()
        return value * gate[..., None].to(value.dtype)


def _norm(x: Tensor) -> Tensor:
    """Length of each head in float32, with a gradient of zero at zero instead of NaN."""
    square = x.float().square().sum(-1)
    is_zero = square == 0
    return square.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)


class HiddenRouting(nn.Module):
    """P s: a layer's own signal, projected into the hidden stream after it.

    Args:
        config: the model's shape; `config.routing.hidden_signal` names the signal.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        routing, heads = config.routing, config.heads
        assert routing.hidden_signal is not None
        self.signal = routing.hidden_signal
        self.is_normalized = routing.normalized
        value_width = heads.value_heads * heads.value_dim
        widths = {"concatenated": 2 * value_width, "self_transform": config.d_model}
        width = widths.get(self.signal, value_width)
        self.gate = SurpriseGate(heads.value_heads) if self.signal == "surprise_gated" else None
        self.down: Projection | None = None
        if routing.rank is not None:
            # Standard deviation of torch's default start, uniform within 1/sqrt(width).
            std = 1 / math.sqrt(3 * width)
            self.down = Projection(
                width,
                (("down", routing.rank),),
                std=std,
                role="routing_matrix",
                is_uniform=True,
            )
        self.up = ZeroProjection(routing.rank or width, config.d_model)

    def forward(self, hidden: Float[Tensor, "... D"], signals: Signals) -> Float[Tensor, "... D"]:
        """What is added to the hidden stream.

        Args:
            hidden: the residual stream after the whole layer.
            signals: of this layer's mixer.
        """
        signal = self._signal(hidden, signals)
        if self.is_normalized:
            wide = signal.float()
            mean_square = wide.square().mean(-1, keepdim=True)
            signal = (wide * (mean_square + SIGNAL_EPS).rsqrt()).to(signal.dtype)
        contribution: Tensor = self.up(signal if self.down is None else self.down(signal))
        return contribution

    def _signal(self, hidden: Tensor, signals: Signals) -> Tensor:
        if self.signal == "self_transform":
            return hidden
        value, error = signals
        if self.signal == "clvr":
            return value.flatten(-2)
        assert error is not None, f"{self.signal} routes an error that its mixer was not asked for"
        if self.signal == "cler_h":
            return error.flatten(-2)
        if self.gate is not None:
            gated: Tensor = self.gate(value, error)
            return gated.flatten(-2)
        return torch.cat([error.flatten(-2), value.flatten(-2)], dim=-1)
