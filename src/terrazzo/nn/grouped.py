"""Causal attention of one sequence whose query heads share key heads.

Grouped heads are never copied: the G query heads that share a key head are a dimension of their
own, [kv_heads, G, L, head_dim], over which the keys are expanded with stride zero; a single query
has no order among its heads, so there G takes the place of L.
"""

from __future__ import annotations

import enum
import math
import sys
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NO_WINDOW = sys.maxsize
NO_CAP = math.inf


@dataclass(frozen=True, slots=True)
class Scoring:
    """How the queries of a layer weigh keys.

    scale: of the products. window: a query sees itself and the `window - 1` tokens before it.
    softcap: scores are `softcap * tanh(score / softcap)`, which infinity leaves as they are.
    """

    scale: float
    window: int = NO_WINDOW
    softcap: float = NO_CAP


class Sees(enum.Enum):
    """Masks that need no tensor. In causal order the first query sees only the first key."""

    ALL = "every key"
    CAUSAL = "causal"


Mask: TypeAlias = Sees | Tensor
"""A tensor is float32, added to the scores: 0 or minus infinity, [..., queries, keys]."""


def causal_mask(query_len: int, kv_len: int, window: int) -> Mask:
    """The last `query_len` of `kv_len` tokens see themselves and what their window holds.

    A single query must see everything it is given.
    """
    if query_len == 1:
        return Sees.ALL
    if query_len == kv_len and window >= kv_len:
        return Sees.CAUSAL
    return _banded(query_len, kv_len, window)


def _banded(query_len: int, kv_len: int, window: int) -> Tensor:
    past = kv_len - query_len
    visible_LS = torch.ones(query_len, kv_len, dtype=torch.bool).tril(past)
    if window < kv_len:
        visible_LS = visible_LS.triu(past - window + 1)
    return torch.zeros(query_len, kv_len).masked_fill_(~visible_LS, -torch.inf)


def weigh(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scoring: Scoring) -> Tensor:
    """[..., L, D] over [..., S, D] -> [..., L, D]."""
    if scoring.softcap == NO_CAP:
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask if isinstance(mask, Tensor) else None,
            is_causal=mask is Sees.CAUSAL,
            scale=scoring.scale,
        )
    # torch's attention cannot cap: here the scores exist as a whole.
    scores = softcap_((q @ k.transpose(-1, -2)).mul_(scoring.scale), scoring.softcap)
    if mask is Sees.CAUSAL:
        mask = _banded(q.shape[-2], k.shape[-2], NO_WINDOW)
    if isinstance(mask, Tensor):
        scores.add_(mask)
    return scores.softmax(-1) @ v


def softcap_(x: Tensor, cap: float) -> Tensor:
    """`cap * tanh(x / cap)` in place."""
    return x.div_(cap).tanh_().mul_(cap)


def grouped_attention(
    mask: Mask, q_LHD: Tensor, k_SKD: Tensor, v_SKD: Tensor, scoring: Scoring
) -> Tensor:
    """[L, H, D] over [S, K, D] -> [L, H, D]."""
    queries, heads, width = q_LHD.shape
    length, kv_heads, _ = k_SKD.shape
    group = heads // kv_heads
    q_LKGD = q_LHD.view(queries, kv_heads, group, width)
    k_KSD, v_KSD = k_SKD.transpose(0, 1), v_SKD.transpose(0, 1)
    if queries == 1:
        out_1KGD = weigh(q_LKGD, k_KSD.unsqueeze(0), v_KSD.unsqueeze(0), mask, scoring)
        return out_1KGD.reshape(1, heads, width)
    shape = (kv_heads, group, length, width)
    k_KGSD, v_KGSD = k_KSD.unsqueeze(1).expand(shape), v_KSD.unsqueeze(1).expand(shape)
    out_KGLD = weigh(q_LKGD.permute(1, 2, 0, 3), k_KGSD, v_KGSD, mask, scoring)
    return out_KGLD.permute(2, 0, 1, 3).reshape(queries, heads, width)
