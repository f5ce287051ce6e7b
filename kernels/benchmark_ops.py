"""What the benchmark calls: each op's inputs, ours and flash-linear-attention's, by one signature.

An entry's `ours` and `fla` take the inputs by name and return the output. The same work is asked of
both: L2 norm of q and k inside the op for the delta rules, log decay already activated, the final
memory returned. flash-linear-attention is no dependency; its modules are imported on demand.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.channel_delta import gated_delta_rule_2, kimi_delta_rule
from kernels.linear_attention import linear_attention
from kernels.scalar_delta import delta_rule, gated_delta_rule

Call = Callable[..., Tensor]
"""The output of an op as a function of its inputs by name."""


@dataclass(frozen=True, slots=True)
class BenchmarkShape:
    """Sizes of one benchmark.

    Attributes:
        B: batch rows.
        T: tokens of a row.
        H: query and key heads.
        HV: value heads.
        K: key dim.
        V: value dim.
    """

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int

    @classmethod
    def parse(cls, text: str) -> "BenchmarkShape":
        """The shape written as `BxTxHxHVxKxV`, such as `8x4096x8x8x128x128`.

        Raises:
            ValueError: says what is no such shape.
        """
        parts = text.split("x")
        if len(parts) != 6 or not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise ValueError(
                f"shape {text!r} is not of the form BxTxHxHVxKxV, such as 8x4096x8x8x128x128"
            )
        shape = cls(*map(int, parts))
        if shape.HV % shape.H:
            raise ValueError(f"shape {text!r} has {shape.HV=} that is no multiple of {shape.H=}")
        return shape

    def __str__(self) -> str:
        """Batch × length, heads, head dims."""
        heads = f"H{self.H}" if self.H == self.HV else f"H{self.H}/{self.HV}"
        dims = f"D{self.K}" if self.K == self.V else f"K{self.K} V{self.V}"
        return f"{self.B}x{self.T} {heads} {dims}"


@dataclass(frozen=True, slots=True)
class BenchmarkOp:
    """One op of the benchmark.

    Attributes:
        ours: our op, given `impl`.
        fla: flash-linear-attention's; imports it.
        gates: dtype and axes of the op's gates by name.
    """

    ours: Callable[[str], Call]
    fla: Callable[[], Call]
    gates: dict[str, tuple[torch.dtype, str]]

    def gate_bytes(self, shape: BenchmarkShape) -> int:
        """Bytes of all gates of one token."""
        return sum(
            dtype.itemsize * shape.HV * _channels(axes, shape)
            for dtype, axes in self.gates.values()
        )


def _channels(axes: str, shape: BenchmarkShape) -> int:
    return {"B T HV": 1, "B T HV K": shape.K, "B T HV V": shape.V}[axes]


def op_inputs(
    op: str, shape: BenchmarkShape, generator: torch.Generator, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Tensor]:
    """Random inputs on the generator's device, by argument name, asking for gradients.

    q, k and v are normal, and of `dtype` as are erase, write and β, sigmoids of normal numbers; the
    log decay, float32, is logsigmoid(N(0, 1) + 3). In float64 everything is.
    """

    def normal(*sizes: int, dtype: torch.dtype) -> Tensor:
        values = torch.randn(sizes, generator=generator, device=generator.device)
        return values.to(dtype)

    B, T, H, HV, K, V = shape.B, shape.T, shape.H, shape.HV, shape.K, shape.V
    values = {
        "q": normal(B, T, H, K, dtype=dtype),
        "k": normal(B, T, H, K, dtype=dtype),
        "v": normal(B, T, HV, V, dtype=dtype),
    }
    for name, (gate_dtype, axes) in BENCHMARK_OPS[op].gates.items():
        # Gates that the table has in 16 bit are of the dtype asked for; the decay is never narrow.
        wide = dtype if gate_dtype == _BF16 or dtype == torch.float64 else gate_dtype
        channels = () if axes == "B T HV" else (_channels(axes, shape),)
        logits = normal(B, T, HV, *channels, dtype=wide)
        is_decay = name == "log_decay"
        values[name] = torch.nn.functional.logsigmoid(logits + 3) if is_decay else logits.sigmoid()
    return {name: x.detach().requires_grad_() for name, x in values.items()}


def implementation(op: str, impl: str) -> Call:
    """The call of `op` by `triton`, `chunked` or `fla`.

    Raises:
        ValueError: for `fla` where flash-linear-attention is not installed.
    """
    if impl != "fla":
        return BENCHMARK_OPS[op].ours(impl)
    if importlib.util.find_spec("fla") is None:
        raise ValueError("impl 'fla' needs flash-linear-attention; pip install it, or leave it out")
    return BENCHMARK_OPS[op].fla()


def _ours(rule: Callable[..., Any], **options: Any) -> Callable[[str], Call]:
    def by_impl(impl: str) -> Call:
        return lambda q, k, v, **gates: rule(q, k, v, **gates, **options, impl=impl)[0]

    return by_impl


def _repeated(x: Tensor, v: Tensor) -> Tensor:
    """Queries or keys for every value head, for ops of fla that have no grouped form."""
    group = v.shape[2] // x.shape[2]
    return x if group == 1 else x.repeat_interleave(group, 2)


def _fla_op(module: str, name: str) -> Callable[..., Any]:
    op: Callable[..., Any] = getattr(importlib.import_module(f"fla.ops.{module}"), name)
    return op


def _fla_linear() -> Call:
    op = _fla_op("linear_attn", "chunk_linear_attn")
    return lambda q, k, v: op(
        _repeated(q, v), _repeated(k, v), v, normalize=False, output_final_state=True
    )[0]


def _fla_delta() -> Call:
    op = _fla_op("delta_rule", "chunk_delta_rule")
    return lambda q, k, v, beta: op(
        _repeated(q, v),
        _repeated(k, v),
        v,
        beta,
        use_qk_l2norm_in_kernel=True,
        output_final_state=True,
    )[0]


def _fla_gated() -> Call:
    # Its backward refuses Hopper with Triton 3.4 to 3.7.0 because of a compiler fault at some tile
    # widths. The gradient check of the benchmark decides whether the shape at hand is hit.
    chunk_o: Any = importlib.import_module("fla.ops.common.chunk_o")
    chunk_o.TRITON_ABOVE_3_7_1 = True
    op = _fla_op("gated_delta_rule", "chunk_gated_delta_rule")
    return lambda q, k, v, log_decay, beta: op(
        q, k, v, log_decay, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
    )[0]


def _fla_kimi() -> Call:
    op = _fla_op("kda", "chunk_kda")
    return lambda q, k, v, log_decay, beta: op(
        q, k, v, log_decay, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
    )[0]


def _fla_gated_2() -> Call:
    op = _fla_op("gdn2", "chunk_gdn2")
    return lambda q, k, v, log_decay, erase, write: op(
        _repeated(q, v),
        _repeated(k, v),
        v,
        log_decay,
        erase,
        write,
        use_qk_l2norm_in_kernel=True,
        output_final_state=True,
    )[0]


_SCALAR, _KEYS, _VALUES = "B T HV", "B T HV K", "B T HV V"
_F32, _BF16 = torch.float32, torch.bfloat16

BENCHMARK_OPS: dict[str, BenchmarkOp] = {
    "linear_attention": BenchmarkOp(
        _ours(linear_attention, feature_map="identity", normalize=False), _fla_linear, {}
    ),
    "delta_rule": BenchmarkOp(
        _ours(delta_rule, qk_l2norm=True), _fla_delta, {"beta": (_BF16, _SCALAR)}
    ),
    "gated_delta_rule": BenchmarkOp(
        _ours(gated_delta_rule, qk_l2norm=True),
        _fla_gated,
        {"log_decay": (_F32, _SCALAR), "beta": (_BF16, _SCALAR)},
    ),
    "kimi_delta_rule": BenchmarkOp(
        _ours(kimi_delta_rule, qk_l2norm=True),
        _fla_kimi,
        {"log_decay": (_F32, _KEYS), "beta": (_BF16, _SCALAR)},
    ),
    "gated_delta_rule_2": BenchmarkOp(
        _ours(gated_delta_rule_2, qk_l2norm=True),
        _fla_gated_2,
        {"log_decay": (_F32, _KEYS), "erase": (_BF16, _KEYS), "write": (_BF16, _VALUES)},
    ),
}
"""Every op by its name."""
