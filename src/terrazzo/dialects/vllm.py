"""vLLM 0.33.0: config.json alone, rules by the `regex` module, one question for each fused unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import regex

from terrazzo.dialects.autoround import is_autoround_config, read_elsewhere
from terrazzo.dialects.layouts import ONE_IN_VLLM
from terrazzo.dialects.lookup import SKIP, Skip, base_spec, overridden
from terrazzo.dialects.marlin import (
    check_group,
    check_head,
    check_type,
    check_widths,
    check_words,
    disk_rows,
    group_rows,
    ignored_tensors,
)
from terrazzo.dialects.prediction import CONFIG, Finding, Refusal, refuses, silently_wrong
from terrazzo.dialects.subject import Linear, Subject
from terrazzo.dialects.units import FUSIONS, Role, Unit, units_of
from terrazzo.rules import LM_HEAD
from terrazzo.spec import PER_CHANNEL, Name, QuantSpec

_MOE_STEP = 128
_NO_PARAMETER = "ValueError: There is no module or parameter named '{}'"


def matches(pattern: str, name: Name) -> bool:
    try:
        return regex.match(pattern, name) is not None
    except regex.error as error:
        raise Refusal(f"regex.error for the pattern {pattern!r}: {error}") from error


def findings(subject: Subject) -> Iterator[Finding]:
    fields = subject.embedded
    if is_autoround_config(subject):
        yield from read_elsewhere()
        return
    if not fields:
        names = [linear.name for linear in subject.linears if isinstance(linear.spec, QuantSpec)]
        reason = _NO_PARAMETER.format("...qweight") + ": config.json has no quantization_config"
        yield from refuses(names, reason)
        return
    try:
        base = base_spec(fields)
        _check_act_order(base, fields.get("dynamic") or {})
        check_type(base)
    except Refusal as refusal:
        yield from refuses([CONFIG], str(refusal))
        return
    for unit in units_of(subject.linears):
        try:
            yield from _unit(subject, base, unit)
        except Refusal as refusal:
            yield from refuses(unit.names, str(refusal))


def _check_act_order(base: QuantSpec, dynamic: Mapping[str, Any]) -> None:
    """The flag alone is refused, in the base config and in a rule, whether that matches or not."""
    refused = "GPTQ group activation ordering (desc_act=True) is no longer supported"
    if base.desc_act and base.group_size != PER_CHANNEL:
        raise Refusal(refused)
    for key, fields in dynamic.items():
        if key.startswith("-:") or not isinstance(fields, Mapping):
            continue
        group = fields.get("group_size", base.group_size)
        if fields.get("desc_act", base.desc_act) and group != PER_CHANNEL:
            raise Refusal(f"{refused}, but is enabled by dynamic rule {key!r}")


def _unit(subject: Subject, base: QuantSpec, unit: Unit) -> Iterator[Finding]:
    dynamic, asked = subject.embedded.get("dynamic") or {}, _prefix(subject, unit.asked)
    if unit.role is Role.EXPERTS:
        yield from _experts(base, unit, overridden(base, dynamic, asked, matches))
        return
    spec: QuantSpec | Skip = SKIP
    is_switched_on = unit.role is not Role.HEAD or subject.embedded.get(LM_HEAD)
    if is_switched_on and not unit.is_always_dense and _is_listed(subject, unit):
        spec = overridden(base, dynamic, asked, matches)
    if not isinstance(spec, QuantSpec):
        if unit.quantized:
            raise Refusal(_NO_PARAMETER.format(f"{unit.asked}.qweight"))
        return
    if len(unit.quantized) < len(unit.shards):
        raise Refusal(_NO_PARAMETER.format(f"{unit.asked}.weight"))
    if unit.role is Role.HEAD and subject.ties_head:
        yield from silently_wrong(unit.names, "the head is tied, so its tensors are not read")
        return
    check_words(unit)
    check_type(spec)
    check_group(spec)
    check_head(unit)
    for shard in unit.shards:
        _check_divides(spec, shard)
        check_widths(spec, shard)
        yield from _groups(spec, unit, shard)
    yield from ignored_tensors(spec, unit)


def _check_divides(spec: QuantSpec, shard: Linear) -> None:
    group = spec.group_of(shard.in_features)
    if group < shard.in_features and shard.in_features % group:
        raise Refusal(
            "Failed to find a kernel: in_features per partition "
            f"{shard.in_features} is not divisible by group_size = {group}"
        )


def _groups(spec: QuantSpec, unit: Unit, shard: Linear) -> Iterator[Finding]:
    disk, expected = disk_rows(shard), group_rows(spec, shard.in_features)
    if unit.role is Role.ROW and disk > expected:
        yield from silently_wrong(
            [shard.name],
            f"{disk} groups on disk are cut to the first {expected} without a check of the shape",
        )
    elif disk != expected:
        raise Refusal(
            f"AssertionError on shapes: {shard.leaf} has {disk} groups on disk, {expected} by "
            f"config and rules as asked for {unit.asked!r}"
        )


def _experts(base: QuantSpec, unit: Unit, spec: QuantSpec | Skip) -> Iterator[Finding]:
    """One config for all experts of a layer; tensors never decide whether they are quantized."""
    if not isinstance(spec, QuantSpec):
        if unit.quantized:
            raise Refusal(f"KeyError: {unit.asked}.w2_qweight: the rules leave the experts dense")
        return
    if len(unit.quantized) < len(unit.shards):
        raise Refusal(f"KeyError: {unit.asked}.w2_weight: some or all experts are dense on disk")
    if not _marlin_runs_experts(base, unit):
        # The other kernel for experts is built from the config as it stands, without its rules.
        spec = base
    check_words(unit)
    check_type(spec)
    check_group(spec)
    for shard in unit.quantized:
        assert isinstance(shard.spec, QuantSpec)
        disk, expected = disk_rows(shard), group_rows(spec, shard.in_features)
        if shard.spec.bits > spec.bits or disk > expected:
            raise Refusal(
                f"shapes differ: {shard.leaf} is {shard.spec} on disk, {spec} by config and "
                f"rules as asked for {unit.asked!r}"
            )
        if shard.spec.bits < spec.bits or disk < expected:
            yield from silently_wrong(
                [shard.name],
                f"{shard.spec} on disk fills only a part of what is allocated for {spec}",
            )
    yield from ignored_tensors(spec, unit)


def _marlin_runs_experts(base: QuantSpec, unit: Unit) -> bool:
    sizes = {shard.name.rpartition(".")[2]: shard.in_features for shard in unit.shards}
    inner = sizes.get("down_proj", sizes.get("w2", _MOE_STEP))
    hidden = sizes.get("gate_proj", sizes.get("w1", _MOE_STEP))
    return hidden % _MOE_STEP == 0 and inner % base.group_of(inner) == 0


def _is_listed(subject: Subject, unit: Unit) -> bool:
    """Whether the unit is among the quantized modules: of the config's list, else of the tensors.

    Refusal where only some shards are. Entries are looked for anywhere in the name.
    """
    listed = _flat(subject.embedded.get("modules_in_block_to_quantize") or [])
    if not listed:
        listed = [linear.name for linear in subject.linears if isinstance(linear.spec, QuantSpec)]
    answers = {any(entry in name for entry in listed) for name in _looked_for(subject, unit)}
    if len(answers) > 1:
        raise Refusal(f"ValueError: Detected some but not all shards of {unit.asked} are quantized")
    return answers == {True} or not listed


def _looked_for(subject: Subject, unit: Unit) -> list[Name]:
    """A fusion is looked for by its parts, even where it is one tensor on disk."""
    parent, _, leaf = unit.asked.rpartition(".")
    if leaf not in FUSIONS or subject.architecture in ONE_IN_VLLM:
        return [unit.asked]
    return [f"{parent}.{part}" for part in FUSIONS[leaf]]


def _flat(entries: Any) -> list[str]:
    if not isinstance(entries, list):
        return [str(entries)]
    return [name for entry in entries for name in _flat(entry)]


def _prefix(subject: Subject, asked: Name) -> Name:
    """Vision-language models have other module names in vLLM than on disk."""
    old, new = "model.language_model.", "language_model.model."
    if asked.startswith(old):
        return new + asked.removeprefix(old)
    nested = any(linear.name.startswith(old) for linear in subject.linears)
    return f"language_model.{LM_HEAD}" if nested and asked == LM_HEAD else asked
