"""Which kernel will run each linear and what memory its weight will take, before data is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.kernels.base import GemmProblem
from terrazzo.kernels.choose import Choice, KernelPolicy, choose
from terrazzo.models.config import ModelConfig
from terrazzo.models.parameters import ParameterKind, head_parameter, parameters, router_names
from terrazzo.spec import DENSE, Name


@dataclass(frozen=True, slots=True)
class LinearPlan:
    """name: un-fused. problem: spec and shape. choice: the kernel with every kernel's reason."""

    name: Name
    problem: GemmProblem
    choice: Choice

    @property
    def prepared_bytes(self) -> int:
        """Memory of the prepared weight."""
        return self.choice.kernel.prepared_bytes(self.problem)


def plan_linears(
    checkpoint: Checkpoint, config: ModelConfig, policy: KernelPolicy = KernelPolicy.SPEED
) -> tuple[LinearPlan, ...]:
    """Every linear in the order they run, the head last, also where it shares the embedding.

    Raises NoKernelError for a spec that no kernel runs.
    """
    return tuple(_linears(checkpoint, config, policy))


def _linears(
    checkpoint: Checkpoint, config: ModelConfig, policy: KernelPolicy
) -> Iterator[LinearPlan]:
    head, routers = head_parameter(config), router_names(config)
    linears = {p.name: p for p in parameters(config) if p.kind is ParameterKind.LINEAR}
    for name, parameter in {**linears, head.name: head}.items():
        held = checkpoint.plan.get(name)
        spec = DENSE if held is None else held.spec
        out_features, in_features = parameter.shape
        problem = GemmProblem(spec, out_features, in_features)
        yield LinearPlan(
            name, problem, choose(problem, policy.exact if name in routers else policy)
        )


def weight_bytes(checkpoint: Checkpoint, config: ModelConfig, plans: tuple[LinearPlan, ...]) -> int:
    """Memory of the loaded model: prepared weights, and the embedding as it is in its file, or in
    float32 where it is quantized there.
    """
    name = config.layout.embedding
    if name in checkpoint.plan:
        embedding = prod(checkpoint.linear_shape(name)) * torch.float32.itemsize
    else:
        embedding = checkpoint.num_bytes(f"{name}.weight")
    return embedding + sum(plan.prepared_bytes for plan in plans)
