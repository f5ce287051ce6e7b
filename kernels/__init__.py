"""Tensor to tensor: every memory rule as a reference loop, a chunked form and Triton kernels."""

from kernels.channel_delta import gated_delta_rule_2, kimi_delta_rule
from kernels.cross_entropy import linear_cross_entropy
from kernels.decode import (
    delta_rule_step,
    gated_delta_rule_2_step,
    gated_delta_rule_step,
    kimi_delta_rule_step,
    linear_attention_step,
)
from kernels.launch import resolve
from kernels.linear_attention import linear_attention
from kernels.norm import l2_norm, rms_norm, rms_norm_gated
from kernels.rope import rope, rope_tables
from kernels.scalar_delta import delta_rule, gated_delta_rule
from kernels.short_conv import short_conv, short_conv_step
from kernels.swiglu import swiglu

__all__ = [
    "delta_rule",
    "delta_rule_step",
    "gated_delta_rule",
    "gated_delta_rule_2",
    "gated_delta_rule_2_step",
    "gated_delta_rule_step",
    "kimi_delta_rule",
    "kimi_delta_rule_step",
    "l2_norm",
    "linear_attention",
    "linear_attention_step",
    "linear_cross_entropy",
    "resolve",
    "rms_norm",
    "rms_norm_gated",
    "rope",
    "rope_tables",
    "short_conv",
    "short_conv_step",
    "swiglu",
]
