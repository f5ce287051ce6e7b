"""Reading a prompt, writing on, and going back: prefill, decode, snapshot."""

import torch

from models.lm import ModelState


def snapshot(state: ModelState) -> ModelState:
    """A copy that later steps leave alone, since `step` and `extend` consume what they are given.

    Key-value caches are cut to the tokens in them.
    """
    return [
        {name: _filled(layer, name, tensor).clone() for name, tensor in layer.items()}
        for layer in state
    ]


def _filled(layer: dict[str, torch.Tensor], name: str, tensor: torch.Tensor) -> torch.Tensor:
    if name in ("keys", "values"):
        return tensor[:, :, : int(layer["length"])]
    return tensor
