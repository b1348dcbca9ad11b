"""The differences between decoder architectures, one row each."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from terrazzo.models.layout import GATE_UP, QKV
from terrazzo.nn.rope import Pairing


class BiasRule(enum.Enum):
    """Whether linears of one kind have a bias; the value is the key of config.json that decides."""

    ALWAYS = "always"
    NEVER = "never"
    ATTENTION_BIAS = "attention_bias"
    MLP_BIAS = "mlp_bias"


class HeadNormRule(enum.Enum):
    """How queries and keys are normalized before the rotation."""

    PLAIN = "plain"
    PER_HEAD = "per head"
    WHOLE = "all heads as one vector"


class WindowRule(enum.Enum):
    """Which layers see only the last `sliding_window` positions, where no `layer_types` say so."""

    NEVER = "none, whatever config.json says"
    EVERY_LAYER = "all, if sliding_window is a number"
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


class EmbeddingRule(enum.Enum):
    """What the embedding is multiplied with before config.json's own multiplier."""

    PLAIN = "1"
    ROOT_OF_HIDDEN = "sqrt(hidden_size)"


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
class NormNames:
    """The norms of a layer, by their names below it; NO_NORM where there is none."""

    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


NO_NORM = ""
PRE_NORMS = NormNames("input_layernorm", NO_NORM, "post_attention_layernorm", NO_NORM)
POST_NORMS = NormNames(NO_NORM, "post_attention_layernorm", NO_NORM, "post_feedforward_layernorm")
GEMMA_NORMS = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GLM4_NORMS = NormNames(
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row; what is not said is as in Llama without biases.

    name: the entry of `architectures` in config.json. qkv_bias, output_bias, mlp_bias: biases of
    q/k/v, of o, and of gate/up/down. head_dim: what holds where config.json has no such key.
    fused: linears that are one on disk unless the tensors say otherwise. defaults: what
    transformers assumes for absent keys; a multiplier or cap is read only where it stands here.
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


WINDOW = {"sliding_window": 4096}
LATE_WINDOW = {**WINDOW, "max_window_layers": 28}
GEMMA2 = Architecture(
    name="Gemma2ForCausalLM",
    qkv_bias=BiasRule.ATTENTION_BIAS,
    output_bias=BiasRule.ATTENTION_BIAS,
    head_dim=256,
    window=WindowRule.ALL_BUT_EVERY_NTH,
    norms=GEMMA_NORMS,
    norm_weight=NormWeight.AROUND_ZERO,
    scale=ScaleRule.QUERY_SCALAR,
    embedding=EmbeddingRule.ROOT_OF_HIDDEN,
    defaults={
        **WINDOW,
        "sliding_window_pattern": 2,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
)
GEMMA3 = replace(
    GEMMA2,
    name="Gemma3ForCausalLM",
    head_norm=HeadNormRule.PER_HEAD,
    # Folders of the larger models leave out what the class assumes.
    defaults={
        **WINDOW,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "final_logit_softcapping": None,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
    },
)
GLM = Architecture(
    name="GlmForCausalLM",
    qkv_bias=BiasRule.ATTENTION_BIAS,
    head_dim=128,
    rotary=PartOfHead(0.5),
    pairing=Pairing.NEIGHBOURS,
    fused=frozenset({GATE_UP}),
    defaults={"attention_bias": True},
)
MISTRAL = Architecture(name="MistralForCausalLM", window=WindowRule.EVERY_LAYER, defaults=WINDOW)
QWEN2 = Architecture(
    name="Qwen2ForCausalLM",
    qkv_bias=BiasRule.ALWAYS,
    window=WindowRule.LATE_LAYERS,
    defaults=LATE_WINDOW,
)
QWEN3 = Architecture(
    name="Qwen3ForCausalLM",
    qkv_bias=BiasRule.ATTENTION_BIAS,
    output_bias=BiasRule.ATTENTION_BIAS,
    head_norm=HeadNormRule.PER_HEAD,
    head_dim=128,
    window=WindowRule.LATE_LAYERS,
    defaults=LATE_WINDOW,
)

_ROWS = (
    Architecture(
        name="LlamaForCausalLM",
        qkv_bias=BiasRule.ATTENTION_BIAS,
        output_bias=BiasRule.ATTENTION_BIAS,
        mlp_bias=BiasRule.MLP_BIAS,
    ),
    MISTRAL,
    replace(MISTRAL, name="MinistralForCausalLM"),
    replace(MISTRAL, name="Ministral3ForCausalLM", head_dim=128, defaults={}),
    QWEN2,
    QWEN3,
    GEMMA2,
    GEMMA3,
    Architecture(
        name="Phi3ForCausalLM",
        window=WindowRule.EVERY_LAYER,
        rotary=PartOfHead(1.0),
        fused=frozenset({QKV, GATE_UP}),
    ),
    Architecture(
        name="SmolLM3ForCausalLM",
        qkv_bias=BiasRule.ATTENTION_BIAS,
        output_bias=BiasRule.ATTENTION_BIAS,
        mlp_bias=BiasRule.MLP_BIAS,
        window=WindowRule.STANDING_LAYERS,
        defaults={
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "num_key_value_heads": 4,
            "tie_word_embeddings": True,
        },
    ),
    Architecture(
        name="Olmo2ForCausalLM",
        qkv_bias=BiasRule.ATTENTION_BIAS,
        output_bias=BiasRule.ATTENTION_BIAS,
        head_norm=HeadNormRule.WHOLE,
        norms=POST_NORMS,
    ),
    Architecture(
        name="GraniteForCausalLM",
        qkv_bias=BiasRule.ATTENTION_BIAS,
        output_bias=BiasRule.ATTENTION_BIAS,
        mlp_bias=BiasRule.MLP_BIAS,
        scale=ScaleRule.MULTIPLIER,
        defaults={
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
    ),
    GLM,
    replace(GLM, name="Glm4ForCausalLM", norms=GLM4_NORMS),
    replace(GEMMA3, name="Gemma3ForConditionalGeneration", modality=Modality.TOWERS),
    replace(MISTRAL, name="Mistral3ForConditionalGeneration", modality=Modality.TOWERS),
    replace(QWEN2, name="Qwen2VLForConditionalGeneration", modality=Modality.TOWERS),
    replace(QWEN2, name="Qwen2_5_VLForConditionalGeneration", modality=Modality.TOWERS),
    replace(QWEN3, name="Qwen3VLForConditionalGeneration", modality=Modality.TOWERS),
)

ARCHITECTURES = {row.name: row for row in _ROWS}
