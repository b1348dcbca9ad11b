"""The Hessian of a linear's input, ordered and factorized for the sweep."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.errors import QuantizationError

DAMP_ATTEMPTS = 4
DAMP_GROWTH = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class Curvature:
    """What one input says about the errors of all linears that read it.

    hessian_KK: as measured. importance_K: its damped diagonal. order_K: int64, columns by
    descending diagonal. lower_KK: `L` with `L^T L` = the damped Hessian in that order; a diagonal
    matrix, which makes the sweep round to nearest, where no damping helped. log: every damping that
    failed, in words.
    """

    hessian_KK: Tensor
    importance_K: Tensor
    order_K: Tensor
    lower_KK: Tensor
    log: tuple[str, ...]

    def energy(self, weight_KN: Tensor) -> float:
        """`tr(W H W^T)`: the mean square of the outputs, summed over output channels."""
        product_KN = self.hessian_KK.to(weight_KN.dtype) @ weight_KN
        return float((product_KN * weight_KN).sum(dtype=torch.float64))


def measure_curvature(hessian_KK: Tensor, damp: float) -> Curvature:
    """Order and factorize a Hessian; done once for all linears that share it.

    hessian_KK: float32 or float64; the factorization computes in its dtype. damp: part of the mean
    of the diagonal that is added to it. Raises QuantizationError when a value is not finite.

    Damping is raised tenfold, at most three times; then the off-diagonal is given up.
    Inputs that were never seen keep their weights: damping alone makes them round to nearest.
    """
    refuse_not_finite(hessian_KK, "the Hessian", "look for inf or nan in the model's activations")
    diagonal_K = hessian_KK.diagonal()
    order_K = torch.argsort(diagonal_K, descending=True, stable=True)
    mean = float(diagonal_K.mean()) or 1.0
    ordered_KK = hessian_KK[order_K][:, order_K]
    log: list[str] = []
    for attempt in range(DAMP_ATTEMPTS):
        part = damp * DAMP_GROWTH**attempt
        lower_KK, failure = _factor(ordered_KK, part * mean)
        if failure == 0:
            importance_K = diagonal_K + part * mean
            return Curvature(hessian_KK, importance_K, order_K, lower_KK, tuple(log))
        log.append(f"damping by {part:g} of the mean diagonal left the Hessian indefinite")
    log.append("rounded to nearest: only the diagonal of the Hessian was used")
    importance_K = diagonal_K.clamp(min=0) + damp * abs(mean)
    lower_KK = torch.diag(importance_K[order_K].sqrt())
    return Curvature(hessian_KK, importance_K, order_K, lower_KK, tuple(log))


def refuse_not_finite(tensor: Tensor, what: str, remedy: str) -> None:
    faults = int((~torch.isfinite(tensor)).sum())
    if faults:
        raise QuantizationError(
            f"{what} holds {faults} of {tensor.numel()} values that are inf or nan; {remedy}"
        )


def _factor(ordered_KK: Tensor, damp: float) -> tuple[Tensor, int]:
    """`L` with `L^T L = H + damp I`, and 0 or the number of the pivot that failed.

    Cholesky from the last column: flipping both axes turns `H = L^T L` into the usual `M M^T`.
    """
    flipped_KK = ordered_KK.flip(0, 1)
    flipped_KK.diagonal().add_(damp)
    factor_KK, failure = torch.linalg.cholesky_ex(flipped_KK)
    return factor_KK.flip(0, 1).T.contiguous(), int(failure)
