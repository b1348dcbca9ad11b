"""GPTQModel 7.7.0: the inventor of the rules, whose semantics are those of `terrazzo.rules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from terrazzo.checkpoint.names import is_quantizable
from terrazzo.checkpoint.zero_points import ZeroReading
from terrazzo.dialects.autoround import is_autoround_config
from terrazzo.dialects.layouts import fusion_of
from terrazzo.dialects.prediction import CONFIG, Finding, Refusal, refuses, silently_wrong
from terrazzo.dialects.subject import WORD_TYPE, Linear, Subject
from terrazzo.rules import Resolution, Rule
from terrazzo.spec import PER_CHANNEL, Dense, Format, QuantSpec
from terrazzo.spellings import HEADS

GROUP_SIZES = (PER_CHANNEL, 16, 32, 64, 128, 256, 512, 1024)
WORD_TYPES = ("int8", "int16", "int32")
_PACK_DTYPE = "pack_dtype"
_TRUSTED = "gptqmodel"
_SPLIT_WHEN_LOADED = "gate_up_proj"


def findings(subject: Subject) -> Iterator[Finding]:
    fields = subject.separate or subject.outer
    try:
        _check_config(subject, fields)
    except Refusal as refusal:
        yield from refuses([CONFIG], str(refusal))
        return
    for linear in subject.linears:
        said = subject.rules.resolve_name(linear.name)
        try:
            yield from _linear(subject, linear, said)
            _check_words(fields, linear, said)
        except Refusal as refusal:
            yield from refuses([linear.name], str(refusal))


def _check_config(subject: Subject, fields: Mapping[str, Any]) -> None:
    if not fields:
        raise Refusal("there is no quantize_config.json and no quantization_config")
    if is_autoround_config(subject):
        raise Refusal("ValueError: quant_method is not one of its own")
    if "is_marlin_format" in fields:
        raise Refusal("ValueError: `is_marlin_format` is no longer supported")
    for key, value in (fields.get("dynamic") or {}).items():
        if not isinstance(value, Mapping):
            raise Refusal(f"the rule {key!r} has the value {value!r}, which is no object")
    base = subject.rules.base
    if not base.sym and subject.label is Format.GPTQ and not _is_trusted(fields):
        raise Refusal(
            "ValueError: sym=False with format gptq is read only if meta.quantizer names gptqmodel"
        )


def _is_trusted(fields: Mapping[str, Any]) -> bool:
    quantizer = (fields.get("meta") or {}).get("quantizer") or []
    names = quantizer if isinstance(quantizer, list) else [quantizer]
    return any(str(name).startswith(f"{_TRUSTED}:") for name in names)


def _linear(subject: Subject, linear: Linear, said: Resolution) -> Iterator[Finding]:
    if isinstance(linear.spec, Dense):
        if isinstance(said.spec, QuantSpec) and is_quantizable(linear.name):
            raise Refusal("ValueError: Missing required quantized weights in checkpoint")
        return
    if linear.name.endswith(_SPLIT_WHEN_LOADED):
        raise Refusal("ValueError: Missing required quantized weights: it looks for gate and up")
    whole = fusion_of("gptqmodel", subject.architecture, linear.leaf)
    if whole:
        raise Refusal(f"ValueError: Missing required quantized weights: it looks for {whole}")
    spec = said.spec
    if linear.name in HEADS and isinstance(spec, Dense) and not subject.rules.lm_head:
        return
    if isinstance(spec, Dense):
        yield from silently_wrong(
            [linear.name], f"{said.decided_by} leaves it dense, and its packed tensors are not read"
        )
        return
    _check_group(spec, linear.in_features)
    groups = linear.spec.num_groups(linear.in_features)
    if spec.bits != linear.spec.bits or spec.num_groups(linear.in_features) != groups:
        raise Refusal(f"shapes differ: {linear.spec} on disk, {spec} by {said.decided_by}")
    yield from _meaning(spec, linear, linear.spec)


def _check_words(fields: Mapping[str, Any], linear: Linear, said: Resolution) -> None:
    """Its kernels read words of 8, 16 and 32 bits, of the type that the config names."""
    if not isinstance(linear.spec, QuantSpec):
        return
    claim = str(fields.get(_PACK_DTYPE, WORD_TYPE))
    if isinstance(said.decided_by, Rule) and _PACK_DTYPE in said.decided_by.options:
        raise Refusal(
            f"NotImplementedError: rule {said.decided_by} names a pack_dtype, and the text in a "
            "rule is never turned into a type"
        )
    if claim != linear.word_type:
        raise Refusal(f"shapes differ: words of {linear.word_type} on disk, {claim} by config")
    if claim not in WORD_TYPES:
        raise Refusal(f"no kernel reads words of {claim}; they read {', '.join(WORD_TYPES)}")


def _check_group(spec: QuantSpec, in_features: int) -> None:
    if spec.group_size not in (*GROUP_SIZES, in_features):
        legal = ", ".join(map(str, GROUP_SIZES))
        raise Refusal(f"no kernel has group_size {spec.group_size}; they have {legal}")


def _meaning(spec: QuantSpec, linear: Linear, held: QuantSpec) -> Iterator[Finding]:
    """Shapes agree; the words may still be read as other numbers."""
    if linear.zeros is ZeroReading.MIDDLE:
        yield from silently_wrong(
            [linear.name], "its zero points are stored otherwise than checkpoint_format says"
        )
    if held.desc_act and not spec.desc_act:
        yield from silently_wrong(
            [linear.name], "desc_act is false: its Torch kernel reads g_idx, but Marlin does not"
        )
    if spec.sym and not held.sym:
        yield from silently_wrong(
            [linear.name], "sym is true: its Torch kernel reads zero points, but Marlin does not"
        )
