"""Adam with decoupled weight decay: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2.

```
p ← p (1 − ηλ);  m ← β₁m + (1 − β₁)g;  v ← β₂v + (1 − β₂)g²
p ← p − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε)
```

The arithmetic is torch's fused AdamW, one pass over memory for each group; what is ours is that the
state goes by parameter name and that t counts each parameter's own updates.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from orchestrator.training.optim.optimizer import UpdateRule


class AdamW(UpdateRule):
    """The rule over one group of fp32 weights."""

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        *,
        betas: Sequence[float],
        eps: float,
        weight_decay: float,
    ) -> None:
        """Starts with zero moments.

        Args:
            weights: fp32 weights by name, moved in place.
            betas: β₁ and β₂.
            eps: ε.
            weight_decay: λ.
        """
        self._weights = dict(weights)
        self._betas = tuple(betas)
        self._eps = eps
        self._weight_decay = weight_decay
        self._exp_avg = {n: torch.zeros_like(w, requires_grad=False) for n, w in weights.items()}
        self._exp_avg_sq = {n: torch.zeros_like(w, requires_grad=False) for n, w in weights.items()}
        # A tensor on the weight's device, since the fused kernel reads and advances it there.
        self._updates = {n: torch.zeros((), device=w.device) for n, w in weights.items()}

    def update(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Moves the weights that have a gradient; the others keep weight and state."""
        names = [name for name in self._weights if name in gradients]
        if not names:
            return
        adamw(
            [self._weights[name] for name in names],
            [gradients[name] for name in names],
            [self._exp_avg[name] for name in names],
            [self._exp_avg_sq[name] for name in names],
            [],
            [self._updates[name] for name in names],
            fused=True,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr,
            weight_decay=self._weight_decay,
            eps=self._eps,
            maximize=False,
        )

    def state(self) -> dict[str, Tensor]:
        """First and second moment and number of updates of each parameter."""
        kinds = {
            "exp_avg": self._exp_avg,
            "exp_avg_sq": self._exp_avg_sq,
            "updates": self._updates,
        }
        return {
            f"{kind}/{name}": tensor for kind, own in kinds.items() for name, tensor in own.items()
        }
