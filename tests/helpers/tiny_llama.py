"""A tiny random llama folder with a tokenizer, made without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from helpers.tiny_tokenizer import SENTENCES, write_tokenizer
from terrazzo.models.config import ModelConfig
from terrazzo.models.parameters import ParameterKind, parameters

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


def write_tiny_llama(
    folder: Path, dtype: torch.dtype = torch.float16, adds_bos: bool = False, **changes: Any
) -> Path:
    """Inputs of every linear are correlated, because embeddings and weights have few directions."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    write_tokenizer(folder, adds_bos=adds_bos)
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for parameter in parameters(ModelConfig.from_hf(values, folder / "config.json")):
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.kind is ParameterKind.NORM:
            tensor = 1 + 0.2 * noise
        elif parameter.kind is ParameterKind.LINEAR_BIAS:
            tensor = 0.1 * noise
        else:
            rows, columns = parameter.shape
            left = torch.randn((rows, 12), generator=generator)
            tensor = 0.05 * noise + 0.04 * left @ torch.randn((12, columns), generator=generator)
        tensors[parameter.tensor] = tensor.to(dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_text(file: Path, repeats: int = 40) -> Path:
    """Sentences in another order each time."""
    words = " ".join(SENTENCES).split()
    generator = torch.Generator().manual_seed(5)
    lines = [
        " ".join(words[index] for index in torch.randperm(len(words), generator=generator))
        for _ in range(repeats)
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    return file
