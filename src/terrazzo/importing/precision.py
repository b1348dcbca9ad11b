"""Which floating-point type keeps imported weights, judged by what rounding does to each tensor."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

HALF_TYPES = (torch.float16, torch.bfloat16)
"""Candidates in the order of preference at equal error."""

LARGEST_LOSS = 2.0**-8
"""A tensor may lose this much of its norm, half a step of bfloat16; beyond, float32 is kept."""


@dataclass(frozen=True, slots=True)
class Precision:
    """dtype: the type to store. loss: the largest ||rounded - W|| / ||W|| over all tensors."""

    dtype: torch.dtype
    loss: float

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} (largest relative rounding error of a tensor: {self.loss:.1e})"


def measure(tensors: Iterable[Tensor], dtype: torch.dtype) -> Precision:
    """The loss of storing `tensors` (float32, any shape) as `dtype`; infinite on overflow."""
    return Precision(dtype, max((_loss(tensor, dtype) for tensor in tensors), default=0.0))


def choose(tensors: tuple[Tensor, ...]) -> Precision:
    """The half type with the smaller loss, or float32 when both lose more than LARGEST_LOSS."""
    best = min((measure(tensors, dtype) for dtype in HALF_TYPES), key=lambda each: each.loss)
    return best if best.loss <= LARGEST_LOSS else Precision(torch.float32, 0.0)


def _loss(tensor: Tensor, dtype: torch.dtype) -> float:
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    if norm == 0.0:
        return 0.0
    error = tensor.to(dtype).to(torch.float32) - tensor
    return float(torch.linalg.vector_norm(error, dtype=torch.float64)) / norm
