"""Rules as a user writes them: JSON in a file or on the command line.

Two forms are read. A whole config,

    {"bits": 4, "group_size": 64, "lm_head": true, "dynamic": {"+:.*v_proj": {"bits": 8}}}

whose fields are those of a quantization config, or the content of its `dynamic` alone. The first
is recognized by a value that is not an object, or by the key `dynamic`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrazzo.checkpoint.json_files import parse_json
from terrazzo.errors import ConfigError, MissingFileError
from terrazzo.rules import RuleSet
from terrazzo.spec import DEFAULT_SPEC

NUMBERS = ("bits", "group_size")
SWITCHES = ("sym", "desc_act", "lm_head")
DYNAMIC = "dynamic"


def read_rules(text: str) -> RuleSet:
    """text: JSON that begins with `{`, or the path of a JSON file.

    Raises MissingFileError, ConfigError or RuleError naming the file and the field.
    """
    if text.lstrip().startswith("{"):
        return _parse("rules", text)
    file = Path(text)
    if not file.is_file():
        raise MissingFileError(
            f"rules {text} is neither a file nor JSON; legal is the path of a JSON file, or an "
            'object such as {"+:.*v_proj": {"bits": 8}}'
        )
    return _parse(str(file), file.read_text(encoding="utf-8"))


def _parse(place: str, text: str) -> RuleSet:
    try:
        fields = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON ({error})") from error
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{place}: {type(fields).__name__}; legal is an object")
    if not _is_config(fields):
        return RuleSet.parse(fields)
    dynamic = fields.get(DYNAMIC, {})
    if not isinstance(dynamic, Mapping):
        raise ConfigError(f"{place}: {DYNAMIC} is {dynamic!r}; legal is an object")
    settings = {name: _setting(place, name, value) for name, value in _settings(fields).items()}
    lm_head = bool(settings.pop("lm_head", False))
    base = replace(DEFAULT_SPEC, **settings)
    return RuleSet.parse(dynamic, base, lm_head=lm_head)


def _is_config(fields: Mapping[str, Any]) -> bool:
    plain = [value for value in fields.values() if not isinstance(value, Mapping | None)]
    return bool(plain) or DYNAMIC in fields


def _settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != DYNAMIC}


def _setting(place: str, name: str, value: object) -> Any:
    if name in SWITCHES and isinstance(value, bool):
        return value
    if name in NUMBERS and isinstance(value, int) and not isinstance(value, bool):
        return value
    if name in SWITCHES:
        raise ConfigError(f"{place}: {name} is {value!r}; legal is true or false")
    if name in NUMBERS:
        raise ConfigError(f"{place}: {name} is {value!r}; legal is a whole number")
    legal = ", ".join((*NUMBERS, *SWITCHES, DYNAMIC))
    raise ConfigError(f"{place}: {name!r} is not a field here; legal are {legal}")
