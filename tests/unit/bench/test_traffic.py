"""Bytes of weights that a step reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.tiny_llama import write_tiny_llama
from helpers.tiny_models import tiny_model
from terrazzo import Checkpoint
from terrazzo.bench.traffic import WeightTraffic
from terrazzo.kernels.policy import KernelPolicy
from terrazzo.models.config import ModelConfig
from terrazzo.models.linear_plan import plan_linears, weight_bytes


def traffic_of(folder: Path) -> WeightTraffic:
    checkpoint = Checkpoint(folder)
    return WeightTraffic.of(checkpoint, ModelConfig.of(checkpoint), KernelPolicy.SPEED)


def test_a_dense_model_reads_all_but_its_embedding_whatever_the_batch(tmp_path: Path) -> None:
    traffic = traffic_of(write_tiny_llama(tmp_path))
    checkpoint = Checkpoint(tmp_path)
    config = ModelConfig.of(checkpoint)
    whole = weight_bytes(checkpoint, config, plan_linears(checkpoint, config, KernelPolicy.SPEED))
    embedding = checkpoint.num_bytes("model.embed_tokens.weight")
    assert sum(traffic.kernels.values()) == 7 * config.num_layers + 1
    assert traffic.step_bytes(1) == traffic.step_bytes(8) == whole - embedding


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
