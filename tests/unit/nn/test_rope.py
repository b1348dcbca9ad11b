from __future__ import annotations

import cmath

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from terrazzo.nn.rope import (
    DefaultRope,
    LinearRope,
    Llama3Rope,
    Rope,
    RotaryEmbedding,
    YarnRope,
    frequencies,
)

HEAD_DIM = 16


def test_a_pair_of_features_turns_as_a_complex_number() -> None:
    rate = frequencies(DefaultRope(100.0), HEAD_DIM)
    heads = torch.randn(3, 2, HEAD_DIM)
    positions = torch.tensor([0, 1, 7])
    turned = RotaryEmbedding.of(DefaultRope(100.0), HEAD_DIM)(positions).turn_(heads.clone())
    for token, position in enumerate(positions.tolist()):
        for head in range(2):
            for pair in range(HEAD_DIM // 2):
                before = complex(heads[token, head, pair], heads[token, head, pair + HEAD_DIM // 2])
                after = before * cmath.exp(1j * position * float(rate[pair]))
                seen = turned[token, head, pair], turned[token, head, pair + HEAD_DIM // 2]
                assert complex(*map(float, seen)) == pytest.approx(after, abs=1e-5)


@pytest.mark.parametrize(
    ("rope", "parameters"),
    [
        (DefaultRope(5e5), {"rope_type": "default", "rope_theta": 5e5}),
        (LinearRope(1e4, 4.0), {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}),
        (
            Llama3Rope(1e4, 8.0, 1.0, 4.0, 64),
            {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            YarnRope(1e4, 4.0, 1.25, 32.0, 1.0, 64, whole_pairs=True),
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "attention_factor": 1.25,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            YarnRope(1e4, 4.0, 1.0, 8.0, 2.0, 96, whole_pairs=False),
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "attention_factor": 1.0,
                "beta_fast": 8.0,
                "beta_slow": 2.0,
                "truncate": False,
                "original_max_position_embeddings": 96,
            },
        ),
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn between pairs"],
)
def test_angles_are_those_of_transformers(rope: Rope, parameters: dict[str, object]) -> None:
    config = LlamaConfig(
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters=parameters,
    )
    positions = torch.tensor([0, 3, 100, 511])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions.unsqueeze(0))
    rotation = RotaryEmbedding.of(rope, 32)(positions)
    torch.testing.assert_close(rotation.cos_T1R[:, 0], cos[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(rotation.sin_T1R[:, 0, 16:], sin[0, :, 16:], rtol=0, atol=2e-5)
    torch.testing.assert_close(rotation.sin_T1R[:, 0, :16], -sin[0, :, :16], rtol=0, atol=2e-5)
