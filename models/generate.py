"""Reading a prompt, writing on, and going back: prefill, decode, snapshot."""

from models.kv_cache import filled
from models.lm import ModelState


def snapshot(state: ModelState) -> ModelState:
    """A copy that later steps leave alone, since `step` and `extend` consume what they are given.

    Key-value caches are cut to the tokens in them.
    """
    return [{name: filled(layer, name).clone() for name in layer} for layer in state]
