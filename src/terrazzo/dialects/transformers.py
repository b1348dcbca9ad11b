"""transformers 5.24.0 with optimum 2.3.0: one spec for every linear of the layers, and no rules.

Linears under the decoder layers are replaced by quantized ones, all with the fields of the base
config; `modules_in_block_to_quantize` alone can leave some out.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from terrazzo.checkpoint.names import is_quantizable
from terrazzo.checkpoint.zero_points import ZeroReading
from terrazzo.dialects.autoround import is_autoround_config, read_elsewhere
from terrazzo.dialects.gptqmodel import GROUP_SIZES
from terrazzo.dialects.layouts import fusion_of
from terrazzo.dialects.lookup import typed_spec
from terrazzo.dialects.prediction import CONFIG, Finding, Refusal, refuses, silently_wrong
from terrazzo.dialects.subject import WORD_TYPE, Linear, Subject
from terrazzo.dialects.units import EXPERTS
from terrazzo.spec import Dense, Format, QuantSpec
from terrazzo.spellings import HEADS

BITS = (2, 3, 4, 8)
_NEW = "it is built dense and newly initialized; its packed tensors are left over"


def findings(subject: Subject) -> Iterator[Finding]:
    fields = subject.outer
    if is_autoround_config(subject):
        yield from read_elsewhere(" (with the package auto-round)")
        return
    if not fields:
        names = [linear.name for linear in subject.linears if isinstance(linear.spec, QuantSpec)]
        yield from silently_wrong(names, f"config.json has no quantization_config: {_NEW}")
        return
    try:
        base = typed_spec(QuantSpec(), fields)
        if "bits" not in fields or base.bits not in BITS:
            raise Refusal(f"ValueError: Only support quantization to [2,3,4,8] bits, not {base}")
        if base.group_size not in GROUP_SIZES:
            raise Refusal(f"NotImplementedError: no kernel has group_size {base.group_size}")
    except Refusal as refusal:
        yield from refuses([CONFIG], str(refusal))
        return
    for linear in subject.linears:
        try:
            yield from _linear(subject, base, linear)
        except Refusal as refusal:
            yield from refuses([linear.name], str(refusal))


def is_replaced(fields: Any, name: str) -> bool:
    """Whether optimum puts a quantized linear in place of this one."""
    if name in HEADS or not is_quantizable(name):
        return False
    kept = fields.get("modules_in_block_to_quantize")
    return kept is None or any(name.endswith(entry) for entry in chain.from_iterable(kept))


def _linear(subject: Subject, base: QuantSpec, linear: Linear) -> Iterator[Finding]:
    if EXPERTS in linear.name.split(".") and isinstance(linear.spec, QuantSpec):
        yield from silently_wrong(
            [linear.name],
            "the experts of a layer are one dense tensor there: packed ones are left over, and "
            "where some are dense, the rest cannot be stacked",
        )
        return
    whole = fusion_of("transformers", subject.architecture, linear.leaf)
    if whole:
        yield from silently_wrong(
            [linear.name], f"the class has one {whole}: parts are left over, and it stays unset"
        )
        return
    replaced = is_replaced(subject.embedded, linear.name)
    if isinstance(linear.spec, Dense):
        if replaced:
            yield from silently_wrong(
                [linear.name], "it is built quantized, whatever rules say, and its weight not read"
            )
        return
    if not replaced:
        yield from silently_wrong([linear.name], _NEW)
        return
    groups = linear.spec.num_groups(linear.in_features)
    if base.bits != linear.spec.bits or base.num_groups(linear.in_features) != groups:
        raise Refusal(f"shapes differ: {linear.spec} on disk, {base} by config; rules are ignored")
    said = (subject.outer.get("meta") or {}).get("pack_dtype", WORD_TYPE)
    if said != linear.word_type:
        raise Refusal(
            f"shapes differ: words of {linear.word_type} on disk, {said} by meta.pack_dtype, the "
            "only place that is looked at"
        )
    yield from _meaning(subject, base, linear, linear.spec)


def _meaning(
    subject: Subject, base: QuantSpec, linear: Linear, held: QuantSpec
) -> Iterator[Finding]:
    if linear.zeros is ZeroReading.MIDDLE:
        yield from silently_wrong(
            [linear.name], "its zero points are stored otherwise than checkpoint_format says"
        )
    if held.bits == 3 and subject.label is Format.GPTQ_P:
        yield from silently_wrong([linear.name], "bit planes of 3-bit codes are read as a stream")
    if (held.desc_act and not base.desc_act) or (base.sym and not held.sym):
        yield from silently_wrong(
            [linear.name], f"it is {held}, the config says {base}: kernels that trust it go wrong"
        )
