"""Which implementation of an op serves a call: a name, resolved once, for the caller to record."""

import os

import torch

IMPLEMENTATIONS = ("reference", "chunked", "triton")
"""Every implementation by its name: the loop over time, its chunked form, the Triton kernels."""

TRITON_OPS = frozenset(
    {
        "delta_rule",
        "gated_delta_rule",
        "gated_delta_rule_2",
        "kimi_delta_rule",
        "linear_attention",
    }
)
"""Public ops that have Triton kernels; each op's module holds the function in its own table."""

PROVEN_OPS = TRITON_OPS | {"decode"}
"""Ops whose kernels, as they are here, have passed `tests/gpu` on a GPU; "decode" is the one-token
step of all of them. `auto` takes Triton for these alone. A change of an op's kernels takes the op
out until they have run again; they are used then only when asked for by name."""


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in the CPU interpreter (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def _can_launch(device: torch.device) -> bool:
    return device.type == "cuda" or is_interpreted()


def available(device: torch.device, op: str) -> tuple[str, ...]:
    """The implementations that can serve `op` on tensors of `device`, in the order of this list."""
    if op in TRITON_OPS and _can_launch(device):
        return IMPLEMENTATIONS
    return tuple(name for name in IMPLEMENTATIONS if name != "triton")


def resolve(impl: str, device: torch.device | str, op: str) -> str:
    """The name of the implementation that serves `op`; equal to `impl` unless that is `auto`.

    `auto` means the Triton kernels on a CUDA device where the op is in `PROVEN_OPS`, else the
    chunked form.

    Args:
        impl: `auto`, `reference`, `chunked` or `triton`.
        device: where the inputs lie.
        op: name of the public op, such as `gated_delta_rule`.

    Raises:
        ValueError: if `impl` is no such name, or cannot serve `op` on `device`.
    """
    device = torch.device(device)
    if impl == "auto":
        return "triton" if device.type == "cuda" and op in PROVEN_OPS else "chunked"
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"{impl=} is none of auto, {', '.join(IMPLEMENTATIONS)}")
    served = available(device, op)
    if impl not in served:
        why = (
            f"{op} has no Triton kernels"
            if op not in TRITON_OPS
            else f"Triton needs a CUDA device or TRITON_INTERPRET=1, and the inputs lie on {device}"
        )
        raise ValueError(f"{impl=} cannot serve: {why}; use {' or '.join(served)}")
    return impl
