"""A tiny picture model whose decoder goes by any of its names."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from helpers.tiny_llama import CONFIG, write_tiny_llama
from terrazzo.spellings import Spelling


def write_picture_model(folder: Path, spelling: Spelling) -> Path:
    """Mistral3: a decoder and its head in `spelling`, a tower beside it."""
    write_tiny_llama(folder, tie_word_embeddings=False)
    root = spelling.value.removesuffix("layers")
    file = folder / "model.safetensors"
    tensors = {
        spelling.of(name.removesuffix(".weight")) + ".weight"
        if name.startswith(("model.layers.", "lm_head."))
        else root + name.removeprefix("model."): tensor
        for name, tensor in load_file(file).items()
    }
    tensors["vision_tower.layers.0.feed_forward.up_proj.weight"] = torch.ones(8, 8)
    save_file(tensors, file)
    text = {k: v for k, v in CONFIG.items() if k not in ("architectures", "tie_word_embeddings")}
    config = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "tie_word_embeddings": False,
        "text_config": {**text, "model_type": "mistral", "head_dim": 16},
        "vision_config": {"model_type": "pixtral"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
