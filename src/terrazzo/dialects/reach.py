"""What each engine can hold, and the spec nearest to a checkpoint's that it loads."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

from terrazzo.dialects import gptqmodel, marlin, transformers
from terrazzo.dialects.prediction import Refusal
from terrazzo.dialects.subject import Linear
from terrazzo.dialects.units import Role, units_of
from terrazzo.spec import LEGAL_BITS, PER_CHANNEL, Dense, Name, QuantSpec
from terrazzo.spellings import HEADS


class Scope(enum.Enum):
    """Which linears must have one spec."""

    MODULE = "each for itself"
    UNIT = "those that the engine fuses"
    UNIT_AND_EXPERTS = "those that the engine fuses, and the experts of all layers"
    LAYERS = "all in the decoder layers"


class Zeros(enum.Enum):
    """Which zero points an engine reads."""

    ANY = "any"
    MIDDLE = "the middle code only"


class Order(enum.Enum):
    """Whether groups may follow the order of activation."""

    ANY = "any"
    SEQUENTIAL = "sequential only"


class Tail(enum.Enum):
    """Whether the last group of a weight may be short."""

    ANY = "any"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Reach:
    """bits, group_sizes: what the kernels of an engine have; the rest as in the enums."""

    bits: Sequence[int]
    group_sizes: Sequence[int]
    zeros: Zeros
    order: Order
    tail: Tail
    scope: Scope

    def ties(self, linears: Sequence[Linear]) -> list[list[Linear]]:
        """The linears in groups that must have one spec, dense ones among them."""
        if self.scope is Scope.MODULE:
            return [[linear] for linear in linears]
        if self.scope is Scope.LAYERS:
            heads = [linear for linear in linears if linear.name in HEADS]
            return [[linear for linear in linears if linear.name not in HEADS], heads]
        units = units_of(linears)
        if self.scope is Scope.UNIT:
            return [list(unit.shards) for unit in units]
        others = [list(unit.shards) for unit in units if unit.role is not Role.EXPERTS]
        return [*others, [s for unit in units if unit.role is Role.EXPERTS for s in unit.shards]]

    def spec_for(self, tied: Sequence[Linear], symmetric_bits: Mapping[Name, int]) -> QuantSpec:
        """One spec that holds all of `tied` exactly.

        symmetric_bits: bits that each needs around the middle code. Refusal where there is none.
        """
        specs = [shard.spec for shard in tied if isinstance(shard.spec, QuantSpec)]
        if self.scope is not Scope.LAYERS and len(specs) < len(tied):
            raise Refusal("some are dense, and the engine runs all or none of them quantized")
        asym = self.zeros is Zeros.ANY and not all(spec.sym for spec in specs)
        needs = [s.bits for s in specs] if asym else [symmetric_bits[s.name] for s in _packed(tied)]
        fitting = [bits for bits in self.bits if bits >= max(needs)]
        if not fitting:
            raise Refusal(f"no width of the engine ({_list(self.bits)} bits) holds its codes")
        group = self._group(tied, specs)
        return QuantSpec(min(fitting), group, not asym, any(spec.desc_act for spec in specs))

    def _group(self, tied: Sequence[Linear], specs: Sequence[QuantSpec]) -> int:
        sizes = {spec.group_size for spec in specs}
        if any(spec.desc_act for spec in specs):
            return self._ordered_group(sizes)
        shards = _packed(tied)
        size = specs[0].group_size
        if len(sizes) == 1 and all(self._holds(size, shard.in_features) for shard in shards):
            return size
        both = list(zip(specs, [shard.in_features for shard in shards], strict=True))
        if all(spec.num_groups(in_features) == 1 for spec, in_features in both):
            return PER_CHANNEL
        span = gcd(*(gcd(spec.group_of(count), count) for spec, count in both))
        fitting = [size for size in self.group_sizes if size > 0 and span % size == 0]
        if not fitting:
            raise Refusal(f"no group size of the engine ({_list(self.group_sizes)}) divides {span}")
        return max(fitting)

    def _ordered_group(self, sizes: set[int]) -> int:
        if self.order is Order.SEQUENTIAL:
            raise Refusal(
                "its groups are in the order of activation. That can be folded into what makes "
                "the inputs only for down_proj; the input of q, k, v, gate and up is shared with "
                "the rest of the model, and that of o_proj is made head by head"
            )
        if len(sizes) > 1 or not sizes <= set(self.group_sizes):
            raise Refusal(
                f"groups of {_list(sorted(sizes))} in the order of activation cannot be cut to the "
                f"sizes of the engine ({_list(self.group_sizes)})"
            )
        return next(iter(sizes))

    def _holds(self, size: int, in_features: int) -> bool:
        """Whether an engine takes this group size for this many inputs as it is."""
        if self.tail is Tail.ANY and size == in_features:
            return True
        whole = self.tail is Tail.ANY or size == PER_CHANNEL or in_features % size == 0
        return size in self.group_sizes and whole


REACH = {
    "vllm": Reach(
        marlin.BITS,
        marlin.GROUP_SIZES,
        Zeros.MIDDLE,
        Order.SEQUENTIAL,
        Tail.FULL,
        Scope.UNIT,
    ),
    "sglang": Reach(
        marlin.BITS,
        marlin.GROUP_SIZES,
        Zeros.MIDDLE,
        Order.ANY,
        Tail.FULL,
        Scope.UNIT_AND_EXPERTS,
    ),
    "gptqmodel": Reach(
        LEGAL_BITS, gptqmodel.GROUP_SIZES, Zeros.ANY, Order.ANY, Tail.ANY, Scope.MODULE
    ),
    "transformers": Reach(
        transformers.BITS, gptqmodel.GROUP_SIZES, Zeros.ANY, Order.ANY, Tail.ANY, Scope.LAYERS
    ),
}
"""By the name of the engine."""


def _packed(tied: Sequence[Linear]) -> list[Linear]:
    return [shard for shard in tied if not isinstance(shard.spec, Dense)]


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))
