"""The quantization config of a folder, in every documented spelling, as one typed value.

Three places may hold it. `quantize_config.json` keeps the order in which rules were applied, while
transformers sorts the one inside `config.json`; so the separate file is read first, and where
places differ in more than order the difference is kept for the reader to report. In `config.json`
it is at the top, or in the config of the text tower.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.autoround import METHODS as AUTOROUND_METHODS
from terrazzo.checkpoint.autoround import is_autoround, read_autoround
from terrazzo.checkpoint.config_fields import Fields, Reading
from terrazzo.checkpoint.json_files import read_json
from terrazzo.checkpoint.small_files import is_present
from terrazzo.errors import ConfigError, UnsupportedError
from terrazzo.packing import PLANAR_ONLY_BITS
from terrazzo.rules import LM_HEAD, Polarity, Rule, RuleSet
from terrazzo.spec import Format, Name, WordFormat

SEPARATE_FILES = ("quantize_config.json", "quant_config.json")
EMBEDDED_KEY = "quantization_config"
TEXT_KEY = "text_config"

_FOREIGN_FORMATS = {
    "marlin": "its words are in the order of one GPU kernel",
    "bitblas": "its words are in the order of one GPU kernel",
}
_QUANTIZED_LIST = "modules_in_block_to_quantize"
_COMPARED = (
    *("bits", "group_size", "sym", "desc_act", "lm_head", "format", "dynamic"),
    *("pack_dtype", "packing_format", "extra_config"),
)


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """What a config says about quantization; the tensors have the last word.

    source: the file it was read from. word_format: how words are read. pack_dtype: integer type of
    the words. quantizers: `name:version` of the tools that made it. remarks: sentences on what the
    second config file contradicts, and on fields that say nothing.
    """

    source: Path
    word_format: WordFormat
    rules: RuleSet
    pack_dtype: str
    quantizers: tuple[str, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The folder holds an ordinary Hugging Face model."""

    rules: RuleSet = field(default_factory=RuleSet)
    word_format: WordFormat = Format.GPTQ
    pack_dtype: str = "int32"
    quantizers: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def read_quantization_config(
    folder: Path, model_config: Mapping[str, Any], names: Collection[Name]
) -> QuantizationConfig | Unquantized:
    """names: every linear of the folder. Raises ConfigError, RuleError or UnsupportedError naming
    file and field.
    """
    found = _found(folder, model_config)
    if not found:
        return Unquantized()
    first = found[0]
    reading = _read(first, names)
    differences = tuple(
        difference for other in found[1:] for difference in _differences(first, other)
    )
    return QuantizationConfig(
        first.source,
        reading.word_format,
        reading.rules,
        first.pack_dtype(),
        first.quantizers(),
        (*differences, *reading.remarks),
    )


def embedded_config(model_config: Mapping[str, Any]) -> object:
    """The quantization config inside config.json; None where there is none."""
    text_config = model_config.get(TEXT_KEY)
    inner = text_config.get(EMBEDDED_KEY) if isinstance(text_config, Mapping) else None
    outer = model_config.get(EMBEDDED_KEY)
    return inner if outer is None else outer


def _found(folder: Path, model_config: Mapping[str, Any]) -> list[Fields]:
    """Every quantization config of the folder, the one to believe first."""
    separate = [folder / name for name in SEPARATE_FILES if is_present(folder / name)]
    found = [Fields(path, read_json(path)) for path in separate[:1]]
    embedded = embedded_config(model_config)
    if embedded is None:
        return found
    path = folder / "config.json"
    if not isinstance(embedded, Mapping):
        raise ConfigError(f"{path}: {EMBEDDED_KEY} is {embedded!r}; legal is an object")
    return [*found, Fields(path, embedded)]


def _read(fields: Fields, names: Collection[Name]) -> Reading:
    method = str(fields.value("method", "gptq")).lower()
    if is_autoround(method):
        return read_autoround(fields, names)
    if method not in ("gptq", *_FOREIGN_FORMATS):
        raise UnsupportedError(
            f"{fields.source}: quant_method is {method!r}; Terrazzo reads 'gptq' and "
            f"{' and '.join(map(repr, AUTOROUND_METHODS))}. Quantize the original model with "
            "`terrazzo quantize`, or export it in GPTQ format"
        )
    if method in _FOREIGN_FORMATS or fields.flag("is_marlin_format", False):
        raise _foreign(fields, "marlin" if method == "gptq" else method)
    rules = _rules(fields, names)
    _check_rotation(fields)
    return Reading(_promoted(_format(fields), rules), rules, _input_remarks(fields))


