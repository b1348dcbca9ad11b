"""How much there is to compute, known before it starts; the unit is an operation of a GEMM."""

from __future__ import annotations

from collections.abc import Iterable

from terrazzo.models.parameters import shared_inputs
from terrazzo.quantization.job import Job
from terrazzo.rules import LM_HEAD
from terrazzo.spec import Name

SEARCH_WORK = 30_000.0
"""The search for scales takes as long as this many operations per weight."""


def hessian_work(job: Job, names: Iterable[Name], tokens: int) -> float:
    """The Hessian of one shared input, if anybody needs it."""
    wanted = [name for name in names if name in job.plan.quantized]
    return 2.0 * tokens * job.shapes[wanted[0]][1] ** 2 if wanted else 0.0


def module_work(job: Job, name: Name) -> float:
    """Scales and codes of one module."""
    out_features, in_features = job.shapes[name]
    return out_features * in_features * (SEARCH_WORK + 2.0 * in_features)


def forward_work(job: Job, names: Iterable[Name], tokens: int) -> float:
    """All tokens through the linears of one shared input."""
    return sum(2.0 * tokens * out * inputs for out, inputs in (job.shapes[name] for name in names))


def total_work(job: Job, tokens: int) -> float:
    config = job.config
    groups = [group for i in range(config.num_layers) for group in shared_inputs(config, i)]
    hessians = sum(hessian_work(job, group, tokens) for group in (*groups, (LM_HEAD,)))
    forwards = sum(forward_work(job, group, tokens) for group in groups)
    return hessians + forwards + sum(module_work(job, name) for name in job.plan.quantized)
