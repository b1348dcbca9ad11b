"""What memory a model needs, read off its checkpoint before anything is loaded."""

from __future__ import annotations

import torch

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.engine.config import AUTO, EngineConfig
from terrazzo.engine.memory import MemoryPlan, ModelNeeds, resolve
from terrazzo.kernels.machine import why_not_native
from terrazzo.kernels.policy import KernelPolicy
from terrazzo.models.config import ModelConfig
from terrazzo.models.linear_plan import plan_linears, weight_bytes
from terrazzo.models.program import why_not_programmed

SPEED_SHARE = 0.6
"""Part of the memory that fast kernels may take for weights before small ones are preferred."""


def plan_memory(
    checkpoint: Checkpoint, model: ModelConfig, config: EngineConfig, available_bytes: int
) -> MemoryPlan:
    """Weights, KV cache and limits for one model on one machine.

    Native kernels keep weights packed, so that they never have to choose between speed and memory;
    without them torch's fast kernels run if they have room.

    available_bytes: free memory before anything is loaded. Raises ConfigError when it does not
    suffice, NoKernelError for a weight that nothing runs.
    """
    page_size = config.page_size
    if config.kernel_policy is not AUTO:
        return resolve(
            config, model_needs(checkpoint, model, config.kernel_policy, page_size), available_bytes
        )
    if not why_not_native():
        needs = model_needs(checkpoint, model, KernelPolicy.INT8, page_size)
        return resolve(config, needs, available_bytes)
    fast = model_needs(checkpoint, model, KernelPolicy.SPEED, page_size)
    if fast.weight_bytes <= SPEED_SHARE * available_bytes:
        return resolve(config, fast, available_bytes)
    small = model_needs(checkpoint, model, KernelPolicy.MEMORY, page_size)
    return resolve(config, small, available_bytes)


def model_needs(
    checkpoint: Checkpoint, model: ModelConfig, policy: KernelPolicy, page_size: int
) -> ModelNeeds:
    """page_size: tokens of a page of the KV cache."""
    values_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim
    kv_dtype = _kv_dtype(model, policy, page_size)
    return ModelNeeds(
        weight_bytes=weight_bytes(checkpoint, model, plan_linears(checkpoint, model, policy)),
        kv_bytes_per_token=kv_dtype.itemsize * values_per_token,
        context_length=model.context_length,
        kernel_policy=policy,
        kv_dtype=kv_dtype,
    )


def _kv_dtype(model: ModelConfig, policy: KernelPolicy, page_size: int) -> torch.dtype:
    """Rounding keys and values to bfloat16 is nothing beside rounding activations to 8 bits, but
    torch's attention would have to widen them again.
    """
    native = policy is KernelPolicy.INT8 and not why_not_programmed(model, page_size)
    return torch.bfloat16 if native else torch.float32
