"""Inputs in the order of their groups, in blocks of one size, each with one scale per output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.packing import QuantTensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """Where each code goes: S places in B blocks of `size`.

    A group whose size is no multiple of `size` ends with places without an input.

    group_B: int64, group of each block. input_K: int64, the inputs in the order of their groups.
    place_K: int64, the place of each of those.
    """

    size: int
    group_B: Tensor
    input_K: Tensor
    place_K: Tensor

    @classmethod
    def of(cls, weight: QuantTensor, size: int) -> Blocks:
        device = weight.g_idx.device
        group_K, input_K = weight.g_idx.to(torch.int64).sort(stable=True)
        count_G = group_K.bincount(minlength=weight.num_groups)
        blocks_G = -(-count_G // size)
        order_K = torch.arange(weight.in_features, device=device)
        rank_K = order_K - (count_G.cumsum(0) - count_G)[group_K]
        place_K = (blocks_G.cumsum(0) - blocks_G)[group_K] * size + rank_K
        group_B = torch.arange(weight.num_groups, device=device).repeat_interleave(blocks_G)
        return cls(size, group_B, input_K, place_K)

    @property
    def num_places(self) -> int:
        return self.group_B.shape[0] * self.size

    def lookup(self, absent: int) -> Tensor:
        """int64 [S]: the input of each place, or `absent`."""
        lookup_S = self.input_K.new_full((self.num_places,), absent)
        lookup_S[self.place_K] = self.input_K
        return lookup_S
