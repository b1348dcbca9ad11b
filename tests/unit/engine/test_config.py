from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.engine.config import EngineConfig
from terrazzo.engine.memory import MemoryPlan, ModelNeeds, available_memory, resolve
from terrazzo.engine.needs import plan_memory
from terrazzo.errors import ConfigError
from terrazzo.kernels.machine import why_not_native
from terrazzo.kernels.policy import KernelPolicy
from terrazzo.models.config import ModelConfig

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "llama-w4-g128-sym"
NEEDS = ModelNeeds(weight_bytes=1000, kv_bytes_per_token=10, context_length=100)
PLENTY = 1 << 40


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_seqs", 0),
        ("max_model_len", 0),
        ("page_size", -1),
        ("kv_cache_tokens", 0),
        ("memory_fraction", 0.0),
        ("memory_fraction", 1.5),
        ("max_num_batched_tokens", 31),
    ],
)
def test_an_illegal_option_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is {value}"):
        EngineConfig(**{field: value})


def test_the_cache_is_never_larger_than_the_sequences_can_use() -> None:
    plan = resolve(EngineConfig(max_num_seqs=3, page_size=16), NEEDS, PLENTY)
    assert (plan.limits.num_pages, plan.limits.max_model_len) == (3 * 7, 100)
    assert plan.kv_bytes == 3 * 7 * 16 * 10


def test_a_full_memory_shrinks_the_cache_then_the_longest_sequence() -> None:
    config = EngineConfig(max_num_seqs=3, page_size=16)
    half = resolve(config, NEEDS, 1000 + 2 * 10 * 16 * 10)
    assert (half.limits.num_pages, half.limits.max_model_len) == (10, 100)
    little = resolve(config, NEEDS, 1000 + 2 * 3 * 16 * 10)
    assert (little.limits.num_pages, little.limits.max_model_len) == (3, 48)
    assert "50% of the memory beside the weights" in str(little)


def test_what_was_asked_for_is_kept_or_refused() -> None:
    plan = resolve(EngineConfig(max_model_len=50, kv_cache_tokens=200), NEEDS, PLENTY)
    assert (plan.limits.capacity, plan.limits.max_model_len) == (224, 50)
    with pytest.raises(ConfigError, match="max_model_len is 101, but the model knows 100"):
        resolve(EngineConfig(max_model_len=101), NEEDS, PLENTY)
    with pytest.raises(ConfigError, match=r"holds 32 tokens \(as asked\), but a sequence of 50"):
        resolve(EngineConfig(max_model_len=50, kv_cache_tokens=20), NEEDS, PLENTY)


def test_no_memory_is_an_error_and_not_an_empty_cache() -> None:
    with pytest.raises(ConfigError, match="holds 0 tokens"):
        resolve(EngineConfig(), NEEDS, 500)


def test_the_plan_says_it_all_in_one_line() -> None:
    text = str(resolve(EngineConfig(max_num_seqs=3, page_size=16), NEEDS, PLENTY))
    assert "336 tokens in 21 pages (all that 3 sequences can use)" in text
    assert "\n" not in text


def test_this_machine_has_memory() -> None:
    assert available_memory() > 1 << 20


def golden_plan(config: EngineConfig, available_bytes: int) -> MemoryPlan:
    checkpoint = Checkpoint(GOLDEN)
    model = ModelConfig.from_hf(checkpoint.model_config, GOLDEN / "config.json")
    return plan_memory(checkpoint, model, config, available_bytes)


@pytest.mark.skipif(bool(why_not_native()), reason="no native kernels here")
def test_native_kernels_need_no_more_room_for_speed() -> None:
    assert (
        golden_plan(EngineConfig(max_num_seqs=1), PLENTY).needs.kernel_policy is KernelPolicy.INT8
    )


def test_fast_kernels_need_room_and_small_ones_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    for room in ("kernels.native", "engine.needs"):
        monkeypatch.setattr(f"terrazzo.{room}.why_not_native", lambda: "not built")
    fast = golden_plan(EngineConfig(max_num_seqs=1), PLENTY).needs
    assert fast.kernel_policy is KernelPolicy.SPEED
    small = golden_plan(EngineConfig(max_num_seqs=1), int(fast.weight_bytes / 0.7)).needs
    assert small.kernel_policy is KernelPolicy.MEMORY
    assert small.weight_bytes < fast.weight_bytes


@pytest.mark.parametrize("policy", KernelPolicy)
def test_the_kernel_policy_can_be_asked_for(policy: KernelPolicy) -> None:
    plan = golden_plan(EngineConfig(kernel_policy=policy), PLENTY)
    assert plan.needs.kernel_policy is policy
    assert f"kernels for {policy.value}" in str(plan)
