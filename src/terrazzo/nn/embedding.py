"""Token embedding."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Embedding:
    """weight_VH: [vocabulary, hidden] in the dtype of the file; only the rows asked for become
    float32, so a mapped file is never read as a whole. scale: what the rows are multiplied with.
    """

    weight_VH: Tensor
    scale: float = 1.0

    def __call__(self, token_ids_T: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, hidden]."""
        rows_TH = self.weight_VH.index_select(0, token_ids_T).to(torch.float32)
        return rows_TH if self.scale == 1.0 else rows_TH * self.scale
