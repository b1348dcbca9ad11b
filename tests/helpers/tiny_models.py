"""Tiny random models of transformers, the oracle of the decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "ministral": "Ministral",
    "ministral3": "Ministral3",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "phi3": "Phi3",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "granite": "Granite",
    "glm": "Glm",
    "glm4": "Glm4",
}
"""Families by their `model_type`, with what the names of their classes begin with."""

WITH_EXPERTS = {
    "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v2": "DeepseekV2",
}
"""Families whose files have other names than their models in memory."""

SIZES = {
    "vocab_size": 67,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "pad_token_id": 0,
}


def tiny_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A float32 model whose every parameter is random: norms near one, biases not zero."""
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **changes})
    config._attn_implementation = "eager"
    name = {**CLASSES, **WITH_EXPERTS}[family]
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    fill(model, seed)
    return model


def fill(model: PreTrainedModel, seed: int = 0) -> None:
    """Random values everywhere."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)


def save_tiny_model(folder: Path, family: str, **changes: Any) -> PreTrainedModel:
    model = tiny_model(family, **changes)
    model.save_pretrained(folder)
    return model
