"""GPTQ: round a weight column by column, each column absorbing the errors of those before it.

The objective is `tr((W - Q) H (W - Q)^T)` with `H` the second moment of the inputs (Frantar et al.,
"GPTQ", arXiv 2210.17323). The sweep is written in its nearest-plane form (Chen et al., "The
Geometry of LLM Quantization: GPTQ as Babai's Nearest Plane Algorithm", arXiv 2507.18553): with the
columns in the order in which they are visited and `H = L^T L`, `L` lower triangular, column `j` is
the rounding of

    w_j + sum_{i<j} (w_i - q_i) L[j, i] / L[j, j]

which gives the codes of the paper's update by `H^-1` without forming the inverse. The sum over
earlier blocks of columns is one matrix product per block.

Columns are visited by descending `diag(H)`, so that those with the most energy are rounded while
most others can still answer for them (act-order). Without `desc_act` the groups stay those of the
natural order and their scales are fixed before the sweep ("static groups"), so nothing of the order
is left in the result; with `desc_act` groups are formed in the order of visit and `g_idx` tells.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from terrazzo.packing import QuantTensor, pack, sequential_groups
from terrazzo.quantization.curvature import Curvature, measure_curvature, refuse_not_finite
from terrazzo.quantization.grid import Grid, fit_grid, round_to_codes
from terrazzo.quantization.options import DEFAULT_GPTQ, GptqOptions, ScaleSearch
from terrazzo.spec import QuantSpec

OUTPUTS_AT_ONCE = 4096
"""Output channels are independent; taken in portions, a wide head costs little memory."""


@dataclass(frozen=True, slots=True, eq=False)
class Quantized:
    """A quantized weight before it is packed.

    codes_KN: uint8 [K, N]. scales_GN: float16 [G, N]. zeros_GN: uint8 [G, N], true zero points.
    g_idx_K: int32 [K]. spec: as asked, with `desc_act` the fact that g_idx is not sequential.
    loss: `tr((W - Q) H (W - Q)^T) / tr(W H W^T)`, the relative square error of the outputs.
    log: every damping that failed, in words; empty when the first one served.
    """

    spec: QuantSpec
    codes_KN: Tensor
    scales_GN: Tensor
    zeros_GN: Tensor
    g_idx_K: Tensor
    loss: float
    log: tuple[str, ...]

    def packed(self) -> QuantTensor:
        qweight = pack(self.codes_KN, self.spec.bits)
        return QuantTensor(self.spec, qweight, self.scales_GN, self.zeros_GN, self.g_idx_K)


def gptq(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    spec: QuantSpec,
    options: GptqOptions = DEFAULT_GPTQ,
) -> Quantized:
    """Quantize one weight for the inputs that `hessian_KK` describes.

    weight_NK: float32 or float64 [N, K]; the sweep computes in its dtype. hessian_KK: float32 or
    float64 [K, K]; the factorization computes in its dtype. Raises QuantizationError when either
    holds something that is not a finite number.
    """
    return sweep(weight_NK, measure_curvature(hessian_KK, options.damp), spec, options)


def round_to_nearest(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    spec: QuantSpec,
    options: GptqOptions = DEFAULT_GPTQ,
) -> Quantized:
    """`gptq` without the sweep; the Hessian weighs the scale search and the loss."""
    return nearest(weight_NK, measure_curvature(hessian_KK, options.damp), spec, options)


def sweep(
    weight_NK: Tensor,
    curvature: Curvature,
    spec: QuantSpec,
    options: GptqOptions = DEFAULT_GPTQ,
) -> Quantized:
    """`gptq` with a Hessian already factorized."""
    return _quantize(weight_NK, curvature, spec, options, _sweep_codes)


def nearest(
    weight_NK: Tensor,
    curvature: Curvature,
    spec: QuantSpec,
    options: GptqOptions = DEFAULT_GPTQ,
) -> Quantized:
    """`round_to_nearest` with a Hessian already factorized."""
    return _quantize(weight_NK, curvature, spec, options, _nearest_codes)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """A weight with the grid of each of its inputs, in compute dtype and natural order.

    group_K: int64, the row of scale_GN and zero_GN that serves each input.
    """

    weight_KN: Tensor
    group_K: Tensor
    scale_GN: Tensor
    zero_GN: Tensor
    curvature: Curvature
    spec: QuantSpec
    block_size: int

    def dequantize(self, codes_KN: Tensor) -> Tensor:
        centered_KN = codes_KN.to(self.weight_KN.dtype) - self.zero_GN[self.group_K]
        return centered_KN * self.scale_GN[self.group_K]


_Rounding: TypeAlias = Callable[[_Task], Tensor]
"""-> uint8 [K, N]."""


def _quantize(
    weight_NK: Tensor,
    curvature: Curvature,
    spec: QuantSpec,
    options: GptqOptions,
    rounding: _Rounding,
) -> Quantized:
    refuse_not_finite(weight_NK, "the weight", "the model itself is damaged")
    in_features = weight_NK.shape[1]
    sequential_K = sequential_groups(in_features, spec.group_of(in_features)).to(weight_NK.device)
    g_idx_K = sequential_K
    if spec.desc_act:
        g_idx_K = torch.empty_like(g_idx_K).index_copy_(0, curvature.order_K, sequential_K)
    parts = [
        _quantize_rows(rows_NK.T.contiguous(), g_idx_K, curvature, spec, options, rounding)
        for rows_NK in torch.split(weight_NK, OUTPUTS_AT_ONCE)
    ]
    total = sum(part.energy for part in parts)
    return Quantized(
        replace(spec, desc_act=not torch.equal(g_idx_K, sequential_K)),
        torch.cat([part.codes_KN for part in parts], dim=1),
        torch.cat([part.grid.scales_GN for part in parts], dim=1),
        torch.cat([part.grid.zeros_GN for part in parts], dim=1),
        g_idx_K,
        sum(part.error for part in parts) / (total or 1.0),
        curvature.log,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Some output channels, done. error, energy: see `Curvature.energy`, of `W - Q` and of `W`."""

    codes_KN: Tensor
    grid: Grid
    error: float
    energy: float


