"""SGLang 0.5.23 on CUDA: config.json alone, rules by Python's `re`, and loaders that skip names.

Nothing there checks that every parameter was filled or every tensor used, so most of what vLLM
refuses goes wrong without a word. Experts never see a rule.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator

from terrazzo.checkpoint.experts import in_older_spelling
from terrazzo.dialects.autoround import is_autoround_config, read_elsewhere
from terrazzo.dialects.layouts import MIXTRAL
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
from terrazzo.dialects.subject import SEQUENTIAL, Linear, Subject
from terrazzo.dialects.units import Role, Unit, units_of
from terrazzo.rules import LM_HEAD
from terrazzo.spec import Dense, Name, QuantSpec

_TILES = ((64, 128), (128, 64))
"""Marlin multiplies weights whose (outputs, inputs) are multiples of one of these pairs."""

_SKIPPED = "the loader skips tensors whose names it does not know, and the weight stays unset"


def matches(pattern: str, name: Name) -> bool:
    try:
        with warnings.catch_warnings():
            # `[[:digit:]]` means something else to `re`, which says so once and goes on.
            warnings.simplefilter("ignore", FutureWarning)
            return re.match(pattern, name) is not None
    except re.error as error:
        raise Refusal(f"re.error for the pattern {pattern!r}: {error}") from error


def findings(subject: Subject) -> Iterator[Finding]:
    fields = subject.embedded
    if is_autoround_config(subject):
        yield from read_elsewhere()
        return
    if not fields:
        names = [linear.name for linear in subject.linears if isinstance(linear.spec, QuantSpec)]
        yield from silently_wrong(
            names, f"config.json has no quantization_config: it is built dense, and {_SKIPPED}"
        )
        return
    try:
        base = base_spec(fields)
        check_type(base)
        check_group(base)
    except Refusal as refusal:
        yield from refuses([CONFIG], f"Unknown quantization method: gptq ({refusal})")
        return
    for unit in units_of(subject.linears):
        try:
            yield from _unit(subject, base, unit)
        except Refusal as refusal:
            yield from refuses(unit.names, str(refusal))


def _unit(subject: Subject, base: QuantSpec, unit: Unit) -> Iterator[Finding]:
    if unit.role is Role.EXPERTS:
        if subject.architecture == MIXTRAL and in_older_spelling(unit.names[0]) != unit.names[0]:
            reason = f"the class has block_sparse_moe.experts.N.w1 and so on: {_SKIPPED}"
            yield from silently_wrong(unit.names, reason)
            return
        yield from _experts(base, unit)
        return
    spec: QuantSpec | Skip = SKIP
    is_switched_on = unit.role is not Role.HEAD or subject.embedded.get(LM_HEAD)
    if is_switched_on and not unit.is_always_dense:
        spec = overridden(base, subject.embedded.get("dynamic") or {}, unit.asked, matches)
    if not isinstance(spec, QuantSpec):
        names = [shard.name for shard in unit.quantized]
        yield from silently_wrong(names, f"{unit.asked} is built dense: {_SKIPPED}")
        return
    dense = [shard.name for shard in unit.shards if isinstance(shard.spec, Dense)]
    if dense:
        yield from silently_wrong(dense, f"{unit.asked} is built quantized: {_SKIPPED}")
        return
    if unit.role is Role.HEAD and subject.ties_head:
        yield from silently_wrong(unit.names, "the head is tied, so its tensors are not read")
        return
    yield from _quantized(spec, unit)


def _quantized(spec: QuantSpec, unit: Unit) -> Iterator[Finding]:
    check_words(unit)
    check_type(spec)
    check_group(spec)
    check_head(unit)
    for shard in unit.shards:
        check_widths(spec, shard)
        yield from _groups(spec, unit, shard)
    _check_tiles(unit)
    yield from _orders(spec, unit)
    yield from ignored_tensors(spec, unit)


def _groups(spec: QuantSpec, unit: Unit, shard: Linear) -> Iterator[Finding]:
    disk, expected = disk_rows(shard), group_rows(spec, shard.in_features)
    uneven = shard.in_features % spec.group_of(shard.in_features) != 0
    if disk != expected and unit.role is Role.ROW:
        change = "cut to" if disk > expected else "filled with zeros to"
        yield from silently_wrong([shard.name], f"{disk} groups on disk are {change} {expected}")
    elif disk != expected:
        raise Refusal(
            f"AssertionError on shapes: {shard.leaf} has {disk} groups on disk, {expected} by "
            f"config and rules as asked for {unit.asked!r}"
        )
    elif uneven and expected > 1:
        raise Refusal(f"{shard.in_features} inputs are not divisible by {spec.group_size}")


def _check_tiles(unit: Unit) -> None:
    out_features = sum(shard.out_features for shard in unit.shards)
    in_features = unit.shards[0].in_features
    if not any(out_features % n == 0 and in_features % k == 0 for n, k in _TILES):
        raise Refusal(
            f"Marlin has no tile for {out_features} outputs of {in_features} inputs, and the "
            "check of that has no effect: the kernel fails"
        )


def _orders(spec: QuantSpec, unit: Unit) -> Iterator[Finding]:
    orders = {shard.order for shard in unit.shards}
    if spec.desc_act and len(orders) > 1:
        yield from silently_wrong(
            unit.names, f"{unit.asked} keeps one g_idx, that of the last shard, and they differ"
        )


def _experts(base: QuantSpec, unit: Unit) -> Iterator[Finding]:
    check_words(unit)
    for shard in unit.shards:
        if isinstance(shard.spec, Dense):
            yield from silently_wrong(
                [shard.name], f"experts are always built quantized, whatever rules say: {_SKIPPED}"
            )
            continue
        rows = disk_rows(shard), group_rows(base, shard.in_features)
        if shard.spec.bits != base.bits or rows[0] != rows[1]:
            raise Refusal(
                f"shapes differ: {shard.spec} on disk, {base} by config; rules are not asked"
            )
        if shard.order != SEQUENTIAL:
            raise Refusal("act-order in experts: scales of the wrong size")
    yield from ignored_tensors(base, unit)
