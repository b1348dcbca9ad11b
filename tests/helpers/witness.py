"""The real GPTQModel as a witness: what it writes, and what it makes of a folder.

Importing this module imports GPTQModel, so only tests/interop does.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from terrazzo import LLM
from terrazzo.engine.config import EngineConfig, KernelPolicy

VOCABULARY = 128

TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
"""Sizes that every GPTQModel format accepts: multiples of 32."""

CALIBRATION = tuple(
    tuple(torch.randint(VOCABULARY, (32,), generator=torch.Generator().manual_seed(seed)).tolist())
    for seed in range(24)
)
TOKENS = CALIBRATION[0]


def write_tiny_model(folder: Path, architecture: str = "llama", **sizes: Any) -> Path:
    """A random float16 model with uneven columns and rows, so that scales and orders differ.

    Some rows have one sign only: their true zero point is 0 or the largest code when asymmetric.
    """
    torch.manual_seed(7)
    config = AutoConfig.for_model(architecture, **{**TINY, **sizes})
    model = AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            weight = torch.randn_like(module.weight) * 0.05
            weight[:, ::7] *= 5
            weight[::5] *= 3
            weight[1::8] = weight[1::8].abs()
            weight[2::8] = -weight[2::8].abs()
            module.weight.data = weight
    model.half().save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return folder


def write_tiny_model_apart(folder: Path, architecture: str, **sizes: Any) -> Path:
    """`write_tiny_model` in a process of its own.

    GPTQModel changes how transformers builds and names experts in any process that has loaded some.
    """
    spawn = multiprocessing.get_context("spawn")
    writer = spawn.Process(target=write_tiny_model, args=(folder, architecture), kwargs=sizes)
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    return folder


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    """Words `0`, `1`, ... are their own ids. GPTQModel loads no folder without a tokenizer."""
    words = WordLevel({str(index): index for index in range(vocabulary)}, unk_token="0")
    tokenizer = Tokenizer(words)
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="0", bos_token="1", eos_token="2", pad_token="0"
    ).save_pretrained(folder)


def quantize_with_gptqmodel(
    source: Path, out: Path, calibration: Sequence[Sequence[int]] = CALIBRATION, **config: Any
) -> Path:
    model = GPTQModel.load(
        str(source),
        QuantizeConfig(**config, offload_to_disk=False),
        device="cpu",
        dtype=torch.float32,
    )
    data = [{"input_ids": list(ids), "attention_mask": [1] * len(ids)} for ids in calibration]
    model.quantize(data, batch_size=8)
    model.save(str(out))
    return out


class Witness:
    """A quantized folder as GPTQModel's Torch kernel sees it, computed in float32.

    The kernel accepts only 16-bit types when it loads. Every module is cast to float32 afterwards,
    which keeps the float16 scales exactly, and unquantized tensors are read again from the disk.
    """

    def __init__(self, folder: Path) -> None:
        loaded = GPTQModel.load(
            str(folder), backend=BACKEND.GPTQ_TORCH, device="cpu", dtype=torch.float16
        )
        self.model: nn.Module = loaded.model.float().eval()
        stored: dict[str, Tensor] = {}
        for shard in sorted(folder.glob("*.safetensors")):
            stored |= load_file(shard)
        for name, parameter in self.model.named_parameters():
            if name in stored:
                parameter.data = stored[name].float()
        self.model.tie_weights()

    def dequantized(self) -> dict[str, Tensor]:
        """float32 [out_features, in_features] of every quantized module."""
        return {
            name: module.dequantize_weight().T.contiguous()
            for name, module in self.model.named_modules()
            if hasattr(module, "qweight")
        }

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """float32 [T, vocabulary]."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([token_ids])).logits[0]
        return logits


def exact_logits(folder: Path, token_ids: Sequence[int]) -> Tensor:
    """Terrazzo's own, float32 [T, vocabulary], with activations in float32 as the witness has."""
    config = EngineConfig(kernel_policy=KernelPolicy.SPEED)
    return LLM(folder, config).logits(token_ids)
