"""Memory for the keys and values of every sequence, in pages."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVPool:
    """Keys and values of all sequences in pages of equal size.

    keys, values: one tensor [num_pages, page_size, num_kv_heads, head_dim] per layer. A token lives
    in slot `page * page_size + offset`.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> KVPool:
        """Uninitialized: a page costs physical memory when it is first written, and a slot is read
        only after that.
        """
        shape = (num_pages, page_size, num_kv_heads, head_dim)
        pages = [torch.empty(shape, dtype=dtype, device=device) for _ in range(2 * num_layers)]
        return cls(tuple(pages[:num_layers]), tuple(pages[num_layers:]))

    @property
    def page_size(self) -> int:
        return self.keys[0].shape[1]

    @property
    def num_pages(self) -> int:
        return self.keys[0].shape[0]

    def store(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        for pages, new_TKD in ((self.keys[layer], k_TKD), (self.values[layer], v_TKD)):
            pages.flatten(0, 1).index_copy_(0, slots_T, new_TKD.to(pages.dtype))
