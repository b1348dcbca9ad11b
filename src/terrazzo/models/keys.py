"""Typed reading of a config file: every problem names the file, the key and what is legal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrazzo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Keys:
    """A JSON object with the file it came from; a key with the value null counts as absent.

    prefix: path of this object inside the file, for example `rope_parameters.`.
    """

    values: Mapping[str, Any]
    source: Path
    prefix: str = ""

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(self, key: str) -> int:
        """A positive whole number."""
        value = self._required(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise self.illegal(key, "legal is a positive whole number")

    def integer_or(self, key: str, default: int) -> int:
        return self.integer(key) if self.has(key) else default

    def number(self, key: str) -> float:
        """A positive number."""
        value = self._required(key)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return float(value)
        raise self.illegal(key, "legal is a positive number")

    def number_or(self, key: str, default: float) -> float:
        return self.number(key) if self.has(key) else default

    def switch_or(self, key: str, default: bool) -> bool:
        value = self.values[key] if self.has(key) else default
        if isinstance(value, bool):
            return value
        raise self.illegal(key, "legal is true or false")

    def text_or(self, key: str, default: str) -> str:
        value = self.values[key] if self.has(key) else default
        if isinstance(value, str):
            return value
        raise self.illegal(key, "legal is a string")

    def texts_or(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        value = self.values[key] if self.has(key) else default
        if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise self.illegal(key, "legal is a list of strings")

    def wholes_or(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Whole numbers from zero on; a number alone is a list of one."""
        value = self.values[key] if self.has(key) else default
        items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if all(isinstance(item, int) and item >= 0 for item in items):
            return items
        raise self.illegal(key, "legal are whole numbers from zero on")

    def numbers(self, key: str) -> tuple[float, ...]:
        """Positive numbers."""
        value = self._required(key)
        if isinstance(value, list) and all(isinstance(x, (int, float)) and x > 0 for x in value):
            return tuple(map(float, value))
        raise self.illegal(key, "legal is a list of positive numbers")

    def object(self, key: str) -> Keys:
        """The JSON object under `key`; an empty one where it is absent."""
        value = self.values[key] if self.has(key) else {}
        if isinstance(value, Mapping):
            return Keys(value, self.source, f"{self.prefix}{key}.")
        raise self.illegal(key, "legal is an object or null")

    def illegal(self, key: str, legal: str) -> ConfigError:
        """The error for a value that is there but cannot be."""
        seen = self.values.get(key)
        return ConfigError(f"{self.source}: {self.prefix}{key} is {seen!r}; {legal}")

    def _required(self, key: str) -> Any:
        if self.has(key):
            return self.values[key]
        raise ConfigError(
            f"{self.source}: {self.prefix}{key} is missing; copy it from the config.json of the "
            "model this checkpoint was made from"
        )
