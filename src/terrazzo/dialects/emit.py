"""Rules that every engine reads alike, written from what the tensors hold.

Each pattern names one set of layers and one set of linears, under the names on disk and under those
of their fusions. No two patterns match the same module, so their order means nothing; and they use
only syntax that PCRE2, `regex` and `re` share.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from terrazzo.checkpoint.names import is_quantizable
from terrazzo.dialects.subject import Linear
from terrazzo.dialects.units import EXPERTS, Role, Unit, units_of
from terrazzo.rules import RuleSet
from terrazzo.spec import DENSE, Dense, Name, QuantSpec
from terrazzo.spellings import HEADS, LM_HEAD, layer_relative

_ANY_LAYER = r"\d+"


def rules_for(linears: Sequence[Linear]) -> RuleSet:
    """The rule set under which `linears` are what they are."""
    base = _base(linears)
    inside = [linear for linear in linears if is_quantizable(linear.name)]
    everywhere: dict[Name, set[str]] = {}
    for linear in inside:
        everywhere.setdefault(layer_relative(linear.name), set()).add(_layer(linear.name))
    layers_of: dict[tuple[QuantSpec | Dense, str], set[str]] = {}
    existing: dict[str, set[str]] = {}
    for unit in units_of(inside):
        for spec, names in _by_spec(unit).items():
            child = _child(unit, names)
            layers_of.setdefault((spec, child), set()).add(_layer(unit.asked))
            for name in names:
                existing.setdefault(child, set()).update(everywhere[layer_relative(name)])
    patterns: dict[tuple[QuantSpec | Dense, str], list[str]] = {}
    for (spec, child), layers in layers_of.items():
        if spec != base and not (spec == DENSE and child == LM_HEAD):
            where = _layers(layers, existing[child])
            patterns.setdefault((spec, where), []).append(child)
    dynamic = dict(_rule(base, key, children) for key, children in patterns.items())
    heads = [linear for linear in inside if linear.name in HEADS]
    return RuleSet.parse(dynamic, base, lm_head=any(head.spec != DENSE for head in heads))


def _base(linears: Iterable[Linear]) -> QuantSpec:
    """The spec of the experts, for which some engines ask no rule; else the commonest."""
    specs = [(x.name, x.spec) for x in linears if isinstance(x.spec, QuantSpec)]
    experts = [spec for name, spec in specs if EXPERTS in name.split(".")]
    counts = Counter(experts or [spec for _, spec in specs])
    return counts.most_common(1)[0][0] if counts else QuantSpec()


def _by_spec(unit: Unit) -> dict[QuantSpec | Dense, list[Name]]:
    groups: dict[QuantSpec | Dense, list[Name]] = {}
    for shard in unit.shards:
        groups.setdefault(shard.spec, []).append(shard.name)
    return groups


def _child(unit: Unit, names: Sequence[Name]) -> str:
    """A pattern for some linears of a unit, under their layer; all of them include the fusion."""
    whole = len(names) == len(unit.shards)
    relative = LM_HEAD if unit.role is Role.HEAD else layer_relative(unit.asked)
    if len(unit.shards) == 1:
        return re.escape(relative)
    parent, _, fused = relative.rpartition(".")
    if fused == EXPERTS:
        own = r"\.\d+\.\w+" if whole else _any_of(n[len(unit.asked) :] for n in names)
        return re.escape(relative) + (f"(?:{own})?" if whole else own)
    leaves = [name.rpartition(".")[2] for name in names] + [fused] * whole
    return rf"{re.escape(parent)}\.{_any_of(leaves)}"


def _any_of(texts: Iterable[str]) -> str:
    escaped = [re.escape(text) for text in texts]
    return escaped[0] if len(escaped) == 1 else f"(?:{'|'.join(escaped)})"


def _layer(name: Name) -> str:
    """The layer number; empty for a module outside the layers."""
    relative = layer_relative(name)
    return name.removesuffix(relative).rstrip(".").rpartition(".")[2] if relative != name else ""


def _layers(layers: set[str], everywhere: set[str]) -> str:
    """A pattern for the numbers of layers, with what stands around it; empty outside the layers."""
    if layers == {""}:
        return ""
    numbers = sorted(layers, key=int)
    return rf"layers\.{_ANY_LAYER if layers == everywhere else _any_of(numbers)}\."


def _rule(
    base: QuantSpec, key: tuple[QuantSpec | Dense, str], children: Sequence[str]
) -> tuple[str, Mapping[str, Any]]:
    spec, where = key
    inner = children[0] if len(children) == 1 else f"(?:{'|'.join(children)})"
    pattern = rf"(?:.*\.)?{where}{inner}$"
    if not isinstance(spec, QuantSpec):
        return f"-:{pattern}", {}
    changed = {k: v for k, v in asdict(spec).items() if v != getattr(base, k)}
    return f"+:{pattern}", changed
