"""What a decoder is: config.json read once, key by key, into one frozen value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.errors import ConfigError, UnsupportedError
from terrazzo.models.architectures import (
    ARCHITECTURES,
    Architecture,
    BiasRule,
    HeadDimFromHidden,
    WindowRule,
)
from terrazzo.models.keys import Keys
from terrazzo.models.rope_config import read_rope
from terrazzo.nn.rope import Rope

DEFAULT_WINDOW = 4096
"""What transformers assumes where config.json has no `sliding_window` but a window applies."""

ACTIVATIONS = ("silu", "swish")
"""Two names of the same function."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    context_length: positions the model may be run at. It is `max_position_embeddings`, or the
    sliding window where that is shorter: within it a window never hides anything, so full attention
    is exact. qkv_bias, output_bias, mlp_bias: whether q/k/v, o, gate/up/down have a bias.
    """

    architecture: Architecture
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    context_length: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], source: Path) -> ModelConfig:
        """config: the parsed config.json. source: its path, for messages.

        Raises UnsupportedError for an architecture, activation or rope type we have no code for,
        and ConfigError naming file and key for everything missing or illegal.
        """
        keys = Keys(config, source)
        architecture = _architecture(keys)
        _refuse_other_activations(keys)
        max_positions = keys.integer("max_position_embeddings")
        num_heads = keys.integer("num_attention_heads")
        return cls(
            architecture=architecture,
            vocab_size=keys.integer("vocab_size"),
            hidden_size=keys.integer("hidden_size"),
            intermediate_size=keys.integer("intermediate_size"),
            num_layers=keys.integer("num_hidden_layers"),
            num_attention_heads=num_heads,
            num_kv_heads=_num_kv_heads(keys, num_heads),
            head_dim=_head_dim(keys, architecture, num_heads),
            rms_norm_eps=keys.number("rms_norm_eps"),
            rope=read_rope(keys, max_positions),
            max_position_embeddings=max_positions,
            context_length=min(max_positions, _window(keys, architecture, max_positions)),
            tie_word_embeddings=keys.switch_or("tie_word_embeddings", default=False),
            qkv_bias=_has_bias(keys, architecture.qkv_bias),
            output_bias=_has_bias(keys, architecture.output_bias),
            mlp_bias=_has_bias(keys, architecture.mlp_bias),
        )

    @property
    def query_features(self) -> int:
        """Outputs of q_proj and inputs of o_proj."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_features(self) -> int:
        """Outputs of k_proj and of v_proj."""
        return self.num_kv_heads * self.head_dim


def _architecture(keys: Keys) -> Architecture:
    names = keys.texts_or("architectures", ())
    known = ", ".join(ARCHITECTURES)
    if len(names) != 1:
        raise ConfigError(
            f"{keys.source}: architectures is {list(names)!r}; legal is a list of one name. "
            f"Supported: {known}"
        )
    if names[0] not in ARCHITECTURES:
        raise UnsupportedError(
            f"{keys.source}: architecture {names[0]!r} is not supported; supported are {known}"
        )
    return ARCHITECTURES[names[0]]


def _refuse_other_activations(keys: Keys) -> None:
    activation = keys.text_or("hidden_act", "silu")
    if activation not in ACTIVATIONS:
        raise UnsupportedError(f"{keys.source}: hidden_act is {activation!r}; supported is 'silu'")


def _num_kv_heads(keys: Keys, num_heads: int) -> int:
    num_kv_heads = keys.integer_or("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads != 0:
        raise keys.illegal(
            "num_key_value_heads", f"legal is a divisor of num_attention_heads, {num_heads}"
        )
    return num_kv_heads


def _head_dim(keys: Keys, architecture: Architecture, num_heads: int) -> int:
    if keys.has("head_dim"):
        head_dim = keys.integer("head_dim")
    elif isinstance(architecture.head_dim, HeadDimFromHidden):
        if keys.integer("hidden_size") % num_heads != 0:
            raise keys.illegal(
                "hidden_size", f"without head_dim, legal is a multiple of {num_heads} heads"
            )
        head_dim = keys.integer("hidden_size") // num_heads
    else:
        head_dim = architecture.head_dim
    if head_dim % 2 != 0:
        raise ConfigError(
            f"{keys.source}: head_dim is {head_dim}; legal is an even number, because rotary "
            "positions turn pairs of features"
        )
    return head_dim


def _window(keys: Keys, architecture: Architecture, max_positions: int) -> int:
    """Positions that every layer sees; `max_positions` where no window applies."""
    if not _has_window(keys, architecture.window):
        return max_positions
    return keys.integer_or("sliding_window", DEFAULT_WINDOW)


def _has_window(keys: Keys, rule: WindowRule) -> bool:
    if rule is WindowRule.NEVER:
        return False
    if rule is WindowRule.IF_SIZED:
        return "sliding_window" not in keys.values or keys.has("sliding_window")
    return keys.switch_or("use_sliding_window", default=False)


def _has_bias(keys: Keys, rule: BiasRule) -> bool:
    if rule in (BiasRule.ALWAYS, BiasRule.NEVER):
        return rule is BiasRule.ALWAYS
    return keys.switch_or(rule.value, default=False)
