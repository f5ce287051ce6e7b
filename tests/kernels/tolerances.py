"""How far an implementation may lie from the float64 loop: one table, by dtype.

Errors are relative root mean squares, rms(actual − expected) / rms(expected), tensor by tensor.

float64: a chunk sums up to a few hundred products at 1e-16 each; decays are exponentials of
differences of sums up to about 1000, which cost 1e-13 of their value.
float32: the same at 6e-8; 1e-5 leaves a triangular solve of 64 rows with strengths up to 2 its
growth. Decay gradients sum up to C² terms of both signs, hence one digit less.
bfloat16: inputs are exact, outputs and gradients are rounded once to 8 bits, 2e-3 on average.
"""

import torch
from torch import Tensor

RELATIVE_RMS = {
    torch.float64: {"": 1e-12, "d_log_decay": 1e-11},
    torch.float32: {"": 1e-5, "d_log_decay": 1e-4},
    torch.bfloat16: {"": 5e-3},
}
"""Largest relative error by dtype; "" stands for every name that has no entry of its own."""

FLOOR = 1e-30
"""Absolute error that is always allowed: far below every number that a test asks for, above what
float32 can no longer represent."""


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """rms(actual − expected) / rms(expected), infinite where one of them holds no finite number."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape, f"shapes {actual.shape} and {expected.shape}"
    error = (actual - expected).square().mean().sqrt().item()
    if not error < float("inf"):
        return float("inf")
    return max(0.0, error - FLOOR) / max(expected.square().mean().sqrt().item(), FLOOR)


def assert_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Every tensor of `expected` by itself, with the tolerance of its name and of `dtype`."""
    assert actual.keys() == expected.keys()
    table = RELATIVE_RMS[dtype]
    errors = {name: relative_rms(actual[name], expected[name]) for name in expected}
    wrong = {
        name: error for name, error in errors.items() if not error <= table.get(name, table[""])
    }
    assert not wrong, f"relative errors beyond tolerance: {wrong}; all: {errors}"
