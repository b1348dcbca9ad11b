"""Rotary position embedding: pairs of features turn by an angle that grows with the position.

Pairs are `(i, i + rotary_dim / 2)` ("rotate half", the layout of most Hugging Face checkpoints) or
neighbours `(2 i, 2 i + 1)`. Features from `rotary_dim` on do not turn.

There is no table over all positions: at 131072 positions it would hold 128 MiB, while the sines and
cosines of one forward pass cost a few microseconds and every layer uses the same ones.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

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


@dataclass(frozen=True, slots=True)
class StretchedRope:
    """LongRoPE within the original context: each pair is slowed by its own factor.

    magnitude: what sines and cosines are multiplied with.
    """

    theta: float
    factors: tuple[float, ...]
    magnitude: float


@dataclass(frozen=True, slots=True)
class NoRope:
    """Nothing turns: the layer knows no positions (NoPE)."""


TurningRope: TypeAlias = DefaultRope | LinearRope | Llama3Rope | YarnRope | StretchedRope
Rope: TypeAlias = TurningRope | NoRope


class Pairing(enum.Enum):
    """Which features turn together."""

    HALVES = "i and i + rotary_dim / 2"
    NEIGHBOURS = "2 i and 2 i + 1"


def frequencies(rope: TurningRope, rotary_dim: int) -> Tensor:
    """float32 [rotary_dim / 2]: radians per position of each pair."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    base = 1.0 / rope.theta**exponents
    if isinstance(rope, DefaultRope):
        return base
    if isinstance(rope, StretchedRope):
        return 1.0 / (torch.tensor(rope.factors) * rope.theta**exponents)
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


class Rotation(Protocol):
    """The angles of T positions."""

    def turn_(self, heads_TND: Tensor) -> Tensor:
        """Rotates every head of float32 [T, heads, head_dim] in place and returns it.

        In place because a prefill spends more time on fresh memory than on the arithmetic.
        """


@dataclass(frozen=True, slots=True)
class Standing:
    """The rotation of a layer without positions."""

    def turn_(self, heads_TND: Tensor) -> Tensor:
        return heads_TND


@dataclass(frozen=True, slots=True)
class TurningHalves:
    """cos_T1R: float32 [T, 1, rotary_dim]. sin_T1R: the same, negative in the first half, so that
    one multiply-add turns both halves.
    """

    cos_T1R: Tensor
    sin_T1R: Tensor

    def turn_(self, heads_TND: Tensor) -> Tensor:
        width = self.cos_T1R.shape[-1]
        turning_TNR = heads_TND[..., :width]
        swapped_TNR = turning_TNR.roll(width // 2, dims=-1)
        turning_TNR.mul_(self.cos_T1R).addcmul_(swapped_TNR, self.sin_T1R)
        return heads_TND


@dataclass(frozen=True, slots=True)
class TurningNeighbours:
    """cos_T1R, sin_T1R: as in TurningHalves, but sines are negative at even features."""

    cos_T1R: Tensor
    sin_T1R: Tensor

    def turn_(self, heads_TND: Tensor) -> Tensor:
        turning_TNR = heads_TND[..., : self.cos_T1R.shape[-1]]
        swapped_TNR = turning_TNR.reshape(*turning_TNR.shape[:-1], -1, 2).flip(-1).flatten(-2)
        turning_TNR.mul_(self.cos_T1R).addcmul_(swapped_TNR, self.sin_T1R)
        return heads_TND


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """frequencies_F: float32 [rotary_dim / 2], radians per position. magnitude: see YarnRope."""

    frequencies_F: Tensor
    magnitude: float
    pairing: Pairing

    @classmethod
    def of(
        cls, rope: TurningRope, rotary_dim: int, pairing: Pairing = Pairing.HALVES
    ) -> RotaryEmbedding:
        magnitude = rope.magnitude if isinstance(rope, (YarnRope, StretchedRope)) else 1.0
        return cls(frequencies(rope, rotary_dim), magnitude, pairing)

    def __call__(self, positions_T: Tensor) -> Rotation:
        """int64 [T] -> the rotation of those positions, once for all layers."""
        angles_TF = positions_T.to(torch.float32).unsqueeze(-1) * self.frequencies_F
        cos_TF, sin_TF = angles_TF.cos() * self.magnitude, angles_TF.sin() * self.magnitude
        if self.pairing is Pairing.NEIGHBOURS:
            cos_TR, sin_TR = (
                torch.stack(pair, dim=-1).flatten(-2)
                for pair in ((cos_TF, cos_TF), (-sin_TF, sin_TF))
            )
            return TurningNeighbours(cos_TR.unsqueeze(1), sin_TR.unsqueeze(1))
        cos_TR = torch.cat((cos_TF, cos_TF), dim=-1)
        sin_TR = torch.cat((-sin_TF, sin_TF), dim=-1)
        return TurningHalves(cos_TR.unsqueeze(1), sin_TR.unsqueeze(1))


@dataclass(frozen=True, slots=True)
class RotaryEmbeddings:
    """One for each kind of rotation that the layers of a model have."""

    kinds: tuple[RotaryEmbedding | NoRope, ...]

    @classmethod
    def of(cls, ropes: Sequence[Rope], rotary_dim: int, pairing: Pairing) -> RotaryEmbeddings:
        return cls(
            tuple(
                rope if isinstance(rope, NoRope) else RotaryEmbedding.of(rope, rotary_dim, pairing)
                for rope in ropes
            )
        )

    def __call__(self, positions_T: Tensor) -> tuple[Rotation, ...]:
        """int64 [T] -> the rotations of those positions, in the order of `kinds`."""
        return tuple(
            Standing() if isinstance(kind, NoRope) else kind(positions_T) for kind in self.kinds
        )
