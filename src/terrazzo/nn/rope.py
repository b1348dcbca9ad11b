"""Rotary position embedding: pairs of features turn by an angle that grows with the position.

The pairs are `(i, i + head_dim / 2)` ("rotate half", the layout of Hugging Face checkpoints).

There is no table over all positions: at 131072 positions it would hold 128 MiB, while the sines and
cosines of one forward pass cost a few microseconds and every layer uses the same ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """Frequencies `theta ** (-2 i / head_dim)`."""

    theta: float


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Every position is divided by `factor`."""

    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, a ramp between.

    original_context: positions the model was first trained on. low_factor, high_factor: waves
    longer than `original_context / low_factor` are stretched, waves shorter than
    `original_context / high_factor` are kept.
    """

    theta: float
    factor: float
    low_factor: float
    high_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN: pairs that turn rarely within the original context are stretched by `factor`.

    magnitude: what sines and cosines are multiplied with. fast_turns, slow_turns: turns within
    `original_context` above which a pair is kept and below which it is stretched; the ramp between
    runs over pair indices, whole ones where `whole_pairs` is set.
    """

    theta: float
    factor: float
    magnitude: float
    fast_turns: float
    slow_turns: float
    original_context: int
    whole_pairs: bool


Rope: TypeAlias = DefaultRope | LinearRope | Llama3Rope | YarnRope


def frequencies(rope: Rope, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]: radians per position of each pair."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    base = 1.0 / rope.theta**exponents
    if isinstance(rope, DefaultRope):
        return base
    if isinstance(rope, LinearRope):
        return base / rope.factor
    kept = _kept_by_wave(rope, base) if isinstance(rope, Llama3Rope) else _kept_by_pair(rope, base)
    return kept * base + (1 - kept) * base / rope.factor


def _kept_by_wave(rope: Llama3Rope, base: Tensor) -> Tensor:
    """1 where a frequency stays, 0 where it is divided by `factor`."""
    waves_per_context = rope.original_context * base / (2 * math.pi)
    kept = (waves_per_context - rope.low_factor) / (rope.high_factor - rope.low_factor)
    return kept.clamp(0.0, 1.0)


def _kept_by_pair(rope: YarnRope, base: Tensor) -> Tensor:
    """1 where a frequency stays, 0 where it is divided by `factor`."""
    pairs = base.shape[0]
    first, last = (_pair_of(turns, rope, pairs) for turns in (rope.fast_turns, rope.slow_turns))
    if rope.whole_pairs:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    # Equal borders would divide by zero; YaRN's reference moves the last one by this much.
    width = last - first if last != first else 0.001
    return 1 - ((torch.arange(pairs, dtype=torch.float32) - first) / width).clamp(0.0, 1.0)


def _pair_of(turns: float, rope: YarnRope, pairs: int) -> float:
    """The fractional pair index that makes `turns` turns within the original context."""
    wave = rope.original_context / (2 * math.pi * turns)
    return pairs * math.log(wave) / math.log(rope.theta)


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of T positions.

    cos_T1D: float32 [T, 1, head_dim]. sin_T1D: the same, negative in the first half, so that one
    multiply-add turns both halves.
    """

    cos_T1D: Tensor
    sin_T1D: Tensor

    def turn_(self, heads_TND: Tensor) -> Tensor:
        """Rotates every head of float32 [T, heads, head_dim] in place and returns it.

        In place because a prefill spends more time on fresh memory than on the arithmetic.
        """
        swapped_TND = heads_TND.roll(heads_TND.shape[-1] // 2, dims=-1)
        return heads_TND.mul_(self.cos_T1D).addcmul_(swapped_TND, self.sin_T1D)


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """frequencies_F: float32 [head_dim / 2], radians per position. magnitude: see YarnRope."""

    frequencies_F: Tensor
    magnitude: float

    @classmethod
    def of(cls, rope: Rope, head_dim: int) -> RotaryEmbedding:
        magnitude = rope.magnitude if isinstance(rope, YarnRope) else 1.0
        return cls(frequencies(rope, head_dim), magnitude)

    def __call__(self, positions_T: Tensor) -> Rotation:
        """int64 [T] -> the rotation of those positions, once for all layers."""
        angles_TF = positions_T.to(torch.float32).unsqueeze(-1) * self.frequencies_F
        cos_TF, sin_TF = angles_TF.cos() * self.magnitude, angles_TF.sin() * self.magnitude
        cos_TD = torch.cat((cos_TF, cos_TF), dim=-1)
        sin_TD = torch.cat((-sin_TF, sin_TF), dim=-1)
        return Rotation(cos_TD.unsqueeze(1), sin_TD.unsqueeze(1))
