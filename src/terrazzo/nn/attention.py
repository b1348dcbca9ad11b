"""Attention between the q/k/v projection and the output projection.

A forward pass works on T tokens without a batch dimension; an `AttentionContext` says which of them
belong together, at which positions they stand and where their keys and values live.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from terrazzo.nn.grouped import Scoring, causal_mask, grouped_attention
from terrazzo.nn.kv_pool import KVPool
from terrazzo.nn.reading import ReadPlan, SequenceSpan
from terrazzo.nn.rope import Rotation

__all__ = [
    "Attention",
    "AttentionContext",
    "CausalContext",
    "HeadStep",
    "KVPool",
    "PagedContext",
    "Pass",
    "Scoring",
    "SequenceSpan",
]


class AttentionContext(Protocol):
    """What a forward pass knows about positions and about the keys and values of earlier tokens."""

    @property
    def positions(self) -> Tensor:
        """int64 [T]."""

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scoring: Scoring
    ) -> Tensor:
        """Causal attention of T queries, float32 -> [T, H, D].

        Keys and values of these tokens are stored first where the context has a cache.
        """


@dataclass(frozen=True, slots=True)
class Pass:
    """What the layers of one forward pass share: the context and the rotations of its positions.

    Made by `RotaryEmbeddings` and a context: `Pass(context, rotary(context.positions))`. A layer
    knows the index of its rotation.
    """

    context: AttentionContext
    rotations: tuple[Rotation, ...]


HeadStep: TypeAlias = Callable[[Tensor], Tensor]
"""[T, query and key heads, head_dim] -> the same shape: one of those in nn/norm.py."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Heads of one layer: norm, rotation, attention.

    layer: index of this layer in the cache. num_heads, num_kv_heads: H and K; H is a multiple of K.
    normalize: what happens to queries and keys before the rotation. rotation: index among those of
    a pass.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    normalize: HeadStep
    rotation: int
    scoring: Scoring

    def __call__(self, qkv_TN: Tensor, forward: Pass) -> Tensor:
        """float32 [T, (H + 2 K) * D] -> float32 [T, H * D]. Overwrites the queries and keys."""
        tokens, heads, turning = qkv_TN.shape[0], self.num_heads, self.num_heads + self.num_kv_heads
        qkv_TND = qkv_TN.view(tokens, turning + self.num_kv_heads, self.head_dim)
        qk_TND = forward.rotations[self.rotation].turn_(self.normalize(qkv_TND[:, :turning]))
        attended_THD = forward.context.attend(
            self.layer,
            qk_TND[:, :heads],
            qk_TND[:, heads:],
            qkv_TND[:, turning:],
            self.scoring,
        )
        return attended_THD.reshape(tokens, heads * self.head_dim)


class CausalContext:
    """Independent sequences of equal length, flattened one after the other; nothing is cached."""

    __slots__ = ("_length", "_positions")

    def __init__(self, num_sequences: int, length: int) -> None:
        self._length = length
        self._positions = torch.arange(length).repeat(num_sequences)

    @property
    def positions(self) -> Tensor:
        return self._positions

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scoring: Scoring
    ) -> Tensor:
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        mask = causal_mask(self._length, self._length, scoring.window)
        for start in range(0, q_THD.shape[0], self._length):
            rows = slice(start, start + self._length)
            out_THD[rows] = grouped_attention(mask, q_THD[rows], k_TKD[rows], v_TKD[rows], scoring)
        return out_THD


class PagedContext:
    """Sequences of any length whose keys and values live in a `KVPool`.

    positions: int64 [T]. slot_mapping: int64 [T], where each new token is stored. A sequence may
    come in chunks: its queries see everything stored for it earlier.
    """

    __slots__ = ("_plan", "_pool", "_positions", "_slot_mapping")

    def __init__(
        self,
        pool: KVPool,
        positions: Tensor,
        slot_mapping: Tensor,
        sequences: Sequence[SequenceSpan],
    ) -> None:
        self._pool = pool
        self._positions = positions
        self._slot_mapping = slot_mapping
        self._plan = ReadPlan(sequences, pool)

    @property
    def positions(self) -> Tensor:
        return self._positions

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scoring: Scoring
    ) -> Tensor:
        self._pool.store(layer, self._slot_mapping, k_TKD, v_TKD)
        return self._plan.attend(q_THD, self._pool.keys[layer], self._pool.values[layer], scoring)
