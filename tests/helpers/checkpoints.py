"""Fabricated checkpoints, whole and damaged.

`packed_module` makes the tensors of one quantized module from codes and zero points, `write_folder`
puts any tensors and configs on disk, and the rest breaks a folder in one way each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from terrazzo.packing import encode_qweight, encode_zeros, sequential_groups
from terrazzo.spec import Format, Name, QuantSpec

MODULE: Name = "model.layers.0.mlp.down_proj"


@dataclass(frozen=True, slots=True)
class Affine:
    """A weight as numbers. codes: uint8 [K, N]. scales: float16 [G, N]. zeros: uint8 [G, N].
    g_idx: int32 [K].
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor

    @property
    def dequantized(self) -> Tensor:
        """float32 [N, K], one product after the other."""
        group = self.g_idx.long()
        centered = self.codes.float() - self.zeros.float()[group]
        return (self.scales.float()[group] * centered).T


def random_affine(spec: QuantSpec, out_features: int, in_features: int, seed: int = 0) -> Affine:
    """Zero points are the middle if and only if `spec.sym`; act-order reverses the groups."""
    generator = torch.Generator().manual_seed(seed)

    def codes(rows: int) -> Tensor:
        size = (rows, out_features)
        return torch.randint(spec.max_code + 1, size, dtype=torch.uint8, generator=generator)

    groups = spec.num_groups(in_features)
    g_idx = sequential_groups(in_features, spec.group_of(in_features))
    scales = torch.rand((groups, out_features), generator=generator) + 0.5
    middle = torch.full((groups, out_features), spec.mid_code, dtype=torch.uint8)
    return Affine(
        codes(in_features),
        scales.half(),
        middle if spec.sym else codes(groups),
        g_idx.flip(0).contiguous() if spec.desc_act else g_idx,
    )


def packed_module(
    weight: Affine, bits: int, checkpoint_format: Format = Format.GPTQ, module: Name = MODULE
) -> dict[str, Tensor]:
    """The tensors of one module as `checkpoint_format` stores them."""
    return {
        f"{module}.qweight": encode_qweight(weight.codes, bits, checkpoint_format),
        f"{module}.qzeros": encode_zeros(weight.zeros, bits, checkpoint_format),
        f"{module}.scales": weight.scales,
        f"{module}.g_idx": weight.g_idx,
    }


@dataclass(frozen=True, slots=True)
class Configs:
    """quantization: quantize_config.json. embedded: inside config.json. Empty means no config."""

    quantization: Mapping[str, Any] = field(default_factory=dict)
    embedded: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=lambda: {"model_type": "llama"})


def config_of(spec: QuantSpec, checkpoint_format: Format = Format.GPTQ, **more: Any) -> Configs:
    fields = {name: getattr(spec, name) for name in ("bits", "group_size", "sym", "desc_act")}
    return Configs({**fields, "checkpoint_format": checkpoint_format.value, **more})


def write_folder(folder: Path, tensors: Mapping[str, Tensor], configs: Configs) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    model = dict(configs.model)
    if configs.embedded:
        model["quantization_config"] = dict(configs.embedded)
    (folder / "config.json").write_text(json.dumps(model))
    if configs.quantization:
        (folder / "quantize_config.json").write_text(json.dumps(configs.quantization))
    return folder


def split_into_shards(folder: Path, shards: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Replaces model.safetensors by `shards` (file name -> tensors) and a true index."""
    (folder / "model.safetensors").unlink()
    for file, tensors in shards.items():
        save_file(dict(tensors), folder / file)
    write_index(folder, {tensor: file for file, tensors in shards.items() for tensor in tensors})


def write_index(folder: Path, weight_map: object) -> None:
    content = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def truncate(file: Path, num_bytes: int) -> None:
    """Keeps the first `num_bytes` of a file, as an interrupted download does."""
    file.write_bytes(file.read_bytes()[:num_bytes])
