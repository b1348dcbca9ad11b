"""GPTQModel reads what Terrazzo writes, to the bit."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.checkpoints import Affine, random_affine
from helpers.witness import Witness, write_tiny_model, write_tokenizer
from terrazzo import Checkpoint
from terrazzo.checkpoint.description import Description
from terrazzo.checkpoint.writer import DEFAULT_SHARD_BYTES, CheckpointWriter
from terrazzo.packing import QuantTensor, pack
from terrazzo.rules import RuleSet, resolve
from terrazzo.spec import Format, QuantSpec


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    base: QuantSpec
    checkpoint_format: Format
    dynamic: dict[str, dict[str, Any]] = field(default_factory=dict)
    lm_head: bool = False
    shard_bytes: int = DEFAULT_SHARD_BYTES


CASES = [
    Case(
        "sym_v1_mixed",
        QuantSpec(4, 32),
        Format.GPTQ,
        {"-:.*o_proj": {}, ".*v_proj": {"bits": 8, "group_size": 16}, ".*up_proj": {"bits": 3}},
        lm_head=True,
    ),
    Case("asym_rule_v1", QuantSpec(4, 32), Format.GPTQ, {".*v_proj": {"bits": 2, "sym": False}}),
    Case("asym_v2", QuantSpec(4, 32, sym=False), Format.GPTQ_V2, {".*down_proj": {"bits": 3}}),
    Case(
        "planar",
        QuantSpec(3, 64, sym=False),
        Format.GPTQ_P,
        {".*q_proj": {"bits": 5}, ".*k_proj": {"bits": 6}, ".*mlp": {"bits": 7}},
    ),
    Case("act_order_shards", QuantSpec(4, 32, desc_act=True), Format.GPTQ, shard_bytes=20_000),
    Case("channelwise", QuantSpec(8, -1), Format.GPTQ),
]


def quant_tensor(weight: Affine, spec: QuantSpec) -> QuantTensor:
    words = pack(weight.codes, spec.bits)
    return QuantTensor(spec, words, weight.scales, weight.zeros, weight.g_idx)


def write(folder: Path, case: Case) -> tuple[Path, dict[str, Tensor]]:
    """The written folder, and every quantized weight as it should read, float32 [N, K]."""
    dense = Checkpoint(write_tiny_model(folder / "dense"))
    rules = RuleSet.parse(case.dynamic, case.base, lm_head=case.lm_head)
    plan = resolve(rules, dense.plan)
    expected = {}
    out = folder / "written"
    with CheckpointWriter(out, case.checkpoint_format, case.shard_bytes) as writer:
        for name, spec in plan.quantized.items():
            weight = random_affine(spec, *dense.shape(f"{name}.weight"))
            expected[name] = weight.dequantized
            writer.add_quantized(name, quant_tensor(weight, spec))
        for tensor in dense.tensor_names:
            if tensor.removesuffix(".weight") not in plan.quantized:
                writer.add_tensor(tensor, dense.tensor(tensor))
        writer.commit(Description(dense.model_config, rules, plan))
    write_tokenizer(out, dense.model_config["vocab_size"])
    return out, expected


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_gptqmodel_reads_what_terrazzo_writes(tmp_path: Path, case: Case) -> None:
    out, expected = write(tmp_path, case)
    dequantized = Witness(out).dequantized()
    assert set(dequantized) == set(expected)
    assert all(torch.equal(dequantized[name], weight) for name, weight in expected.items())


def test_gptqmodel_refuses_asymmetric_v1_from_others(tmp_path: Path) -> None:
    """Why a symmetric base is needed for gptq, and an asymmetric one asks for gptq_v2."""
    out, _ = write(tmp_path, Case("asym_v1", QuantSpec(4, 32, sym=False), Format.GPTQ))
    with pytest.raises(ValueError, match="sym=False"):
        Witness(out)
