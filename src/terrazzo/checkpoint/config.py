"""The quantization config of a folder, in every documented spelling, as one typed value.

Two files may hold it. `quantize_config.json` keeps the order in which rules were applied, while
transformers sorts the one inside `config.json`; so the separate file is read first, and where the
two differ in more than order the difference is kept for the reader to report.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.json_files import read_json
from terrazzo.errors import ConfigError, UnsupportedError
from terrazzo.packing import PLANAR_ONLY_BITS
from terrazzo.rules import RuleSet
from terrazzo.spec import DEFAULT_SPEC, Format, QuantSpec

SEPARATE_FILES = ("quantize_config.json", "quant_config.json")
EMBEDDED_KEY = "quantization_config"

_ALIASES = {
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "method": ("quant_method", "method"),
    "format": ("format", "checkpoint_format", "version"),
}
"""Field -> its spellings, the one that wins first (GPTQModel reads `format` before the alias)."""

_METHODS = ("gptq",)
_FOREIGN_FORMATS = {
    "marlin": "its words are in the order of one GPU kernel",
    "bitblas": "its words are in the order of one GPU kernel",
}


@dataclass(frozen=True, slots=True)
class QuantizationConfig:
    """What a config says about quantization; the tensors have the last word.

    source: the file it was read from. pack_dtype: integer type of the words.
    differences: fields on which the second config file disagrees, as sentences.
    """

    source: Path
    checkpoint_format: Format
    rules: RuleSet
    pack_dtype: str
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Unquantized:
    """The folder holds an ordinary Hugging Face model."""

    @property
    def rules(self) -> RuleSet:
        return RuleSet()

    @property
    def checkpoint_format(self) -> Format:
        return Format.GPTQ

    @property
    def differences(self) -> tuple[str, ...]:
        return ()


def read_quantization_config(
    folder: Path, model_config: Mapping[str, Any]
) -> QuantizationConfig | Unquantized:
    """Raises ConfigError, RuleError or UnsupportedError naming file and field."""
    found = _found(folder, model_config)
    if not found:
        return Unquantized()
    source, fields = found[0]
    differences = tuple(
        difference
        for other, other_fields in found[1:]
        for difference in _differences(source, fields, other, other_fields)
    )
    return _Fields(source, fields).config(differences)


def _found(folder: Path, model_config: Mapping[str, Any]) -> list[tuple[Path, Mapping[str, Any]]]:
    """Every quantization config of the folder, the one to believe first."""
    separate = [folder / name for name in SEPARATE_FILES if (folder / name).is_file()]
    found: list[tuple[Path, Mapping[str, Any]]] = [(path, read_json(path)) for path in separate[:1]]
    embedded = model_config.get(EMBEDDED_KEY)
    if embedded is None:
        return found
    path = folder / "config.json"
    if not isinstance(embedded, Mapping):
        raise ConfigError(f"{path}: {EMBEDDED_KEY} is {embedded!r}; legal is an object")
    return [*found, (path, embedded)]


@dataclass(frozen=True, slots=True)
class _Fields:
    """One config object with the file to blame."""

    source: Path
    fields: Mapping[str, Any]

    def config(self, differences: tuple[str, ...]) -> QuantizationConfig:
        self._check_method()
        base = self._base()
        dynamic = self._value("dynamic", {})
        if not isinstance(dynamic, Mapping):
            raise self._illegal("dynamic", dynamic, "an object that maps patterns to fields")
        try:
            rules = RuleSet.parse(dynamic, base, lm_head=self._flag("lm_head", False))
        except ConfigError as error:
            raise type(error)(f"{self.source}: {error}") from error
        self._check_rotation()
        return QuantizationConfig(
            self.source, _promoted(self._format(), rules), rules, self._pack_dtype(), differences
        )

    def _base(self) -> QuantSpec:
        sym = self._flag("sym", DEFAULT_SPEC.sym)
        if "sym" not in self.fields and "zero_point" in self.fields:
            sym = not self._flag("zero_point", False)
        try:
            return QuantSpec(
                bits=self._number("bits", DEFAULT_SPEC.bits),
                group_size=self._number("group_size", DEFAULT_SPEC.group_size),
                sym=sym,
                desc_act=self._flag("desc_act", DEFAULT_SPEC.desc_act),
            )
        except ConfigError as error:
            raise ConfigError(f"{self.source}: {error}") from error

    def _check_method(self) -> None:
        method = str(self._value("method", "gptq")).lower()
        if method not in (*_METHODS, *_FOREIGN_FORMATS):
            raise UnsupportedError(
                f"{self.source}: quant_method is {method!r}; Terrazzo reads 'gptq'. Quantize the "
                "original model with `terrazzo quantize`, or export it in GPTQ format"
            )
        if method in _FOREIGN_FORMATS or self._flag("is_marlin_format", False):
            raise self._foreign("marlin" if method == "gptq" else method)

    def _check_rotation(self) -> None:
        rotation = self._value("rotation", None)
        if rotation is not None:
            raise UnsupportedError(
                f"{self.source}: rotation is {rotation!r}: the weights only make sense for inputs "
                "that are rotated too, which Terrazzo does not do. Quantize without rotation"
            )

    def _format(self) -> Format:
        name = str(self._value("format", Format.GPTQ.value)).lower()
        if name in _FOREIGN_FORMATS:
            raise self._foreign(name)
        try:
            return Format(name)
        except ValueError as error:
            legal = ", ".join(legal.value for legal in Format)
            raise UnsupportedError(
                f"{self.source}: checkpoint_format is {name!r}; Terrazzo reads {legal}. Export "
                "the model in one of these"
            ) from error

    def _foreign(self, name: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.source}: the checkpoint is in {name} format: {_FOREIGN_FORMATS[name]}. Use "
            "the gptq checkpoint it was made from, or quantize the model again"
        )

    def _pack_dtype(self) -> str:
        value = self._value("pack_dtype", "int32")
        if value not in ("int8", "int16", "int32", "int64"):
            raise self._illegal("pack_dtype", value, "int8, int16, int32 or int64")
        if value != "int32":
            raise UnsupportedError(
                f"{self.source}: pack_dtype is {value}; Terrazzo reads int32. Save the model "
                "again with pack_dtype int32"
            )
        return str(value)

    def _value(self, field: str, default: object) -> Any:
        for spelling in _ALIASES.get(field, (field,)):
            if self.fields.get(spelling) is not None:
                return self.fields[spelling]
        return default

    def _number(self, field: str, default: int) -> int:
        value = self._value(field, default)
        if isinstance(value, str) and value.lstrip("-").isdecimal():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self._illegal(field, value, "a whole number")

    def _flag(self, field: str, default: bool) -> bool:
        value = self._value(field, default)
        if isinstance(value, bool):
            return value
        raise self._illegal(field, value, "true or false")

    def _illegal(self, field: str, value: object, legal: str) -> ConfigError:
        return ConfigError(f"{self.source}: {field} is {value!r}; legal is {legal}")


def _promoted(label: Format, rules: RuleSet) -> Format:
    """GPTQModel treats a whole checkpoint as planar when any rule, even an idle one, asks for a
    width that exists only in planes.
    """
    asked = [rules.base.bits]
    asked += [rule.override["bits"] for rule in rules.rules if "bits" in rule.override]
    return label if PLANAR_ONLY_BITS.isdisjoint(asked) else Format.GPTQ_P


def _differences(
    source: Path, fields: Mapping[str, Any], other: Path, other_fields: Mapping[str, Any]
) -> list[str]:
    """Sentences on fields that both files have with unequal values."""
    shared = [
        field
        for field in ("bits", "group_size", "sym", "desc_act", "lm_head", "format", "dynamic")
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
