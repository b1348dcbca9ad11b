"""One JSON object of a quantization config: its fields by any of their spellings, typed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.errors import ConfigError
from terrazzo.rules import RuleSet
from terrazzo.spec import DEFAULT_SPEC, QuantSpec, WordFormat

ALIASES = {
    "bits": ("bits", "w_bit", "wbits"),
    "group_size": ("group_size", "q_group_size"),
    "method": ("quant_method", "method"),
    "format": ("format", "checkpoint_format", "version"),
}
"""Field -> its spellings, the one that wins first (GPTQModel reads `format` before the alias)."""

PACK_DTYPES = ("int8", "int16", "int32", "int64")


@dataclass(frozen=True, slots=True)
class Reading:
    """What a config of one method says: how its words are read, its rules, and remarks on it."""

    word_format: WordFormat
    rules: RuleSet
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fields:
    """The object with the file to blame."""

    source: Path
    fields: Mapping[str, Any]

    def has(self, field: str) -> bool:
        return any(
            self.fields.get(spelling) is not None for spelling in ALIASES.get(field, (field,))
        )

    def value(self, field: str, default: object) -> Any:
        for spelling in ALIASES.get(field, (field,)):
            if self.fields.get(spelling) is not None:
                return self.fields[spelling]
        return default

    def number(self, field: str, default: int) -> int:
        value = self.value(field, default)
        if isinstance(value, str) and value.lstrip("-").isdecimal():
            return int(value)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        raise self.illegal(field, value, "a whole number")

    def flag(self, field: str, default: bool) -> bool:
        value = self.value(field, default)
        if isinstance(value, bool):
            return value
        raise self.illegal(field, value, "true or false")

    def mapping(self, field: str, legal: str) -> Mapping[str, Any]:
        """An object, empty where there is none."""
        value = self.value(field, {})
        if isinstance(value, Mapping):
            return value
        raise self.illegal(field, value, legal)

    def illegal(self, field: str, value: object, legal: str) -> ConfigError:
        return ConfigError(f"{self.source}: {field} is {value!r}; legal is {legal}")

    def base(self) -> QuantSpec:
        """The spec of the modules that no rule is about."""
        sym = self.flag("sym", DEFAULT_SPEC.sym)
        if not self.has("sym") and self.has("zero_point"):
            sym = not self.flag("zero_point", False)
        try:
            return QuantSpec(
                bits=self.number("bits", DEFAULT_SPEC.bits),
                group_size=self.number("group_size", DEFAULT_SPEC.group_size),
                sym=sym,
                desc_act=self.flag("desc_act", DEFAULT_SPEC.desc_act),
            )
        except ConfigError as error:
            if str(error).startswith(str(self.source)):
                raise
            raise ConfigError(f"{self.source}: {error}") from error

    def pack_dtype(self) -> str:
        """Top-level as GPTQModel writes it, or under `meta`, where optimum looks for it."""
        value = self.value("pack_dtype", self.meta().get("pack_dtype") or "int32")
        name = str(value).lower().removeprefix("torch.")
        if name in PACK_DTYPES:
            return name
        raise self.illegal("pack_dtype", value, "int8, int16, int32 or int64")

    def meta(self) -> Mapping[str, Any]:
        """What the maker tells of itself; nothing where it is no object."""
        value = self.value("meta", {})
        return value if isinstance(value, Mapping) else {}

    def quantizers(self) -> tuple[str, ...]:
        """`name:version` of every tool that says it made the checkpoint."""
        named = self.meta().get("quantizer") or []
        return tuple(str(each) for each in (named if isinstance(named, list) else [named]))
