from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.tiny_models import SIZES, save_tiny_model
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.models.loader import load
from terrazzo.nn.attention import CausalContext

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
BY_KIND = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.5, 2.0, 4.0],
    "long_factor": [9.0] * 4,
    "partial_rotary_factor": 0.5,
}
SLIDING = ["sliding_attention", "full_attention"]
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}

QWEN_MOE = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
QWEN2_MOE = {**QWEN_MOE, "shared_expert_intermediate_size": 56}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 12,
    "n_routed_experts": 5,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
LITE_YARN = {**YARN, "rope_theta": 500.0, "mscale": 0.7, "mscale_all_dim": 0.7}
EARLY_WINDOW = {"use_sliding_window": True, "sliding_window": 5}

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 6}),
    ("llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}}),
    ("llama", {"rope_parameters": {**YARN, "rope_theta": 500.0}}),
    ("mistral", {}),
    ("mistral", {"sliding_window": 5}),
    ("ministral", {"sliding_window": 5, "layer_types": SLIDING, "head_dim": 12}),
    ("ministral3", {"head_dim": 12, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1}}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    ("mistral", {"head_dim": 8, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen2", {"hidden_size": 60, "num_attention_heads": 6, "intermediate_size": 50}),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    ("qwen3", {"head_dim": 16}),
    ("qwen3", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 3}),
    (
        "qwen3",
        {"head_dim": 8, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
    ),
    ("gemma2", GEMMA),
    ("gemma2", {**GEMMA, "sliding_window": 6, "attn_logit_softcapping": 0.5}),
    ("gemma2", {**GEMMA, "final_logit_softcapping": None, "attn_logit_softcapping": None}),
    ("gemma3_text", {**GEMMA, "sliding_window": 6, "layer_types": SLIDING}),
    ("gemma3_text", {**GEMMA, "sliding_window": 6, "num_hidden_layers": 7}),
    ("gemma3_text", {**GEMMA, "final_logit_softcapping": 3.0, "rope_parameters": BY_KIND}),
    ("phi3", {}),
    ("phi3", {"sliding_window": 5, "num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("phi3", {"hidden_size": 64, "partial_rotary_factor": 0.75}),
    (
        "phi3",
        {"hidden_size": 64, "rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    ("smollm3", {"no_rope_layer_interval": 2}),
    ("smollm3", {"no_rope_layers": [0, 1], "attention_bias": True, "mlp_bias": True}),
    (
        "smollm3",
        {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 5},
    ),
    ("olmo2", {}),
    ("olmo2", {"num_key_value_heads": 4, "attention_bias": True}),
    ("granite", {}),
    ("mixtral", {"num_local_experts": 4}),
    ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 5}),
    ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 8}),
    ("qwen2_moe", QWEN2_MOE),
    ("qwen2_moe", {**QWEN2_MOE, "norm_topk_prob": True, "qkv_bias": False}),
    ("qwen2_moe", {**QWEN2_MOE, "decoder_sparse_step": 2, "num_hidden_layers": 3}),
    ("qwen2_moe", {**QWEN2_MOE, **EARLY_WINDOW, "max_window_layers": 1}),
    ("qwen3_moe", {**QWEN_MOE, "head_dim": 16}),
    ("qwen3_moe", {**QWEN_MOE, "norm_topk_prob": True, "attention_bias": True}),
    ("qwen3_moe", {**QWEN_MOE, **EARLY_WINDOW, "mlp_only_layers": [0]}),
    ("deepseek_v2", LATENT),
    ("deepseek_v2", {**LATENT, "first_k_dense_replace": 0, "n_shared_experts": 1}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": 18, "v_head_dim": 16, "rms_norm_eps": 1e-2}),
    ("deepseek_v2", {**LATENT, "routed_scaling_factor": 2.5, "num_experts_per_tok": 1}),
    ("deepseek_v2", {**LATENT, "rope_parameters": LITE_YARN}),
    ("deepseek_v2", {**LATENT, "rope_parameters": {**LITE_YARN, "mscale": 1.0}}),
    ("granite", {**GRANITE, "attention_bias": True, "mlp_bias": True}),
    ("glm", {"head_dim": 16}),
    ("glm4", {"head_dim": 16}),
    ("glm4", {"head_dim": 16, "partial_rotary_factor": 0.25, "attention_bias": False}),
    ("qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3", {"head_dim": 32, "num_key_value_heads": 1, "vocab_size": 33}),
]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_logits_are_those_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    model = save_tiny_model(tmp_path, family, **changes)
    vocabulary = {**SIZES, **changes}["vocab_size"]
    ids = torch.randint(vocabulary, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(ids).logits
    decoder = load(Checkpoint(tmp_path))
    actual = decoder.logits(decoder(ids.flatten(), CausalContext(3, 24))).view_as(expected)
    assert actual.dtype is torch.float32
    assert float((actual - expected).abs().max() / expected.abs().max()) <= 1e-5
