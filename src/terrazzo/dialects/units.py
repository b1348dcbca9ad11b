"""Which linears an engine builds as one, and the one name with which it asks the rules for them.

vLLM and SGLang fuse q/k/v, gate/up and all experts of a layer when they build a model; rules and
configs are asked with the name of the fusion, which no module on disk has.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.checkpoint.names import EMBEDDINGS, ROUTERS, TOWERS
from terrazzo.dialects.subject import Linear
from terrazzo.spec import Name, QuantSpec
from terrazzo.spellings import HEADS

FUSIONS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}
"""Name of a fused linear -> the leaves on disk, all of which must exist for the fusion."""

EXPERTS = "experts"
_ROW_LEAVES = frozenset({"o_proj", "out_proj", "down_proj", "dense_4h_to_h", "fc2", "w2"})


class Role(enum.Enum):
    """How an engine splits a linear over devices; its loader compares shapes accordingly."""

    COLUMN = "column"
    ROW = "row"
    EXPERTS = "experts"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class Unit:
    """asked: the name that rules are asked with. shards: what it consists of on disk."""

    asked: Name
    role: Role
    shards: tuple[Linear, ...]

    @property
    def names(self) -> list[Name]:
        return [shard.name for shard in self.shards]

    @property
    def is_always_dense(self) -> bool:
        """Engines build routers, embeddings and the towers of other media dense, without a
        question.
        """
        parts = self.asked.split(".")
        return parts[-1] in ROUTERS | EMBEDDINGS or not TOWERS.isdisjoint(parts)

    @property
    def quantized(self) -> list[Linear]:
        return [shard for shard in self.shards if isinstance(shard.spec, QuantSpec)]


def units_of(linears: Sequence[Linear]) -> tuple[Unit, ...]:
    """Every linear in exactly one unit, in disk order of the first shard."""
    names = {linear.name for linear in linears}
    shards: dict[Name, list[Linear]] = {}
    for linear in linears:
        shards.setdefault(_asked(linear.name, names), []).append(linear)
    return tuple(Unit(asked, _role(asked), tuple(parts)) for asked, parts in shards.items())


def _asked(name: Name, names: set[Name]) -> Name:
    parts = name.split(".")
    if EXPERTS in parts[:-2] and parts[parts.index(EXPERTS) + 1].isdecimal():
        return ".".join(parts[: parts.index(EXPERTS) + 1])
    parent, _, leaf = name.rpartition(".")
    for fused, leaves in FUSIONS.items():
        if leaf in leaves and all(f"{parent}.{each}" in names for each in leaves):
            return f"{parent}.{fused}"
    return name


def _role(asked: Name) -> Role:
    leaf = asked.rpartition(".")[2]
    if leaf == EXPERTS:
        return Role.EXPERTS
    if asked in HEADS:
        return Role.HEAD
    return Role.ROW if leaf in _ROW_LEAVES else Role.COLUMN