def _quantize_rows(
    weight_KN: Tensor,
    g_idx_K: Tensor,
    curvature: Curvature,
    spec: QuantSpec,
    options: GptqOptions,
    rounding: _Rounding,
) -> _Part:
    dtype = weight_KN.dtype
    grid = _fit(weight_KN, curvature, spec, options.search)
    task = _Task(
        weight_KN,
        g_idx_K.to(torch.int64),
        grid.scales_GN.to(dtype),
        grid.zeros_GN.to(dtype),
        curvature,
        spec,
        options.block_size,
    )
    codes_KN = rounding(task)
    error = curvature.energy(weight_KN - task.dequantize(codes_KN))
    return _Part(codes_KN, grid, error, curvature.energy(weight_KN))


def _fit(weight_KN: Tensor, curvature: Curvature, spec: QuantSpec, search: ScaleSearch) -> Grid:
    """The grid of the natural groups, or of those in the order of visit."""
    importance_K = curvature.importance_K.to(weight_KN.dtype)
    if not spec.desc_act:
        return fit_grid(weight_KN, importance_K, spec, search)
    order_K = curvature.order_K
    return fit_grid(weight_KN[order_K], importance_K[order_K], spec, search)


def _nearest_codes(task: _Task) -> Tensor:
    scale_KN, zero_KN = task.scale_GN[task.group_K], task.zero_GN[task.group_K]
    return round_to_codes(task.weight_KN, scale_KN, zero_KN, task.spec).to(torch.uint8)


def _sweep_codes(task: _Task) -> Tensor:
    """The nearest-plane sweep of the first lines of this file; rows are in the order of visit."""
    order_K = task.curvature.order_K
    weight_KN = task.weight_KN[order_K]
    lower_KK = task.curvature.lower_KK.to(weight_KN.dtype)
    pivots = lower_KK.diagonal().tolist()
    groups = task.group_K[order_K].tolist()
    error_KN = torch.empty_like(weight_KN)
    codes_KN = torch.empty_like(weight_KN, dtype=torch.uint8)
    in_features = weight_KN.shape[0]
    for start in range(0, in_features, task.block_size):
        end = min(start + task.block_size, in_features)
        carried_BN = lower_KK[start:end, :start] @ error_KN[:start]
        for row in range(start, end):
            carried_N = carried_BN[row - start]
            carried_N.addmv_(error_KN[start:row].T, lower_KK[row, start:row])
            scale_N, zero_N = task.scale_GN[groups[row]], task.zero_GN[groups[row]]
            target_N = carried_N.div_(pivots[row]).add_(weight_KN[row])
            code_N = round_to_codes(target_N, scale_N, zero_N, task.spec)
            codes_KN[row] = code_N
            torch.sub(weight_KN[row], code_N.sub_(zero_N).mul_(scale_N), out=error_KN[row])
    return torch.empty_like(codes_KN).index_copy_(0, order_K, codes_KN)
