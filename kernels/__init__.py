"""Tensor to tensor: every memory rule as a reference loop, a chunked form and Triton kernels."""

from kernels.channel_delta import gated_delta_rule_2, kimi_delta_rule
from kernels.launch import resolve
from kernels.linear_attention import linear_attention
from kernels.norm import l2_norm, rms_norm, rms_norm_gated
from kernels.scalar_delta import delta_rule, gated_delta_rule

__all__ = [
    "delta_rule",
    "gated_delta_rule",
    "gated_delta_rule_2",
    "kimi_delta_rule",
    "l2_norm",
    "linear_attention",
    "resolve",
    "rms_norm",
    "rms_norm_gated",
]
