"""Which kernel runs a problem, and why not the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from terrazzo.errors import NoKernelError
from terrazzo.kernels.base import GemmProblem, Kernel
from terrazzo.kernels.dense import DenseKernel, DequantizedKernel
from terrazzo.kernels.gpu.kernel import RecordsKernel
from terrazzo.kernels.native import NativeDenseKernel, NativeKernel
from terrazzo.kernels.panels import PanelsKernel
from terrazzo.kernels.policy import KernelPolicy as KernelPolicy
from terrazzo.kernels.reference import ReferenceKernel

_INT8, _FLOAT32 = NativeKernel(torch.int8), NativeKernel(torch.float32)
_DENSE_INT8, _DENSE_FLOAT32 = NativeDenseKernel(torch.int8), NativeDenseKernel(torch.float32)
_TORCH_DENSE, _DEQUANTIZED, _PANELS, _REFERENCE = (
    DenseKernel(),
    DequantizedKernel(),
    PanelsKernel(),
    ReferenceKernel(),
)

KERNELS: Mapping[KernelPolicy, tuple[Kernel, ...]] = {
    KernelPolicy.INT8: (
        *(_INT8, _DENSE_INT8),
        *(_TORCH_DENSE, _DEQUANTIZED, _PANELS, _REFERENCE),
    ),
    KernelPolicy.SPEED: (
        *(_FLOAT32, _DENSE_FLOAT32),
        *(_TORCH_DENSE, _DEQUANTIZED, _PANELS, _REFERENCE),
    ),
    KernelPolicy.MEMORY: (
        *(_FLOAT32, _DENSE_FLOAT32),
        *(_TORCH_DENSE, _PANELS, _REFERENCE, _DEQUANTIZED),
    ),
    KernelPolicy.BFLOAT16: (RecordsKernel(torch.bfloat16),),
    KernelPolicy.FLOAT16: (RecordsKernel(torch.float16),),
}
"""Best first: the first kernel that does not reject a problem runs it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One line of the table that `terrazzo inspect` prints."""

    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.kernel}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Choice:
    """verdicts: one per kernel of the table, in its order; the chosen kernel is among them."""

    kernel: Kernel
    verdicts: tuple[Verdict, ...]


def choose(problem: GemmProblem, policy: KernelPolicy = KernelPolicy.SPEED) -> Choice:
    """Raises NoKernelError with the reason of every kernel."""
    return choose_among(KERNELS[policy], problem)


def choose_among(kernels: Sequence[Kernel], problem: GemmProblem) -> Choice:
    """The first of `kernels` that accepts. Raises NoKernelError with the reason of every kernel."""
    reasons = {kernel.name: kernel.rejects(problem) for kernel in kernels}
    accepting = [kernel for kernel in kernels if reasons[kernel.name] is None]
    if not accepting:
        listed = "\n  ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise NoKernelError(f"no kernel runs {problem}:\n  {listed}")
    chosen = accepting[0]
    fallback = f"could run it too, after {chosen.name}"
    verdicts = (
        Verdict(name, "chosen" if name == chosen.name else reason or fallback)
        for name, reason in reasons.items()
    )
    return Choice(chosen, tuple(verdicts))
