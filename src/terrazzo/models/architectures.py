"""The differences between decoder architectures, one row each."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BiasRule(enum.Enum):
    """Whether linears of one kind have a bias; the value is the key of config.json that decides."""

    ALWAYS = "always"
    NEVER = "never"
    ATTENTION_BIAS = "attention_bias"
    MLP_BIAS = "mlp_bias"


class HeadNormRule(enum.Enum):
    """Whether queries and keys are normalized per head before the rotation."""

    PLAIN = "plain"
    PER_HEAD = "per head"


class WindowRule(enum.Enum):
    """When attention is limited to the last `sliding_window` positions."""

    NEVER = "never"
    IF_SIZED = "sliding_window is a number"
    IF_SWITCHED_ON = "use_sliding_window is true"


@dataclass(frozen=True, slots=True)
class HeadDimFromHidden:
    """`head_dim` is hidden_size / num_attention_heads where config.json has none."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row. name: the entry of `architectures` in config.json.

    qkv_bias, output_bias, mlp_bias: biases of q/k/v, of o, and of gate/up/down. head_dim: what
    holds where config.json has no such key.
    """

    name: str
    qkv_bias: BiasRule
    output_bias: BiasRule
    mlp_bias: BiasRule
    head_norm: HeadNormRule
    head_dim: int | HeadDimFromHidden
    window: WindowRule


_ROWS = (
    Architecture(
        name="LlamaForCausalLM",
        qkv_bias=BiasRule.ATTENTION_BIAS,
        output_bias=BiasRule.ATTENTION_BIAS,
        mlp_bias=BiasRule.MLP_BIAS,
        head_norm=HeadNormRule.PLAIN,
        head_dim=HeadDimFromHidden(),
        window=WindowRule.NEVER,
    ),
    Architecture(
        name="MistralForCausalLM",
        qkv_bias=BiasRule.NEVER,
        output_bias=BiasRule.NEVER,
        mlp_bias=BiasRule.NEVER,
        head_norm=HeadNormRule.PLAIN,
        head_dim=HeadDimFromHidden(),
        window=WindowRule.IF_SIZED,
    ),
    Architecture(
        name="Qwen2ForCausalLM",
        qkv_bias=BiasRule.ALWAYS,
        output_bias=BiasRule.NEVER,
        mlp_bias=BiasRule.NEVER,
        head_norm=HeadNormRule.PLAIN,
        head_dim=HeadDimFromHidden(),
        window=WindowRule.IF_SWITCHED_ON,
    ),
    Architecture(
        name="Qwen3ForCausalLM",
        qkv_bias=BiasRule.ATTENTION_BIAS,
        output_bias=BiasRule.ATTENTION_BIAS,
        mlp_bias=BiasRule.NEVER,
        head_norm=HeadNormRule.PER_HEAD,
        head_dim=128,
        window=WindowRule.IF_SWITCHED_ON,
    ),
)

ARCHITECTURES = {row.name: row for row in _ROWS}
