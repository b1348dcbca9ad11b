"""The decoder of a checkpoint that also holds encoders for pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from helpers.tiny_models import SIZES, fill
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import TensorError
from terrazzo.models.loader import load, open_source
from terrazzo.nn.attention import CausalContext

THREE_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2]}
BLOCK = {"hidden_size": 32, "intermediate_size": 48}
PICTURE = {**BLOCK, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
STACK = {**BLOCK, "depth": 1, "num_heads": 2, "out_hidden_size": 48}

TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 6},
    "mistral3": {"model_type": "mistral"},
    "qwen2_vl": {"rope_parameters": THREE_AXES},
    "qwen2_5_vl": {"rope_parameters": THREE_AXES},
    "qwen3_vl": {"head_dim": 12, "rope_parameters": THREE_AXES},
}
VISION: dict[str, dict[str, Any]] = {
    "gemma3": {**PICTURE, "patch_size": 14, "vision_use_head": False},
    "mistral3": {**PICTURE, "patch_size": 14, "model_type": "pixtral"},
    "qwen2_vl": {"depth": 1, "embed_dim": 32, "hidden_size": 48, "num_heads": 2},
    "qwen2_5_vl": {**STACK, "fullatt_block_indexes": [0]},
    "qwen3_vl": {**STACK, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
TOWERS = {
    "gemma3": ["multi_modal_projector.*", "vision_tower.*"],
    "mistral3": ["multi_modal_projector.*", "vision_tower.*"],
    "qwen2_vl": ["visual.*"],
    "qwen2_5_vl": ["visual.*"],
    "qwen3_vl": ["model.visual.*"],
}


def save(folder: Path, family: str) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(
        family,
        text_config={**SIZES, "bos_token_id": 1, "eos_token_id": 2, **TEXT[family]},
        vision_config=VISION[family],
    )
    model = transformers.AutoModelForImageTextToText.from_config(
        config, attn_implementation="eager"
    ).eval()
    fill(model)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("family", TEXT)
def test_text_gives_the_logits_of_transformers(family: str, tmp_path: Path) -> None:
    model = save(tmp_path, family)
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(input_ids=ids).logits
    checkpoint = Checkpoint(tmp_path)
    decoder = load(checkpoint)
    actual = decoder.logits(decoder(ids.flatten(), CausalContext(2, 24))).view_as(expected)
    assert float((actual - expected).abs().max() / expected.abs().max()) <= 1e-5
    ignored = open_source(checkpoint).report.ignored
    assert [each.name for each in ignored] == TOWERS[family]


def test_towers_are_ignored_with_their_size_and_errors_name_what_is_on_disk(
    tmp_path: Path,
) -> None:
    model = save(tmp_path, "gemma3")
    count = sum("vision_tower" in name for name, _ in model.named_parameters())
    (_, tower) = open_source(Checkpoint(tmp_path)).report.ignored
    assert str(tower) == (
        f"vision_tower.*: ignored, {count} tensors of an encoder that text does not pass"
    )
    config = tmp_path / "config.json"
    config.write_text(
        config.read_text().replace('"intermediate_size": 80', '"intermediate_size": 96')
    )
    with pytest.raises(TensorError, match=r"language_model\.model\.layers\.0\.mlp\.down_proj"):
        load(Checkpoint(tmp_path))
