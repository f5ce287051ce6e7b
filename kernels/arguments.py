"""Checks of what callers hand to the public ops; every error names argument, value and remedy."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

MAX_KEY_DIM = 256
MAX_VALUE_DIM = 512
STATE_DTYPES = {torch.float64: torch.float64}
FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of one call, by the project's axis letters.

    Attributes:
        B: batch rows.
        T: tokens in a row; 1 where an op takes one token at a time.
        H: query and key heads.
        HV: value heads, a multiple of `H`; value head h reads key head h // (HV // H).
        K: key dim.
        V: value dim.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int

    @property
    def state(self) -> tuple[int, int, int, int]:
        """Shape of the memory of every batch row."""
        return (self.B, self.HV, self.K, self.V)

    def shape(self, axes: str) -> tuple[int, ...]:
        """The shape that axis letters such as `B T HV K` stand for."""
        return tuple(getattr(self, letter) for letter in axes.split())


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of memories and of all arithmetic for inputs of `dtype`: float32, or float64."""
    return STATE_DTYPES.get(dtype, torch.float32)


def _shape(x: Tensor) -> str:
    return str(list(x.shape))


def _check_rank(name: str, x: Tensor, layout: str) -> None:
    if x.ndim != len(layout.split()):
        raise ValueError(f"{name} has shape {_shape(x)}; expected [{layout.replace(' ', ', ')}]")


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    """Sizes of q, k `[B, T, H, K]` and v `[B, T, HV, V]`.

    Raises:
        ValueError: on a wrong rank, an empty axis, shapes that don't fit each other, head dims
            beyond `MAX_KEY_DIM` and `MAX_VALUE_DIM`, or inputs of mixed dtype or device.
    """
    for name, x, layout in (("q", q, "B T H K"), ("k", k, "B T H K"), ("v", v, "B T HV V")):
        _check_rank(name, x, layout)
        if not x.numel():
            raise ValueError(f"{name} has shape {_shape(x)}; expected every axis to be at least 1")
        if x.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name}.dtype is {x.dtype}; expected a floating-point dtype")
    if k.shape != q.shape:
        raise ValueError(f"k has shape {_shape(k)}; expected q's shape {_shape(q)}")
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(
            f"v has shape {_shape(v)}; expected batch and length {list(q.shape[:2])} as in q"
        )
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    if HV % H:
        raise ValueError(f"v has {HV} heads; expected a multiple of the {H} heads of q and k")
    if K > MAX_KEY_DIM:
        raise ValueError(f"q and k have head dim {K}; expected at most {MAX_KEY_DIM}")
    if V > MAX_VALUE_DIM:
        raise ValueError(f"v has head dim {V}; expected at most {MAX_VALUE_DIM}")
    for name, x in (("q", q), ("k", k)):
        if x.dtype != v.dtype or x.device != v.device:
            raise ValueError(
                f"{name} is {x.dtype} on {x.device}; expected {v.dtype} on {v.device} as v"
            )
    return Sizes(B, T, H, HV, K, V)


def check_gate(name: str, gate: Tensor, expected: tuple[int, ...], v: Tensor) -> None:
    """Refuses a gate of another shape, device or dtype than the call needs.

    Gates may be of v's dtype or of the state's, since decays are often kept in float32 beside
    bfloat16 values; any other dtype would be cut or widened silently.

    Raises:
        ValueError: if shape, dtype or device don't fit.
    """
    if tuple(gate.shape) != expected:
        raise ValueError(f"{name} has shape {_shape(gate)}; expected {list(expected)}")
    allowed = dict.fromkeys((v.dtype, state_dtype(v.dtype)))
    if gate.dtype not in allowed:
        names = " or ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name}.dtype is {gate.dtype}; expected {names} beside v of {v.dtype}")
    if gate.device != v.device:
        raise ValueError(f"{name} lies on {gate.device}; expected {v.device} as v")


def check_state(name: str, state: Tensor, expected: tuple[int, ...], v: Tensor) -> None:
    """Refuses a memory of another shape, dtype or device than the call needs.

    Raises:
        ValueError: if shape, dtype or device don't fit.
    """
    if not isinstance(state, Tensor):
        raise ValueError(f"{name} is a {type(state).__name__}; expected a tensor {list(expected)}")
    if tuple(state.shape) != expected:
        raise ValueError(f"{name} has shape {_shape(state)}; expected {list(expected)}")
    dtype = state_dtype(v.dtype)
    if state.dtype != dtype:
        raise ValueError(f"{name}.dtype is {state.dtype}; expected {dtype} for v of {v.dtype}")
    if state.device != v.device:
        raise ValueError(f"{name} lies on {state.device}; expected {v.device} as v")


def check_cu_seqlens(cu_seqlens: Tensor | None, batch: int, length: int) -> int:
    """How many sequences the call holds: `batch`, or the number packed into the one row.

    Raises:
        ValueError: if the boundaries are no integer vector, the batch isn't 1, or they don't start
            at 0, increase strictly and end at `length`.
    """
    if cu_seqlens is None:
        return batch
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"cu_seqlens has shape {_shape(cu_seqlens)} and dtype {cu_seqlens.dtype}; "
            "expected an int32 or int64 vector of boundaries"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens with a batch of {batch}; expected 1 row of packed sequences")
    bounds = cu_seqlens.tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(
            f"cu_seqlens runs from {bounds[:1]} to {bounds[-1:]}; expected 0 to T={length}"
        )
    for i, (start, end) in enumerate(pairwise(bounds)):
        if end <= start:
            raise ValueError(
                f"cu_seqlens[{i + 1}]={end} follows {start}; expected boundaries that increase"
            )
    return len(bounds) - 1


def check_values(inputs: dict[str, Tensor | None]) -> None:
    """Reads every value, which makes a GPU wait: no NaN or infinity, no positive `log_decay`.

    Raises:
        ValueError: naming the first input with such a value.
    """
    for name, x in inputs.items():
        if x is None:
            continue
        if not bool(torch.isfinite(x).all()):
            count = int((~torch.isfinite(x)).sum())
            raise ValueError(f"{name} holds {count} values that are NaN or infinite")
        if name == "log_decay" and bool((x > 0).any()):
            raise ValueError(
                f"log_decay holds {float(x.max())}; expected natural logs of decays, at most 0"
            )
