"""The weights of linear modules as they come from a checkpoint: named, not yet prepared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from terrazzo.kernels.base import DenseTensor, Weight
from terrazzo.packing import QuantTensor
from terrazzo.spec import Name


@dataclass(frozen=True, slots=True)
class Bias:
    """values_N: float32 [N]."""

    values_N: Tensor

    def add_to_(self, y_MN: Tensor) -> None:
        y_MN += self.values_N


@dataclass(frozen=True, slots=True)
class NoBias:
    def add_to_(self, y_MN: Tensor) -> None:
        """Nothing to add."""


NO_BIAS = NoBias()

AnyBias: TypeAlias = Bias | NoBias


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """One linear module. name: un-fused, as on disk."""

    name: Name
    weight: Weight
    bias: AnyBias = NO_BIAS

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    @property
    def out_features(self) -> int:
        return self.weight.out_features


def can_merge(left: Weight, right: Weight) -> bool:
    """Whether both, side by side along N, are one weight: equal specs and equal order of inputs."""
    if isinstance(left, DenseTensor) or isinstance(right, DenseTensor):
        return isinstance(left, DenseTensor) and isinstance(right, DenseTensor)
    return left.spec == right.spec and torch.equal(left.g_idx, right.g_idx)


def merge_weights(weights: Sequence[Weight]) -> Weight:
    """Side by side along N; neighbours must be mergeable."""
    if len(weights) == 1:
        return weights[0]
    quantized = [weight for weight in weights if isinstance(weight, QuantTensor)]
    if not quantized:
        # Of different dtypes torch takes the one that holds them all.
        dense = [weight.weight_NK for weight in weights if isinstance(weight, DenseTensor)]
        return DenseTensor(torch.cat(dense))
    assert len(quantized) == len(weights), "dense and quantized weights cannot be merged"
    return replace(
        quantized[0],
        qweight=torch.cat([weight.qweight for weight in quantized], dim=1),
        scales=torch.cat([weight.scales for weight in quantized], dim=1),
        zeros=torch.cat([weight.zeros for weight in quantized], dim=1),
    )


def merge_biases(shards: Sequence[LinearWeight]) -> AnyBias:
    """Side by side along N, zero where a shard has none; NO_BIAS where no shard has one."""
    if all(isinstance(shard.bias, NoBias) for shard in shards):
        return NO_BIAS
    return Bias(torch.cat([_bias_values(shard) for shard in shards]))


def _bias_values(shard: LinearWeight) -> Tensor:
    if isinstance(shard.bias, Bias):
        return shard.bias.values_N
    return torch.zeros(shard.out_features)
