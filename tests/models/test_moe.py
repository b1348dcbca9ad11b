"""Layers with experts: every way to store them, and experts that differ from each other."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.checkpoints import packed_module, random_affine
from helpers.tiny_models import save_tiny_model
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.experts import Naming
from terrazzo.models.loader import load
from terrazzo.nn.attention import CausalContext
from terrazzo.spec import DENSE, QuantSpec

IDS = torch.randint(67, (40,), generator=torch.Generator().manual_seed(1))
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj".format
SHARED = "model.layers.1.mlp.shared_expert.up_proj"
QWEN2 = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "hidden_size": 64,
}


def logits(checkpoint: Checkpoint) -> Tensor:
    decoder = load(checkpoint)
    return decoder.logits(decoder(IDS, CausalContext(1, len(IDS))))


def rewrite(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "new")
    (folder / "new").replace(folder / "model.safetensors")


def test_experts_stacked_in_two_tensors_are_the_same_experts(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2_moe", **QWEN2)
    before = Checkpoint(tmp_path)
    apart = logits(before)
    weights = {name: before.dequantize(name).clone() for name in before.plan}
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        stacks: dict[str, list[Tensor]] = {"gate_up_proj": [], "down_proj": []}
        for expert in range(4):
            gate, up, down = (
                tensors.pop(f"{EXPERT(layer, expert, each)}.weight")
                for each in ("gate", "up", "down")
            )
            stacks["gate_up_proj"].append(torch.cat([gate, up]))
            stacks["down_proj"].append(down)
        for name, parts in stacks.items():
            tensors[f"model.layers.{layer}.mlp.experts.{name}"] = torch.stack(parts)
    rewrite(tmp_path, tensors)
    stacked = Checkpoint(tmp_path)
    assert stacked.plan.keys() == weights.keys()
    assert all(torch.equal(stacked.dequantize(name), weights[name]) for name in weights)
    # Slices may be aligned otherwise in memory, which changes the order of sums.
    torch.testing.assert_close(logits(stacked), apart, rtol=1e-5, atol=1e-5)


def test_both_spellings_of_mixtral_are_read(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "mixtral", num_local_experts=3)
    older, newer = Checkpoint(tmp_path), Checkpoint(tmp_path, Naming.TODAY)
    assert "model.layers.1.block_sparse_moe.experts.2.w3" in older.plan
    assert EXPERT(1, 2, "up") in newer.plan
    assert "model.layers.1.mlp.gate" in newer.plan
    expected = logits(older)
    torch.testing.assert_close(logits(newer), expected, rtol=1e-5, atol=1e-5)
    rewrite(tmp_path, {name: newer.tensor(name).clone() for name in newer.tensor_names})
    torch.testing.assert_close(logits(Checkpoint(tmp_path)), expected, rtol=1e-5, atol=1e-5)


def test_experts_may_differ_in_everything(tmp_path: Path) -> None:
    """Also routers and shared experts may be quantized: the tensors decide."""
    mixed = {
        EXPERT(0, 0, "gate"): QuantSpec(8, 32),
        EXPERT(0, 0, "up"): QuantSpec(4, 16, sym=False),
        EXPERT(0, 0, "down"): QuantSpec(2, 16, sym=False),
        EXPERT(0, 1, "gate"): QuantSpec(4, 32, desc_act=True),
        EXPERT(0, 1, "up"): QuantSpec(4, 32, desc_act=True),
        EXPERT(0, 2, "down"): QuantSpec(3, 32),
        EXPERT(1, 3, "up"): QuantSpec(8, -1),
        SHARED: QuantSpec(4, -1),
        "model.layers.0.mlp.gate": QuantSpec(8, 16),
        "model.layers.1.mlp.shared_expert_gate": QuantSpec(8, -1),
    }
    save_tiny_model(tmp_path / "dense", "qwen2_moe", **QWEN2)
    dense = load_file(tmp_path / "dense" / "model.safetensors")
    packed = dict(dense)
    for seed, (name, spec) in enumerate(mixed.items()):
        out_features, in_features = dense[f"{name}.weight"].shape
        affine = random_affine(spec, out_features, in_features, seed)
        affine.scales.mul_(0.1 / 2**spec.bits)
        del packed[f"{name}.weight"]
        packed |= packed_module(affine, spec.bits, module=name)
        dense[f"{name}.weight"] = affine.dequantized
    rewrite(tmp_path / "dense", dense)
    folder = tmp_path / "mixed"
    folder.mkdir()
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    config["quantization_config"]["checkpoint_format"] = "gptq"
    (folder / "config.json").write_text(json.dumps(config))
    rewrite(folder, packed)
    checkpoint = Checkpoint(folder)
    assert {name: checkpoint.plan[name].spec for name in mixed} == mixed
    assert checkpoint.plan[EXPERT(0, 3, "up")].spec == DENSE
    expected = logits(Checkpoint(tmp_path / "dense"))
    difference = (logits(checkpoint) - expected).abs().max()
    assert float(difference / expected.abs().max()) <= 1e-5
