"""The Hessian of a shared input, summed over all calibration tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

CHUNK_TOKENS = 4096
"""Tokens per float32 matrix product; sums of many more lose digits that the factor needs."""

PANEL = 256
"""Rows of the Hessian per product; of each panel only the part up to the diagonal is computed."""


def measure_hessian(inputs_TK: Sequence[Tensor]) -> Tensor:
    """`2 / T * X^T X` over all rows of all inputs -> float64 [K, K], exactly symmetric.

    inputs_TK: float32 [T, K] each. Products of fixed chunks are added to a float64 sum in the order
    given, so the result does not depend on anything but inputs and threads.
    """
    in_features = inputs_TK[0].shape[1]
    lower_KK = torch.zeros((in_features, in_features), dtype=torch.float64)
    for x_TK in inputs_TK:
        for chunk_TK in torch.split(x_TK, CHUNK_TOKENS):
            for start in range(0, in_features, PANEL):
                end = min(start + PANEL, in_features)
                lower_KK[start:end, :end] += chunk_TK[:, start:end].T @ chunk_TK[:, :end]
    lower_KK.tril_().mul_(2 / sum(x_TK.shape[0] for x_TK in inputs_TK))
    return lower_KK + lower_KK.tril(-1).T


@dataclass(frozen=True, slots=True)
class NoPrior:
    """The inputs speak for themselves."""

    def blend(self, inputs_TK: Sequence[Tensor]) -> Tensor:
        return measure_hessian(inputs_TK)


@dataclass(frozen=True, slots=True, eq=False)
class Prior:
    """What an expert's inputs are expected to be like before any is seen.

    pooled_KK: the Hessian of all inputs of the layer's routed experts. It counts as much as K
    tokens, so it decides for an expert that saw none and fades for one that saw many.
    """

    pooled_KK: Tensor

    def blend(self, inputs_TK: Sequence[Tensor]) -> Tensor:
        """`(T H + K H_pooled) / (T + K)` -> float64 [K, K]."""
        seen = [x_TK for x_TK in inputs_TK if len(x_TK)]
        if not seen:
            return self.pooled_KK
        tokens, weight = sum(len(x_TK) for x_TK in seen), len(self.pooled_KK)
        return (measure_hessian(seen) * tokens + self.pooled_KK * weight) / (tokens + weight)


NO_PRIOR = NoPrior()

AnyPrior: TypeAlias = NoPrior | Prior
