"""In what decoder architectures differ: the columns of their table."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from terrazzo.nn.moe import SharedExpert
from terrazzo.nn.rope import Pairing


class BiasRule(enum.Enum):
    """Whether linears of one kind have a bias; the value is the key of config.json that decides."""

    ALWAYS = "always"
    NEVER = "never"
    ATTENTION_BIAS = "attention_bias"
    MLP_BIAS = "mlp_bias"
    QKV_BIAS = "qkv_bias"


class HeadNormRule(enum.Enum):
    """How queries and keys are normalized before the rotation."""

    PLAIN = "plain"
    PER_HEAD = "per head"
    WHOLE = "all heads as one vector"


class WindowRule(enum.Enum):
    """Which layers see only the last `sliding_window` positions, where no `layer_types` say so."""

    NEVER = "none, whatever config.json says"
    EVERY_LAYER = "all, if sliding_window is a number"
    EVERY_SWITCHED_LAYER = "all, if use_sliding_window is true"
    EVERY_OTHER_EARLY_LAYER = "even ones below max_window_layers, if use_sliding_window is true"
    LATE_LAYERS = "from max_window_layers on, if use_sliding_window is true"
    ALL_BUT_EVERY_NTH = "all but every sliding_window_pattern-th"
    STANDING_LAYERS = "those without rotation, if use_sliding_window is true"


class NormWeight(enum.Enum):
    """What a stored norm weight means; the value is added to it."""

    PLAIN = 0.0
    AROUND_ZERO = 1.0


class ScaleRule(enum.Enum):
    """What scales the products of queries and keys; the value is the key of config.json."""

    HEAD_DIM = "head_dim"
    QUERY_SCALAR = "query_pre_attn_scalar"
    MULTIPLIER = "attention_multiplier"
    HEAD_DIM_AND_YARN = "mscale_all_dim"


class EmbeddingRule(enum.Enum):
    """What the embedding is multiplied with before config.json's own multiplier."""

    PLAIN = "1"
    ROOT_OF_HIDDEN = "sqrt(hidden_size)"


class AttentionKind(enum.Enum):
    """Where keys and values come from."""

    HEADS = "projections of the hidden state"
    LATENT = "a latent that all heads share"


class Modality(enum.Enum):
    """What a checkpoint holds beside the decoder."""

    TEXT = "nothing"
    TOWERS = "encoders for pictures or sound, which are ignored"


@dataclass(frozen=True, slots=True)
class HeadDimFromHidden:
    """`head_dim` is hidden_size / num_attention_heads where config.json has none."""


@dataclass(frozen=True, slots=True)
class WholeHead:
    """Every feature of a head turns; another `partial_rotary_factor` is refused."""


@dataclass(frozen=True, slots=True)
class PartOfHead:
    """The first features of a head turn. default: `partial_rotary_factor` where it is absent."""

    default: float


@dataclass(frozen=True, slots=True)
class NoExperts:
    """Every layer has one MLP."""


@dataclass(frozen=True, slots=True)
class Experts:
    """Layers have a router and experts; what else is read from config.json stands in the defaults.

    features: the key of the width of a routed expert. shared: whether one sees every token. count:
    the key of their number.
    """

    features: str
    shared: SharedExpert = SharedExpert.NONE
    count: str = "num_experts"


@dataclass(frozen=True, slots=True)
class NormNames:
    """The norms of a layer, by their names below it; NO_NORM where there is none."""

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


NO_NORM = ""
PRE_NORMS = NormNames("input_layernorm", NO_NORM, "post_attention_layernorm", NO_NORM)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row; what is not said is as in Llama without biases.

    name: the entry of `architectures` in config.json. qkv_bias, output_bias, mlp_bias: biases of
    q/k/v, of o, and of gate/up/down. head_dim: what holds where config.json has no such key.
    fused: linears that are one on disk unless the tensors say otherwise. defaults: what
    transformers assumes for absent keys; a multiplier or cap is read only where it stands here.
    experts: whether layers have experts. attention: where keys and values come from.
    """

    name: str
    qkv_bias: BiasRule = BiasRule.NEVER
    output_bias: BiasRule = BiasRule.NEVER
    mlp_bias: BiasRule = BiasRule.NEVER
    head_norm: HeadNormRule = HeadNormRule.PLAIN
    head_dim: int | HeadDimFromHidden = HeadDimFromHidden()
    window: WindowRule = WindowRule.NEVER
    norms: NormNames = PRE_NORMS
    norm_weight: NormWeight = NormWeight.PLAIN
    rotary: WholeHead | PartOfHead = WholeHead()
    pairing: Pairing = Pairing.HALVES
    scale: ScaleRule = ScaleRule.HEAD_DIM
    embedding: EmbeddingRule = EmbeddingRule.PLAIN
    fused: frozenset[str] = frozenset()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    modality: Modality = Modality.TEXT
    experts: NoExperts | Experts = NoExperts()
    attention: AttentionKind = AttentionKind.HEADS
