"""The config of AutoRound: other words for the same things, translated into rules.

What decides a module there, first to last: its own name in `extra_config`; whether it is in one of
the blocks that are quantized at all; the first pattern of `extra_config` that is found anywhere in
its name; the fields of the config. A pattern that is found in no block is tried outside them. Words
are those of GPTQ under some of its packing formats, and 5 to 7 bits are one stream there too.
Source: AutoRound 0.16.1, inference/convert_model.py and export/export_to_autoround.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from terrazzo.checkpoint.config_fields import Fields, Reading
from terrazzo.errors import ConfigError, RuleError, UnsupportedError
from terrazzo.rules import Polarity, Rule, RuleSet
from terrazzo.spec import LEGAL_BITS, Name, StreamFormat

METHODS = ("auto-round", "intel/auto-round")

_TRUE_ZEROS = StreamFormat.GPTQ_V2
_MINUS_ONE = StreamFormat.GPTQ
_FORMATS = {
    "auto": _MINUS_ONE,
    "auto_round:auto_gptq": _MINUS_ONE,
    "auto_round:gptq": _MINUS_ONE,
    "auto_round:gptqmodel": _TRUE_ZEROS,
    "auto_round": _TRUE_ZEROS,
}
_KERNELS = frozenset({"exllamav2", "triton", "tritonv2", "torch", "marlin", "cuda"})
"""Releases before `packing_format` wrote the kernel of the day behind the format."""

_BLOCK_FIELDS = ("quant_block_list", "block_name_to_quantize", "to_quant_block_names")
_DENSE_BITS = max(LEGAL_BITS)


def is_autoround(method: str) -> bool:
    return method.lower().replace("_", "-") in METHODS


def read_autoround(fields: Fields, names: Collection[Name]) -> Reading:
    """names: every linear of the folder, because a name there is no pattern.

    Raises ConfigError, RuleError or UnsupportedError naming file and field.
    """
    _check_scheme(fields.source, "the config", fields.fields)
    extra = fields.mapping("extra_config", "an object that maps names or patterns to fields")
    for entry, scheme in extra.items():
        if not isinstance(scheme, Mapping):
            raise fields.illegal(f"extra_config[{entry!r}]", scheme, "an object of fields")
        _check_scheme(fields.source, f"extra_config[{entry!r}]", scheme)
    word_format = _word_format(fields)
    try:
        return Reading(word_format, *_rules(fields, extra, names))
    except RuleError as error:
        raise RuleError(f"{fields.source}: extra_config: {error}") from error


def _rules(
    fields: Fields, extra: Mapping[str, Mapping[str, Any]], names: Collection[Name]
) -> tuple[RuleSet, tuple[str, ...]]:
    """The rules in the order that decides as AutoRound does, and remarks."""
    own = [_rule(e, f"{re.escape(e)}$", scheme) for e, scheme in extra.items() if e in names]
    patterns = [
        _rule(entry, f"(?s:.*?)(?:{entry})", scheme)
        for entry, scheme in extra.items()
        if entry not in names and scheme
    ]
    blocks, remarks = _blocks(fields, names)
    inside = [name for name in names if not blocks.matches(name)]
    found = [any(rule.matches(name) for name in inside) for rule in patterns]
    outside = [rule for rule, is_found in zip(patterns, found, strict=True) if not is_found]
    within = [rule for rule, is_found in zip(patterns, found, strict=True) if is_found]
    base = fields.base()
    outer = (blocks,) if len(inside) < len(names) else ()
    rules = RuleSet(base, (*own, *outside, *outer, *within), lm_head=True)
    for rule in rules.rules:
        rule.apply(base)
    return rules, remarks


def _rule(entry: str, pattern: str, scheme: Mapping[str, Any]) -> Rule:
    said = {field: value for field, value in scheme.items() if value is not None}
    bits = said.get("bits", 0)
    is_dense = isinstance(bits, int) and bits > _DENSE_BITS
    polarity = Polarity.NEGATIVE if is_dense else Polarity.POSITIVE
    return Rule.translated(entry, polarity, pattern, {} if is_dense else said)


def _blocks(fields: Fields, names: Iterable[Name]) -> tuple[Rule, tuple[str, ...]]:
    """The rule that leaves what is in no block dense, and remarks."""
    everywhere = Rule.translated("outside the blocks", Polarity.NEGATIVE, r"(?!.*\.\d+\.)", {})
    field = next((field for field in _BLOCK_FIELDS if fields.has(field)), "")
    if not field:
        return everywhere, ()
    prefixes = _flat(fields, field, fields.value(field, ""))
    if not any(name.startswith(prefixes) for name in names):
        return everywhere, (
            f"{fields.source.name}: {field} is {', '.join(prefixes)}, and no linear is there; "
            "taking it as all blocks",
        )
    pattern = "|".join(re.escape(prefix) for prefix in prefixes)
    return Rule.translated(field, Polarity.NEGATIVE, f"(?!{pattern})", {}), ()


def _flat(fields: Fields, field: str, value: object) -> tuple[str, ...]:
    """Prefixes of names: one text with commas, a list, or a list of lists."""
    if isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if isinstance(value, list):
        return tuple(text for part in value for text in _flat(fields, field, part))
    raise fields.illegal(field, value, "names of blocks: a text, a list, or a list of lists")


def _word_format(fields: Fields) -> StreamFormat:
    spelling = "packing_format" if fields.has("packing_format") else "backend"
    name = str(fields.value(spelling, "auto")).lower()
    parts = name.split(":")
    while len(parts) > 1 and parts[-1] in _KERNELS:
        parts.pop()
    known = _FORMATS.get(":".join(parts))
    if known is None:
        raise UnsupportedError(
            f"{fields.source}: {spelling} is {name!r}, whose words are not those of GPTQ; Terrazzo "
            f"reads {', '.join(_FORMATS)}. Export the model with format 'auto_round:auto_gptq', or "
            "quantize the original model with `terrazzo quantize`"
        )
    return known


def _check_scheme(source: object, where: str, scheme: Mapping[str, Any]) -> None:
    """UnsupportedError for what no integer codes, scales and zero points express."""
    data_type = scheme.get("data_type")
    if data_type is not None and not str(data_type).startswith("int"):
        raise UnsupportedError(
            f"{source}: data_type of {where} is {data_type!r}; Terrazzo reads 'int'. Quantize the "
            "original model to integers, for example with `terrazzo quantize`"
        )
    act_bits = scheme.get("act_bits")
    if act_bits is not None and not isinstance(act_bits, int):
        raise ConfigError(f"{source}: act_bits of {where} is {act_bits!r}; legal is a whole number")
    if act_bits is not None and act_bits <= _DENSE_BITS:
        raise UnsupportedError(
            f"{source}: act_bits of {where} is {act_bits}: inputs are quantized too, which "
            "Terrazzo does not do. Export the model with only its weights quantized (act_bits 16)"
        )
    if scheme.get("rotation_config"):
        raise UnsupportedError(
            f"{source}: rotation_config of {where} is {scheme['rotation_config']!r}: the weights "
            "only make sense for inputs that are rotated too, which Terrazzo does not do. Quantize "
            "without rotation"
        )
