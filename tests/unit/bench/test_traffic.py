"""Bytes of weights that a step reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny_llama import write_tiny_llama
from helpers.tiny_models import tiny_model
from terrazzo import LLM, Checkpoint
from terrazzo.bench.traffic import WeightTraffic
from terrazzo.kernels.policy import KernelPolicy
from terrazzo.models.config import ModelConfig

LAYERS = 2


def traffic_of(folder: Path, policy: KernelPolicy = KernelPolicy.SPEED) -> WeightTraffic:
    checkpoint = Checkpoint(folder)
    return WeightTraffic.of(checkpoint, ModelConfig.of(checkpoint), policy)


def test_a_dense_model_reads_all_its_linears_whatever_the_batch(tmp_path: Path) -> None:
    llm = LLM(write_tiny_llama(tmp_path))
    traffic = traffic_of(tmp_path, llm.memory_plan.needs.kernel_policy)
    stages = [stage for block in llm.decoder.blocks for stage in block.stages]
    linears = [llm.decoder.head.linear, *(stage.linear for stage in stages)]  # type: ignore[attr-defined]
    assert sum(traffic.kernels.values()) == 7 * LAYERS + 1
    assert traffic.step_bytes(1) == traffic.step_bytes(8)
    assert traffic.step_bytes(1) == sum(linear.num_bytes for linear in linears)


def test_experts_count_as_often_as_routers_reach_them(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
    model.save_pretrained(tmp_path)
    traffic = traffic_of(tmp_path)
    ((share, experts),) = traffic.routed_bytes.items()
    assert share == 0.5
    assert experts > 0
    assert traffic.step_bytes(1) - traffic.shared_bytes == experts // 2
    assert traffic.step_bytes(2) - traffic.shared_bytes == pytest.approx(0.75 * experts)
    assert traffic.step_bytes(100) == traffic.shared_bytes + experts
