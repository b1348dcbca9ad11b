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

CASES: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 4, "head_dim": 6}),
    ("llama", {"head_dim": 20, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-2}),
    ("llama", {"rope_parameters": LLAMA3}),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 50.0}}),
    ("mistral", {}),
    ("mistral", {"sliding_window": None, "num_key_value_heads": 4}),
    ("mistral", {"head_dim": 8, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen2", {"hidden_size": 60, "num_attention_heads": 6, "intermediate_size": 50}),
    ("qwen3", {"head_dim": 16}),
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
