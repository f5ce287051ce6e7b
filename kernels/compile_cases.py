"""The calls whose kernels `kernels.compile_check` compiles: every op, head dim class and dtype.

Tensors are small in batch and length, which no kernel is compiled for, and real in heads, head dims
and dtypes, which every kernel is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.channel_delta_triton import gated_delta_rule_2, kimi_delta_rule
from kernels.decode_triton import recurrent
from kernels.linear_attention_triton import linear_attention_triton
from kernels.scalar_delta_triton import scalar_delta_triton


@dataclass(frozen=True, slots=True)
class CompileCase:
    """A call of the table.

    Attributes:
        name: what it calls, with head dims and dtype.
        call: runs the launch code on CPU tensors.
        stack_bytes: spilled bytes of a thread that are known and accepted, by kernel.
        proven_transposes: kernels that look as if they transposed a dot result for a product, and
            whose tests on an H200 pass.
    """

    name: str
    call: Callable[[], object]
    stack_bytes: Mapping[str, int] = field(default_factory=dict)
    proven_transposes: frozenset[str] = frozenset()


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def _leaf(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def scalar_delta_call(
    rule: str,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (8, 8),
    segments: int = 1,
    packed: bool = False,
) -> Callable[[], None]:
    """Forward and backward of a rule with at most one decay per head: `delta`, `gated`, `decayed`.

    Args:
        rule: delta rule, gated delta rule, or additive memory with decay.
        key_dim: K.
        value_dim: V.
        dtype: of q, k and v.
        heads: key and value heads.
        segments: parts that a sequence is split into.
        packed: whether two sequences share the row.
    """
    T = 128 * segments

    def call() -> None:
        q, k = (_leaf(1, T, heads[0], key_dim, dtype=dtype) for _ in range(2))
        v = _leaf(1, T, heads[1], value_dim, dtype=dtype)
        gate = _leaf(1, T, heads[1], dtype=torch.float32)
        out, final, residual = scalar_delta_triton(
            q,
            k,
            v,
            log_decay=None if rule == "delta" else gate,
            beta=None if rule == "decayed" else gate,
            scale=1.0,
            qk_l2norm=True,
            cu_seqlens=torch.tensor([0, 30, T]) if packed else None,
            segments=segments,
        )
        # With a packing also the paths of an initial memory and of a residual that is read.
        loss = out.sum() + (final.sum() + residual.sum() if packed else 0.0)
        loss.backward()

    return call


def linear_attention_call(
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    normalize: bool,
    heads: tuple[int, int] = (8, 8),
    segments: int = 1,
    packed: bool = False,
) -> Callable[[], None]:
    """Forward and backward of linear attention: normalised ELU + 1 features, or plain ones.

    Args:
        key_dim: K.
        value_dim: V.
        dtype: of q, k and v.
        normalize: normalised, with ELU + 1 features.
        heads: key and value heads.
        segments: parts that a sequence is split into.
        packed: whether two sequences share the row.
    """
    T = 128 * segments

    def call() -> None:
        q, k = (_leaf(1, T, heads[0], key_dim, dtype=dtype) for _ in range(2))
        v = _leaf(1, T, heads[1], value_dim, dtype=dtype)
        out, final, key_sum = linear_attention_triton(
            q,
            k,
            v,
            elu1=normalize,
            normalize=normalize,
            scale=1.0,
            cu_seqlens=torch.tensor([0, 30, T]) if packed else None,
            segments=segments,
        )
        (out.sum() + (final.sum() + key_sum.sum() if packed else 0.0)).backward()

    return call


def channel_delta_call(
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    *,
    channel_gates: bool,
    heads: tuple[int, int] = (8, 8),
    length: int = 128,
    batch: int = 16,
    packed: bool = False,
) -> Callable[[], None]:
    """Forward and backward of a rule with decay per channel.

    Args:
        key_dim: K.
        value_dim: V.
        dtype: of q, k, v and the strengths.
        channel_gates: erase and write per channel (gated delta rule 2), or one beta (Kimi).
        heads: key and value heads.
        length: tokens of a row; long rows of small batches are cut into segments.
        batch: rows.
        packed: whether two sequences share a single row.
    """
    B = 1 if packed else batch

    def call() -> None:
        q, k = (_leaf(B, length, heads[0], key_dim, dtype=dtype) for _ in range(2))
        v = _leaf(B, length, heads[1], value_dim, dtype=dtype)
        log_decay = _leaf(B, length, heads[1], key_dim, dtype=torch.float32)
        options: dict[str, Any] = {
            "scale": 1.0,
            "initial_state": None,
            "qk_l2norm": True,
            "cu_seqlens": torch.tensor([0, 30, length]) if packed else None,
        }
        if channel_gates:
            erase = _leaf(B, length, heads[1], key_dim, dtype=dtype)
            write = _leaf(B, length, heads[1], value_dim, dtype=dtype)
            gates = {"log_decay": log_decay, "erase": erase, "write": write}
            out, final, residual = gated_delta_rule_2(q, k, v, **gates, **options)
        else:
            beta = _leaf(B, length, heads[1], dtype=dtype)
            out, final, residual = kimi_delta_rule(
                q, k, v, log_decay=log_decay, beta=beta, **options
            )
        (out.sum() + (final.sum() + residual.sum() if packed else 0.0)).backward()

    return call


def decode_call(
    *, decay: str, gates: str, normalize: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], None]:
    """One token of a rule.

    Args:
        decay: `none`, `head` or `channel`.
        gates: `none` (additive memory), `head` or `channel`.
        normalize: whether the read is divided by that of the key sum.
        dtype: of q, k, v and the strengths.
    """
    B, H, D = 2, 8, 128
    shapes = {"none": None, "head": (B, 1, H), "channel": (B, 1, H, D)}

    def gate(kind: str) -> torch.Tensor | None:
        shape = shapes[kind]
        return None if shape is None else torch.zeros(shape, dtype=dtype)

    def call() -> None:
        q, k, v = (torch.zeros(B, 1, H, D, dtype=dtype) for _ in range(3))
        key_sum = torch.zeros(B, H, D) if normalize else None
        recurrent(
            q, k, v, gate(decay), gate(gates), gate(gates), torch.zeros(B, H, D, D), key_sum,
            1.0, 1e-6, gates != "none", normalize, gates != "none",
        )  # fmt: skip

    return call


CHANNEL_STACK_BYTES = {
    "channel_delta_prepare_kernel": 512,
    "channel_delta_scan_kernel": 1152,
    "channel_delta_reverse_scan_kernel": 640,
    "channel_delta_value_grads_kernel": 256,
    "channel_delta_key_grads_kernel": 3200,
}
"""Spills of the 16-bit kernels of the channel-decay rules: mostly loop invariants, read from L1.

