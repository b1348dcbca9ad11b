"""Quantizing models with experts: every expert by its own rule and its own tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.tiny_llama import write_text, write_tiny_llama
from terrazzo import quantize
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.experts import MIXTRAL_SHARDS
from terrazzo.models.loader import load
from terrazzo.nn.attention import CausalContext
from terrazzo.quantization.capture import Prior, measure_hessian
from terrazzo.quantization.job import open_job
from terrazzo.quantization.options import CalibrationOptions
from terrazzo.quantization.report import QuantizationReport
from terrazzo.rules import RuleSet
from terrazzo.spec import DENSE, QuantSpec

BASE = QuantSpec(4, 32)
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "mlp_only_layers": [1],
    "num_hidden_layers": 3,
    "head_dim": 16,
}
QWEN2 = {
    **QWEN3,
    "architectures": ["Qwen2MoeForCausalLM"],
    "shared_expert_intermediate_size": 64,
}
DEEPSEEK = {
    **QWEN3,
    "architectures": ["DeepseekV2ForCausalLM"],
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
}
DEEPSEEK_LARGE = {**DEEPSEEK, "q_lora_rank": 64}
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
RULES = {
    r"-:.*\.0\.mlp\.experts\.2\..*": {},
    r".*\.experts\.1\.down_proj": {"bits": 8},
    r".*\.experts\.0\.gate_proj": {"group_size": 16, "sym": False},
    r".*\.experts\.3\.up_proj": {"desc_act": True},
    r".*\.mlp\.gate$": {"bits": 8},
}
IDS = torch.randint(320, (48,), generator=torch.Generator().manual_seed(3))
EXPERT = "model.layers.{}.mlp.experts.{}.{}_proj".format


def logits(folder: Path) -> Tensor:
    decoder = load(Checkpoint(folder))
    return decoder.logits(decoder(IDS, CausalContext(1, len(IDS))))


def run(dense: Path, out: Path, num_tokens: int = 1024) -> QuantizationReport:
    text = write_text(dense.parent / "text.txt")
    calibration = CalibrationOptions(text, num_tokens=num_tokens, sequence_length=32)
    return quantize(dense, out, rules=RuleSet.parse(RULES, BASE), calibration=calibration)


def in_older_spelling(folder: Path) -> None:
    """Names as transformers writes them for Mixtral."""
    shards = {new: old for old, new in MIXTRAL_SHARDS.items()}
    renamed = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        for new, old in {".mlp.": ".block_sparse_moe.", **shards}.items():
            name = name.replace(new, old)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors")


@pytest.mark.parametrize(
    "sizes",
    [QWEN3, QWEN2, MIXTRAL, DEEPSEEK, DEEPSEEK_LARGE],
    ids=["qwen3", "qwen2", "mixtral", "deepseek", "deepseek-large"],
)
def test_logits_are_those_of_the_dequantized_weights(sizes: dict[str, Any], tmp_path: Path) -> None:
    dense, out = write_tiny_llama(tmp_path / "dense", **sizes), tmp_path / "out"
    if sizes is MIXTRAL:
        in_older_spelling(dense)
    before = logits(dense)
    report = run(dense, out)
    checkpoint = Checkpoint(out)
    assert checkpoint.conflicts == ()
    specs = {name: resolution.spec for name, resolution in checkpoint.plan.items()}
    assert specs[EXPERT(0, 2, "up")] == DENSE
    assert specs[EXPERT(0, 1, "down")] == QuantSpec(8, 32)
    assert specs[EXPERT(0, 0, "gate")] == QuantSpec(4, 16, sym=False)
    assert specs[EXPERT(0, 3, "up")] == QuantSpec(4, 32, desc_act=True)
    assert specs["model.layers.0.mlp.gate"] == DENSE
    assert {module.name for module in report.modules} == set(checkpoint.plan.quantized)
    twin = tmp_path / "twin"
    twin.mkdir()
    tensors = {
        name: checkpoint.tensor(name).float()
        for name in checkpoint.tensor_names
        if not name.endswith((".qweight", ".qzeros", ".scales", ".g_idx"))
    }
    for name in checkpoint.plan.quantized:
        tensors[f"{name}.weight"] = checkpoint.dequantize(name)
    save_file(tensors, twin / "model.safetensors")
    (twin / "config.json").write_text((dense / "config.json").read_text())
    expected, actual = logits(twin), logits(out)
    assert float((actual - expected).abs().max() / expected.abs().max()) <= 1e-5
    assert 0 < float((actual - before).norm() / before.norm()) < 0.5


def test_tokens_are_counted_and_few_are_reported(tmp_path: Path) -> None:
    dense = write_tiny_llama(tmp_path / "dense", **QWEN3)
    report = run(dense, tmp_path / "out", num_tokens=96)
    tokens = {module.name: module.tokens for module in report.modules}
    logs = {module.name: " ".join(module.log) for module in report.modules}
    last = [tokens[EXPERT(2, expert, "up")] for expert in range(6)]
    assert sum(last) == 2 * 96
    assert [tokens[EXPERT(2, expert, "down")] for expert in range(6)] == last
    assert tokens["model.layers.2.self_attn.q_proj"] == 96
    for expert, count in enumerate(last):
        assert (f"{count} of 96 calibration tokens" in logs[EXPERT(2, expert, "up")]) is (
            count < 64
        )
    assert min(last) < 64
    manifest = json.loads((tmp_path / "out" / "terrazzo.json").read_text())
    assert manifest["tokens"] == tokens


def test_an_expert_without_tokens_is_quantized_for_those_of_its_fellows(tmp_path: Path) -> None:
    dense = write_tiny_llama(tmp_path / "dense", **{**QWEN3, "num_experts_per_tok": 1})
    tensors = load_file(dense / "model.safetensors")
    gate_EH = tensors["model.layers.0.mlp.gate.weight"]
    # The mean of the others is never the largest.
    gate_EH[5] = gate_EH[:5].mean(dim=0)
    save_file(tensors, dense / "model.safetensors")
    report = run(dense, tmp_path / "out", num_tokens=256)
    modules = {module.name: module for module in report.modules}
    for projection in ("gate", "up", "down"):
        unseen = modules[EXPERT(0, 5, projection)]
        assert unseen.tokens == 0
        assert unseen.loss < unseen.rtn_loss
        assert "0 of 256 calibration tokens" in unseen.log[0]


def test_a_prior_counts_as_much_as_one_token_per_input() -> None:
    x_TK = torch.randn((24, 8), generator=torch.Generator().manual_seed(0))
    prior = Prior(measure_hessian([x_TK]))
    own = measure_hessian([x_TK[:8]])
    torch.testing.assert_close(prior.blend([x_TK[:8], x_TK[:0]]), (own + prior.pooled_KK) / 2)
    assert torch.equal(prior.blend([x_TK[:0]]), prior.pooled_KK)


def test_a_rule_for_routers_alone_is_idle(tmp_path: Path) -> None:
    dense = write_tiny_llama(tmp_path / "dense", **QWEN3)
    job = open_job(dense, RuleSet.parse(RULES, BASE))
    assert any(r"'.*\\.mlp\\.gate$' matches no module" in remark for remark in job.remarks)
