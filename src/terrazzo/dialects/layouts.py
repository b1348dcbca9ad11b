"""Linears that are one module for one tool and several for another, and the way between the two.

transformers has one `gate_up_proj` in some classes. GPTQModel cuts it when it loads such a class
and writes the parts; vLLM wants parts, except where it was told of the class; SGLang takes either.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.dialects.exact import with_outputs
from terrazzo.dialects.subject import Linear
from terrazzo.dialects.units import FUSIONS
from terrazzo.packing import QuantTensor
from terrazzo.spec import Name, QuantSpec

QKV, GATE_UP = "qkv_proj", "gate_up_proj"
ONE_IN_CLASS = {
    "Phi3ForCausalLM": frozenset({QKV, GATE_UP}),
    "GlmForCausalLM": frozenset({GATE_UP}),
    "Glm4ForCausalLM": frozenset({GATE_UP}),
}
"""Architecture -> what its class in transformers has as one linear."""

ONE_IN_VLLM = frozenset({"Phi3ForCausalLM", "Plamo3ForCausalLM"})
"""Architectures whose fusions vLLM expects as they are."""

NO_FUSION = ""


MIXTRAL = "MixtralForCausalLM"
"""Its experts had other names when its class was written into vLLM and SGLang."""


def has_older_names(engine: str, architecture: str) -> bool:
    """Whether an engine looks for `block_sparse_moe.experts.N.w1` and so on."""
    return architecture == MIXTRAL and engine != "gptqmodel"


class Form(enum.Enum):
    ONE = "one module"
    PARTS = "a module for each part"
    EITHER = "either"


def form_for(engine: str, architecture: str, fusion: str) -> Form:
    """How an engine looks for the linears of a fusion."""
    in_class = fusion in ONE_IN_CLASS.get(architecture, frozenset())
    if engine == "vllm":
        return Form.ONE if architecture in ONE_IN_VLLM else Form.PARTS
    if engine == "transformers":
        return Form.ONE if in_class else Form.PARTS
    if engine == "gptqmodel":
        return Form.ONE if in_class and fusion == QKV else Form.PARTS
    return Form.EITHER


def fusion_of(engine: str, architecture: str, leaf: str) -> str:
    """What an engine looks for in place of a linear that is only a part of it, or NO_FUSION."""
    for fusion in (QKV, GATE_UP):
        if leaf in FUSIONS[fusion] and form_for(engine, architecture, fusion) is Form.ONE:
            return fusion
    return NO_FUSION


@dataclass(frozen=True, slots=True)
class Part:
    """Some outputs of a stored module."""

    stored: Name
    outputs: slice


@dataclass(frozen=True, slots=True)
class Layout:
    """cuts: modules that are parts of stored ones. joins: modules that will be written as one, with
    their parts in order. What an engine wants as one is cut all the same, planned by its parts, and
    joined again.
    """

    cuts: Mapping[Name, Part]
    joins: Mapping[Name, tuple[Name, ...]]

    @classmethod
    def of(cls, linears: Sequence[Linear], engine: str, architecture: str) -> Layout:
        cuts: dict[Name, Part] = {}
        if form_for(engine, architecture, GATE_UP) is not Form.EITHER:
            for linear in linears:
                if linear.leaf == GATE_UP:
                    cuts |= _halves(linear)
        names = {linear.name for linear in linears} | cuts.keys()
        return cls(cuts, dict(_joins(names, engine, architecture)))

    def cut(self, linears: Iterable[Linear]) -> tuple[Linear, ...]:
        """The linears by their parts."""
        parts: dict[Name, list[Name]] = {}
        for name, part in self.cuts.items():
            parts.setdefault(part.stored, []).append(name)
        return tuple(
            linear
            if linear.name not in parts
            else replace(linear, name=name, out_features=_height(self.cuts[name].outputs))
            for linear in linears
            for name in parts.get(linear.name, [linear.name])
        )

    def joined(self, linears: Iterable[Linear]) -> tuple[Linear, ...]:
        """The linears as they will be written; the parts of each join must be alike."""
        by_name = {linear.name: linear for linear in linears}
        owners = self.owners
        result: dict[Name, Linear] = {}
        for name, linear in by_name.items():
            owner = owners.get(name, name)
            parts = [by_name[part] for part in self.joins.get(owner, (name,))]
            height = sum(part.out_features for part in parts)
            result[owner] = replace(linear, name=owner, out_features=height)
        return tuple(result.values())

    def tied(self, groups: list[list[Linear]]) -> list[list[Linear]]:
        """`groups` of linears that must be alike, those with parts of one join put together."""
        for parts in self.joins.values():
            together = [group for group in groups if any(each.name in parts for each in group)]
            others = [group for group in groups if group not in together]
            groups = [*others, [linear for group in together for linear in group]]
        return groups

    def faults(self, linears: Iterable[Linear], checkpoint: Checkpoint) -> Iterator[str]:
        """Why parts cannot stand side by side in one module."""
        by_name = {linear.name: linear for linear in linears}
        for joined, parts in self.joins.items():
            shards = [by_name[part] for part in parts]
            biased = {f"{self.stored(part)}.bias" in checkpoint.tensor_names for part in parts}
            if len({isinstance(shard.spec, QuantSpec) for shard in shards}) > 1:
                yield f"{joined}: some of its parts are dense, and the engine has one module there"
            if len({shard.order for shard in shards}) > 1:
                yield f"{joined}: its parts have groups in different orders of activation"
            if len(biased) > 1:
                yield f"{joined}: some of its parts have a bias"

    @property
    def owners(self) -> dict[Name, Name]:
        """Part -> what it will be joined to."""
        return {part: joined for joined, parts in self.joins.items() for part in parts}

    def stored(self, name: Name) -> Name:
        return self.cuts[name].stored if name in self.cuts else name

    def quant_tensor(self, checkpoint: Checkpoint, name: Name) -> QuantTensor:
        weight = checkpoint.quant_tensor(self.stored(name))
        return with_outputs(weight, self.cuts[name].outputs) if name in self.cuts else weight

    def pieces(self, tensor: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """A stored tensor whose rows are outputs, under the names of the parts of its module."""
        module, _, suffix = tensor.rpartition(".")
        parts = {name: part for name, part in self.cuts.items() if part.stored == module}
        for name, part in parts.items():
            yield f"{name}.{suffix}", value[part.outputs]
        if not parts:
            yield tensor, value

    def changes(self) -> Iterator[str]:
        """A line for each module that is in another form than before."""
        stored = {part.stored for part in self.cuts.values()}
        yield from (f"{name}: cut into its parts" for name in sorted(stored - self.joins.keys()))
        for joined, parts in self.joins.items():
            leaves = [part.rpartition(".")[2] for part in parts]
            if joined not in stored:
                yield f"{joined}: joined from {', '.join(leaves)}"


def _halves(linear: Linear) -> Iterator[tuple[Name, Part]]:
    parent, half = linear.name.rpartition(".")[0], linear.out_features // 2
    gate, up = FUSIONS[GATE_UP]
    yield f"{parent}.{gate}", Part(linear.name, slice(0, half))
    yield f"{parent}.{up}", Part(linear.name, slice(half, 2 * half))


def _joins(
    names: set[Name], engine: str, architecture: str
) -> Iterator[tuple[Name, tuple[Name, ...]]]:
    for name in sorted(names):
        parent, _, leaf = name.rpartition(".")
        fusion = fusion_of(engine, architecture, leaf)
        parts = tuple(f"{parent}.{each}" for each in FUSIONS.get(fusion, ()))
        if parts and parts[0] == name and names.issuperset(parts):
            yield f"{parent}.{fusion}", parts


def _height(outputs: slice) -> int:
    return int(outputs.stop - outputs.start)
