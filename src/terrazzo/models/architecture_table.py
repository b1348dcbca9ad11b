"""The differences between decoder architectures, one row each."""

from __future__ import annotations

from dataclasses import replace

from terrazzo.models.architectures import (
    NO_NORM,
    Architecture,
    AttentionKind,
    BiasRule,
    EmbeddingRule,
    Experts,
    HeadNormRule,
    Modality,
    NormNames,
    NormWeight,
    PartOfHead,
    ScaleRule,
    WindowRule,
)
from terrazzo.models.layout import GATE_UP, QKV
from terrazzo.nn.moe import SharedExpert
from terrazzo.nn.rope import Pairing

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

SOME_LAYERS = {"decoder_sparse_step": 1, "mlp_only_layers": ()}

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
    Architecture(
        name="MixtralForCausalLM",
        window=WindowRule.EVERY_LAYER,
        experts=Experts("intermediate_size"),
        defaults={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rope_theta": 1e6,
        },
    ),
    Architecture(
        name="Qwen2MoeForCausalLM",
        qkv_bias=BiasRule.QKV_BIAS,
        window=WindowRule.EVERY_OTHER_EARLY_LAYER,
        experts=Experts("moe_intermediate_size", SharedExpert.GATED),
        defaults={
            **LATE_WINDOW,
            **SOME_LAYERS,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
    ),
    Architecture(
        name="Qwen3MoeForCausalLM",
        qkv_bias=BiasRule.ATTENTION_BIAS,
        output_bias=BiasRule.ATTENTION_BIAS,
        head_norm=HeadNormRule.PER_HEAD,
        window=WindowRule.EVERY_SWITCHED_LAYER,
        experts=Experts("moe_intermediate_size"),
        defaults={
            **WINDOW,
            **SOME_LAYERS,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
    ),
    Architecture(
        name="DeepseekV2ForCausalLM",
        pairing=Pairing.NEIGHBOURS,
        scale=ScaleRule.HEAD_DIM_AND_YARN,
        experts=Experts("moe_intermediate_size", SharedExpert.PLAIN, "n_routed_experts"),
        attention=AttentionKind.LATENT,
        defaults={
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
        },
    ),
    replace(GEMMA3, name="Gemma3ForConditionalGeneration", modality=Modality.TOWERS),
    replace(MISTRAL, name="Mistral3ForConditionalGeneration", modality=Modality.TOWERS),
    replace(QWEN2, name="Qwen2VLForConditionalGeneration", modality=Modality.TOWERS),
    replace(QWEN2, name="Qwen2_5_VLForConditionalGeneration", modality=Modality.TOWERS),
    replace(QWEN3, name="Qwen3VLForConditionalGeneration", modality=Modality.TOWERS),
)

ARCHITECTURES = {row.name: row for row in _ROWS}
