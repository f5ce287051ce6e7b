"""Causal softmax attention with grouped key and value heads and rotary positions."""

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class SoftmaxConfig:
    """Options of a softmax layer.

    Attributes:
        rope_base: base of the rotary frequencies.
        output_gate: multiply the output by sigmoid(gate) before the output projection.
        qk_norm: RMS-normalise q and k per head before the rotation.
    """

    rope_base: float = 500_000.0
    output_gate: bool = False
    qk_norm: bool = False


class Softmax: ...
