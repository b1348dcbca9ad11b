"""How much there is to compute, known before it starts; the unit is an operation of a GEMM."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from terrazzo.models.mlp_config import ExpertsMlp
from terrazzo.models.parameters import shared_inputs
from terrazzo.quantization.job import Job
from terrazzo.spec import Name

SEARCH_WORK = 30_000.0
"""The search for scales takes as long as this many operations per weight."""


def hessian_work(job: Job, names: Iterable[Name], tokens: float) -> float:
    """The Hessian of one shared input, if anybody needs it."""
    wanted = [name for name in names if name in job.plan.quantized]
    tokens = _expected(job, wanted, tokens)
    return 2.0 * tokens * job.shapes[wanted[0]][1] ** 2 if wanted else 0.0


def module_work(job: Job, name: Name) -> float:
    """Scales and codes of one module."""
    out_features, in_features = job.shapes[name]
    return out_features * in_features * (SEARCH_WORK + 2.0 * in_features)


def forward_work(job: Job, names: Iterable[Name], tokens: int) -> float:
    """All tokens through the linears of one shared input."""
    return sum(2.0 * _expected(job, [name], tokens) * prod(job.shapes[name]) for name in names)


def _expected(job: Job, names: Sequence[Name], tokens: float) -> float:
    """How many of the tokens a linear sees, if its router has no preferences."""
    if not names or ".experts." not in names[0]:
        return tokens
    sparse = next(mlp for mlp in job.config.mlps if isinstance(mlp, ExpertsMlp))
    return tokens * sparse.top_k / sparse.num_experts


def total_work(job: Job, tokens: int) -> float:
    config = job.config
    groups = [group for i in range(config.num_layers) for group in shared_inputs(config, i)]
    hessians = sum(hessian_work(job, group, tokens) for group in (*groups, (job.head,)))
    forwards = sum(forward_work(job, group, tokens) for group in groups)
    return hessians + forwards + sum(module_work(job, name) for name in job.plan.quantized)