def _rules(fields: Fields, names: Collection[Name]) -> RuleSet:
    dynamic = fields.mapping("dynamic", "an object that maps patterns to fields")
    base, lm_head = fields.base(), fields.flag("lm_head", False)
    listed = [rule for rule in _listed(fields) if any(rule.matches(name) for name in names)]
    try:
        rules = RuleSet.parse(dynamic, base, lm_head=lm_head)
    except ConfigError as error:
        raise type(error)(f"{fields.source}: {error}") from error
    return RuleSet(base, (*rules.rules, *listed), lm_head)


def _listed(fields: Fields) -> tuple[Rule, ...]:
    """optimum and AutoRound list the linears of a block that are quantized, by the ends of their
    names; the others are dense unless a rule of `dynamic` says otherwise.
    """
    value = fields.value(_QUANTIZED_LIST, [])
    parts = value if isinstance(value, list) else [value]
    ends = [end for part in parts for end in (part if isinstance(part, list) else [part])]
    if not all(isinstance(end, str) for end in ends):
        raise fields.illegal(_QUANTIZED_LIST, value, "a list of names, or of lists of names")
    if not ends:
        return ()
    names = "|".join(re.escape(end) for end in ends)
    pattern = rf"(?!{LM_HEAD}$)(?!.*(?:{names})$)"
    return (Rule.translated(_QUANTIZED_LIST, Polarity.NEGATIVE, pattern, {}),)


def _check_rotation(fields: Fields) -> None:
    rotation = fields.value("rotation", None)
    if rotation is not None:
        raise UnsupportedError(
            f"{fields.source}: rotation is {rotation!r}: the weights only make sense for inputs "
            "that are rotated too, which Terrazzo does not do. Quantize without rotation"
        )


def _input_remarks(fields: Fields) -> tuple[str, ...]:
    """GPTQModel may round inputs to fewer bits when it runs a model; the weights are the same."""
    activation = fields.value("activation", None)
    if activation is None:
        return ()
    return (
        f"{fields.source.name}: activation is {activation!r}, which rounds the inputs of linears; "
        "Terrazzo keeps them as they are, which is more exact",
    )


def _format(fields: Fields) -> Format:
    name = str(fields.value("format", Format.GPTQ.value)).lower()
    if name in _FOREIGN_FORMATS:
        raise _foreign(fields, name)
    try:
        return Format(name)
    except ValueError as error:
        legal = ", ".join(legal.value for legal in Format)
        raise UnsupportedError(
            f"{fields.source}: checkpoint_format is {name!r}; Terrazzo reads {legal}. Export "
            "the model in one of these"
        ) from error


def _foreign(fields: Fields, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{fields.source}: the checkpoint is in {name} format: {_FOREIGN_FORMATS[name]}. Use "
        "the gptq checkpoint it was made from, or quantize the model again"
    )


def _promoted(label: Format, rules: RuleSet) -> Format:
    """GPTQModel treats a whole checkpoint as planar when any rule, even an idle one, asks for a
    width that exists only in planes.
    """
    asked = [rules.base.bits]
    asked += [rule.override["bits"] for rule in rules.rules if "bits" in rule.override]
    return label if PLANAR_ONLY_BITS.isdisjoint(asked) else Format.GPTQ_P


def _differences(first: Fields, second: Fields) -> list[str]:
    """Sentences on fields that both files have with unequal values."""
    source, fields = first.source, first.fields
    other, other_fields = second.source, second.fields
    shared = [
        field
        for field in _COMPARED
        if fields.get(field) is not None and other_fields.get(field) is not None
    ]
    sentences = [
        f"{field} is {fields[field]!r} in {source.name} and {other_fields[field]!r} in "
        f"{other.name}; using {source.name}"
        for field in shared
        if fields[field] != other_fields[field]
    ]
    if "dynamic" in shared and fields["dynamic"] == other_fields["dynamic"]:
        sentences += _order_difference(source, fields["dynamic"], other, other_fields["dynamic"])
    return sentences


def _order_difference(
    source: Path, dynamic: Mapping[str, Any], other: Path, other_dynamic: Mapping[str, Any]
) -> list[str]:
    def tried(keys: Mapping[str, Any]) -> list[str]:
        return sorted(keys, key=lambda key: not key.startswith("-"))

    if tried(dynamic) == tried(other_dynamic):
        return []
    return [
        f"dynamic has its rules in another order in {other.name} than in {source.name}, and the "
        f"first match decides; using {source.name}"
    ]
