"""What a decoder is: config.json read once, key by key, into one frozen value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import ConfigError, UnsupportedError
from terrazzo.models.architecture_table import ARCHITECTURES
from terrazzo.models.architectures import (
    Architecture,
    BiasRule,
    HeadDimFromHidden,
    Modality,
)
from terrazzo.models.keys import Keys
from terrazzo.models.latent_config import AnyHeads, Latent, read_heads
from terrazzo.models.layer_config import LayerAttention, read_layers
from terrazzo.models.layout import Layout
from terrazzo.models.mlp_config import AnyMlp, read_mlps
from terrazzo.models.multipliers import Multipliers, read_multipliers
from terrazzo.models.rope_config import read_ropes
from terrazzo.nn.activation import Activation
from terrazzo.nn.rope import Rope

ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
"""Activations by their names in config.json."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of one decoder.

    layout: names on disk. head_dim: of keys as they are cached. rotary_dim: features of a head that
    turn. heads: how keys and values are made. layers, mlps: per layer. context_length: positions
    the model may be run at, `max_position_embeddings` or fewer, see `Ropes.exact_length`. qkv_bias,
    output_bias, mlp_bias: whether q/k/v, o, gate/up/down have a bias.
    """

    architecture: Architecture
    layout: Layout
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rms_norm_eps: float
    activation: Activation
    multipliers: Multipliers
    heads: AnyHeads
    layers: tuple[LayerAttention, ...]
    mlps: tuple[AnyMlp, ...]
    max_position_embeddings: int
    context_length: int
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> ModelConfig:
        """What config.json and the tensor names of a folder say; raises what `from_hf` raises."""
        file = checkpoint.folder / "config.json"
        return cls.from_hf(checkpoint.model_config, file, checkpoint.tensor_names)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], source: Path, tensor_names: Collection[str] = ()
    ) -> ModelConfig:
        """config: the parsed config.json. source: its path, for messages. tensor_names: of the
        checkpoint; they decide its layout, which without them is the usual one.

        Raises UnsupportedError for an architecture, activation or rope type we have no code for,
        and ConfigError naming file and key for everything missing or illegal.
        """
        architecture = _architecture(Keys(config, source))
        keys = _decoder_keys(Keys(config, source), architecture)
        max_positions = keys.integer("max_position_embeddings")
        num_heads = keys.integer("num_attention_heads")
        hidden_size = keys.integer("hidden_size")
        num_layers = keys.integer("num_hidden_layers")
        heads = read_heads(keys, architecture)
        if isinstance(heads, Latent):
            head_dim, turning_dim, num_kv_heads = heads.head_dim, heads.turning_dim, num_heads
        else:
            head_dim = turning_dim = _head_dim(keys, architecture, num_heads)
            num_kv_heads = _num_kv_heads(keys, num_heads)
        ropes = read_ropes(keys, architecture, turning_dim, max_positions)
        return cls(
            architecture=architecture,
            layout=Layout.of(tensor_names, architecture.fused),
            vocab_size=keys.integer("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_attention_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rotary_dim=ropes.rotary_dim,
            rms_norm_eps=keys.number("rms_norm_eps"),
            activation=_activation(keys),
            multipliers=read_multipliers(keys, architecture, hidden_size, head_dim),
            heads=heads,
            layers=read_layers(keys, architecture, num_layers, ropes),
            mlps=read_mlps(keys, architecture, num_layers),
            max_position_embeddings=max_positions,
            context_length=ropes.exact_length,
            tie_word_embeddings=keys.switch_or("tie_word_embeddings", default=False),
            qkv_bias=_has_bias(keys, architecture.qkv_bias),
            output_bias=_has_bias(keys, architecture.output_bias),
            mlp_bias=_has_bias(keys, architecture.mlp_bias),
        )

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotations that occur, each once, in the order of the layers."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers))

    @property
    def query_features(self) -> int:
        """Outputs of q_proj."""
        return self.num_attention_heads * self.head_dim

    @property
    def attended_features(self) -> int:
        """Inputs of o_proj."""
        if isinstance(self.heads, Latent):
            return self.num_attention_heads * self.heads.value_dim
        return self.query_features

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


def _decoder_keys(keys: Keys, architecture: Architecture) -> Keys:
    """The keys of the decoder, with what transformers assumes for those that are absent."""
    inner = keys
    if architecture.modality is Modality.TOWERS and keys.has("text_config"):
        inner = keys.object("text_config")
    tie = "tie_word_embeddings"
    outer_tie = {tie: keys.values[tie]} if keys.has(tie) else {}
    return replace(inner, values={**architecture.defaults, **inner.values, **outer_tie})


def _activation(keys: Keys) -> Activation:
    key = "hidden_activation" if keys.has("hidden_activation") else "hidden_act"
    name = keys.text_or(key, "silu")
    if name not in ACTIVATIONS:
        raise UnsupportedError(
            f"{keys.source}: {keys.prefix}{key} is {name!r}; supported are "
            f"{', '.join(map(repr, ACTIVATIONS))}"
        )
    return ACTIVATIONS[name]


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


def _has_bias(keys: Keys, rule: BiasRule) -> bool:
    if rule in (BiasRule.ALWAYS, BiasRule.NEVER):
        return rule is BiasRule.ALWAYS
    return keys.switch_or(rule.value, default=False)
