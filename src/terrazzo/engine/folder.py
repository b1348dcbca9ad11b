"""The small JSON files of a model folder that concern generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from terrazzo.checkpoint import json_files
from terrazzo.checkpoint.small_files import is_present
from terrazzo.errors import ConfigError

Document: TypeAlias = Mapping[str, Any]

_LARGEST = 1e18
_SAMPLING_KEYS: Mapping[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}


def read_json(file: Path) -> Document:
    """The object in `file`, or an empty one when there is no such file.

    Raises ConfigError for anything that is not a JSON object.
    """
    return json_files.read_json(file) if is_present(file) else {}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's makers recommend.

    eos_token_ids: of generation_config.json and config.json together. sampling: fields of
    SamplingParams with their recommended values.
    """

    eos_token_ids: frozenset[int]
    sampling: Mapping[str, int | float]

    @classmethod
    def read(cls, folder: Path) -> GenerationDefaults:
        generation_file, config_file = folder / "generation_config.json", folder / "config.json"
        generation = read_json(generation_file)
        eos = _token_ids(generation, generation_file) | _token_ids(
            read_json(config_file), config_file
        )
        return cls(eos, _sampling(generation, generation_file))


def _token_ids(document: Document, file: Path) -> frozenset[int]:
    """Some makers write -1 for none."""
    value = document.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ConfigError(f"{file}: eos_token_id is {value!r}; it must be a token id or a list")
    return frozenset(each for each in ids if each >= 0)


def _sampling(document: Document, file: Path) -> dict[str, int | float]:
    """`do_sample: false` asks for greedy decoding, whatever the temperature beside it says."""
    sampling: dict[str, int | float] = {}
    for key, kind in _SAMPLING_KEYS.items():
        value = document.get(key)
        if value is None:
            continue
        sampling[key] = _number(value, kind, f"{file}: {key}")
    if document.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return sampling


def _number(value: object, kind: type[int] | type[float], place: str) -> int | float:
    """JSON knows numbers that are not finite, and integers that are too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
        raise ConfigError(f"{place} is {value!r}; it must be a number of at most {_LARGEST:g}")
    if value != value:
        raise ConfigError(f"{place} is not a number; it must be one")
    return kind(value)
