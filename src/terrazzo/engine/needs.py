"""What memory a model needs, read off its checkpoint before anything is loaded."""

from __future__ import annotations

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.engine.memory import ModelNeeds
from terrazzo.models.config import ModelConfig
from terrazzo.models.linear_plan import plan_linears, weight_bytes


def model_needs(config: ModelConfig, checkpoint: Checkpoint) -> ModelNeeds:
    """weight_bytes: in the layout of the chosen kernels. Keys and values are float32."""
    values_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    return ModelNeeds(
        weight_bytes=weight_bytes(checkpoint, plan_linears(checkpoint, config)),
        kv_bytes_per_token=4 * values_per_token,
        context_length=config.context_length,
    )
