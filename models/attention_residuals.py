"""Attention residuals: every sub-layer reads a learned average of all contributions before it.

    c_0 = embedding, c_i = contribution of sub-layer i (its output minus its input)
    input of sub-layer m = Σ_{i<m} a_i c_i        a = softmax_i(w_m · c_i / √(mean(c_i²) + 1e-6))

The mixer and the MLP of a layer are a sub-layer each. w_m ∈ R^D starts at zero, so that every
sub-layer starts from the plain average of what it can read, not from the sum. The first sub-layer
has one source and no query; one further query feeds the final norm: 2 L vectors.

Source: the Full Attention Residuals baseline of arXiv 2607.07953 section 5 and its public code.

Cost: 2 L D parameters; 2 L + 1 contributions of D kept per token, and O(L²) reads of them.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from models.mixer import Layer, ParameterInfo, unset_parameter

SCORE_EPS = 1e-6


class Sources:
    """The contributions so far, each with the inverse of its root mean square per token."""

    def __init__(self, embedding: Float[Tensor, "... D"]) -> None:
        self._contributions: list[Tensor] = []
        self._inverse_rms: list[Tensor] = []
        self.append(embedding)

    def append(self, contribution: Float[Tensor, "... D"]) -> None:
        """Adds what a sub-layer contributed."""
        mean_square = contribution.float().square().mean(-1)
        self._contributions.append(contribution)
        self._inverse_rms.append((mean_square + SCORE_EPS).rsqrt())

    def stacked(self) -> tuple[Float[Tensor, "N ... D"], Float[Tensor, "N ..."]]:
        """All contributions and inverses, the oldest first."""
        return torch.stack(self._contributions), torch.stack(self._inverse_rms)


class SourceQuery(Layer):
    """w_m: what one sub-layer looks for among the contributions before it.

    Args:
        d_model: D.
    """

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.weight = unset_parameter(d_model)

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Zeros, the plain average; nothing is drawn."""
        with torch.no_grad():
            self.weight.zero_()

    def parameter_roles(self) -> dict[str, ParameterInfo]:
        """The query."""
        return {"weight": ParameterInfo("routing_vector")}

    def forward(self, sources: Sources) -> Float[Tensor, "... D"]:
        """The average that the sub-layer reads, in the contributions' dtype."""
        contributions, inverse_rms = sources.stacked()
        scores = (contributions * self.weight).sum(-1, dtype=torch.float32) * inverse_rms
        shares = scores.softmax(0).to(contributions.dtype)
        return (contributions * shares[..., None]).sum(0)
