"""Causal attention of one sequence whose query heads share key heads.

Grouped heads are never copied: the G query heads that share a key head are a dimension of their
own, [kv_heads, G, L, head_dim], over which the keys are expanded with stride zero; a single query
has no order among its heads, so there G takes the place of L.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Look: TypeAlias = Callable[..., Tensor]
"""Scaled dot product attention with its mask already given."""


def causal_look(query_len: int, kv_len: int) -> Look:
    """The last `query_len` of `kv_len` tokens see themselves and everything before."""
    if query_len == 1:
        return scaled_dot_product_attention
    if query_len == kv_len:
        return partial(scaled_dot_product_attention, is_causal=True)
    visible_LS = torch.ones(query_len, kv_len, dtype=torch.bool).tril(kv_len - query_len)
    return partial(scaled_dot_product_attention, attn_mask=visible_LS)


def grouped_attention(
    look: Look, q_LHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scale: float
) -> Tensor:
    """[L, H, D] over [S, K, D] -> [L, H, D]."""
    queries, heads, width = q_LHD.shape
    length, kv_heads, _ = k_SKD.shape
    group = heads // kv_heads
    q_LKGD = q_LHD.view(queries, kv_heads, group, width)
    k_KSD, v_KSD = k_SKD.transpose(0, 1), v_SKD.transpose(0, 1)
    if queries == 1:
        out_1KGD = look(q_LKGD, k_KSD.unsqueeze(0), v_KSD.unsqueeze(0), scale=scale)
        return out_1KGD.reshape(1, heads, width)
    shape = (kv_heads, group, length, width)
    k_KGSD, v_KGSD = k_KSD.unsqueeze(1).expand(shape), v_KSD.unsqueeze(1).expand(shape)
    out_KGLD = look(q_LKGD.permute(1, 2, 0, 3), k_KGSD, v_KGSD, scale=scale)
    return out_KGLD.permute(2, 0, 1, 3).reshape(queries, heads, width)