Those of the scans are for K = 256; at 128 they spill less than 320 bytes. Those of the key
gradients are the price of tiles 64 channels wide, 1.3 KB with one cut and 3.1 KB through the tree.
"""

FLOAT32_STACK_BYTES = dict.fromkeys(CHANNEL_STACK_BYTES, 4096)
"""Spills in float32, which is for checks of correctness and not tuned."""


SCALAR_STACK_BYTES = {
    "scalar_delta_prepare_kernel": 160,
    "scalar_delta_fwd_kernel": 96,
    "scalar_delta_state_bwd_kernel": 64,
    "scalar_delta_pairs_bwd_kernel": 192,
    "scalar_delta_token_bwd_kernel": 384,
    "linear_attention_scan_kernel": 320,
    "linear_attention_bwd_kernel": 256,
    "linear_attention_denominator_bwd_kernel": 16,
}
"""Spills of the scalar-decay kernels at head dims up to 128, the larger of Triton 3.6 and 3.9.

That of the tokens' kernel is the price of 4 warps, which are faster than 8 without spills.
"""

SCALAR_WIDE_STACK_BYTES = dict.fromkeys(SCALAR_STACK_BYTES, 4608)
"""Spills at 256 × 512, in float32 and at head dims that fill no tile, which are not tuned."""

CASES: tuple[CompileCase, ...] = (
    *(
        CompileCase(
            f"{rule} {K}x{V} {name}",
            scalar_delta_call(rule, K, V, DTYPES[name]),
            SCALAR_STACK_BYTES,
        )
        for rule in ("gated", "delta", "decayed")
        for K, V, name in ((128, 128, "bf16"), (64, 64, "bf16"))
    ),
    CompileCase(
        "gated 128x128 bf16 split",
        scalar_delta_call("gated", 128, 128, torch.bfloat16, segments=8),
        SCALAR_STACK_BYTES,
    ),
    CompileCase(
        "gated 64x64 bf16 grouped packed",
        scalar_delta_call("gated", 64, 64, torch.bfloat16, heads=(4, 8), packed=True),
        SCALAR_STACK_BYTES,
    ),
    *(
        CompileCase(
            f"linear{' normalised' * normalize} {K}x{V} {name}",
            linear_attention_call(K, V, DTYPES[name], normalize=normalize),
            SCALAR_STACK_BYTES if name == "bf16" and K <= 128 else SCALAR_WIDE_STACK_BYTES,
        )
        for normalize in (False, True)
        for K, V, name in (
            (128, 128, "bf16"),
            (64, 64, "bf16"),
            (256, 512, "bf16"),
            (100, 60, "fp16"),
            (128, 128, "fp32"),
        )
    ),
    CompileCase(
        "linear normalised 128x128 bf16 split packed",
        linear_attention_call(
            128, 128, torch.bfloat16, normalize=True, heads=(4, 8), segments=4, packed=True
        ),
        SCALAR_STACK_BYTES,
    ),
    *(
        CompileCase(
            f"{rule} {K}x{V} {name}",
            scalar_delta_call(rule, K, V, DTYPES[name]),
            SCALAR_WIDE_STACK_BYTES,
        )
        for rule, K, V, name in (
            ("gated", 256, 512, "bf16"),
            ("gated", 100, 60, "bf16"),
            ("delta", 100, 60, "bf16"),
            ("gated", 32, 32, "bf16"),
            ("gated", 16, 16, "bf16"),
            ("delta", 16, 64, "bf16"),
            ("decayed", 24, 40, "bf16"),
            ("gated", 128, 128, "fp16"),
            ("gated", 128, 128, "fp32"),
            ("gated", 64, 64, "fp32"),
            ("gated", 256, 512, "fp32"),
        )
    ),
    *(
        CompileCase(
            f"{'gated 2' if channel_gates else 'kimi'} {K}x{V} {name}",
            channel_delta_call(K, V, DTYPES[name], channel_gates=channel_gates),
            FLOAT32_STACK_BYTES if name == "fp32" else CHANNEL_STACK_BYTES,
            frozenset({"channel_delta_prepare_kernel"} if name == "fp32" else ()),
        )
        for channel_gates, K, V, name in (
            (False, 128, 128, "bf16"),
            (True, 128, 128, "bf16"),
            (False, 64, 64, "bf16"),
            (True, 100, 60, "bf16"),
            (False, 256, 512, "bf16"),
            (True, 128, 128, "fp16"),
            (False, 128, 128, "fp32"),
        )
    ),
    CompileCase(
        "kimi 32x32 bf16",
        channel_delta_call(32, 32, torch.bfloat16, channel_gates=False),
        CHANNEL_STACK_BYTES | {"channel_delta_prepare_kernel": 1280},
    ),
    CompileCase(
        "kimi 128x128 bf16 cut",
        channel_delta_call(
            128, 128, torch.bfloat16, channel_gates=False, length=2048, batch=1, heads=(4, 8)
        ),
        CHANNEL_STACK_BYTES,
    ),
    CompileCase(
        "gated 2 64x64 bf16 grouped packed",
        channel_delta_call(64, 64, torch.bfloat16, channel_gates=True, heads=(4, 8), packed=True),
        CHANNEL_STACK_BYTES,
    ),
    *(
        CompileCase(
            f"decode, decay {decay}, gates {gates}{', normalised' * normalize}",
            decode_call(decay=decay, gates=gates, normalize=normalize),
        )
        for decay, gates, normalize in (
            ("none", "none", True),
            ("head", "head", False),
            ("channel", "head", False),
            ("channel", "channel", False),
        )
    ),
)
