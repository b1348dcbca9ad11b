"""The float32 matrix product of torch, asked for in the way that its BLAS does fastest."""

from __future__ import annotations

import torch
from torch import Tensor

FEW_ROWS = range(2, 33)
"""Numbers of rows for which the transpose is computed instead."""


def multiply(x_MK: Tensor, weight_NK: Tensor, out_MN: Tensor) -> None:
    """Overwrites `out_MN` with `x_MK @ weight_NK.T`; rows of all three may be strided.

    With few rows torch computes the transpose of the same product up to twice as fast where the
    weight is larger than the cache, and as fast elsewhere (benchmarks/kernels_cpu.py).
    """
    if x_MK.shape[0] in FEW_ROWS:
        out_MN.copy_(torch.mm(weight_NK, x_MK.T).T)
    else:
        torch.mm(x_MK, weight_NK.T, out=out_MN)
