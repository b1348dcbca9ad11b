"""The small JSON files of a model folder that concern generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from terrazzo.checkpoint import json_files
from terrazzo.errors import ConfigError

Document: TypeAlias = Mapping[str, Any]

_SAMPLING_KEYS = {
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
    return json_files.read_json(file) if file.is_file() else {}


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
    value = document.get("eos_token_id")
    if value is None:
        return frozenset()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) for each in ids):
        raise ConfigError(f"{file}: eos_token_id is {value!r}; it must be a token id or a list")
    return frozenset(ids)


def _sampling(document: Document, file: Path) -> dict[str, int | float]:
    """`do_sample: false` asks for greedy decoding, whatever the temperature beside it says."""
    sampling: dict[str, int | float] = {}
    for key, kind in _SAMPLING_KEYS.items():
        value = document.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float):
            raise ConfigError(f"{file}: {key} is {value!r}; it must be a number")
        sampling[key] = kind(value)
    if document.get("do_sample") is False:
        sampling["temperature"] = 0.0
    return sampling
