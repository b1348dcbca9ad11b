"""Rule lookup as vLLM and SGLang do it: in file order, with the pattern engine of each.

Neither moves negative rules to the front, and neither merges: the first key whose pattern matches
at the start of the name decides. Values of another type than the field's are ignored in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.dialects.prediction import Refusal
from terrazzo.errors import ConfigError
from terrazzo.spec import Name, QuantSpec

Matcher = Callable[[str, str], bool]
"""(pattern, name) -> whether it matches at the start; Refusal when it is no pattern."""

_TYPES = {"bits": int, "group_size": int, "desc_act": bool, "sym": bool}
REQUIRED = tuple(_TYPES)


@dataclass(frozen=True, slots=True)
class Skip:
    """A negative rule matched."""


SKIP = Skip()


def base_spec(fields: Mapping[str, Any]) -> QuantSpec:
    """Refusal where a field is missing or of a type that the engine cannot use."""
    missing = [key for key in REQUIRED if key not in fields]
    if missing:
        raise Refusal(f"cannot find {', '.join(missing)} in the quantization config")
    if str(fields.get("quant_method", "")).lower() != "gptq":
        raise Refusal(f"quant_method is {fields.get('quant_method')!r}, not 'gptq'")
    if any(not isinstance(fields[key], int) for key in REQUIRED):
        raise Refusal("bits, group_size, desc_act or sym is not a number or a flag")
    return typed_spec(QuantSpec(), {key: fields[key] for key in REQUIRED})


def overridden(
    base: QuantSpec, dynamic: Mapping[str, Any], name: Name, matches: Matcher
) -> QuantSpec | Skip:
    """What the rules make of `name`."""
    for key, fields in dynamic.items():
        if key.startswith("-:"):
            if matches(key[2:], name):
                return SKIP
        elif matches(key.removeprefix("+:"), name):
            if not isinstance(fields, Mapping):
                raise Refusal(f"rule {key!r} has the value {fields!r}, which has no fields")
            return typed_spec(base, fields)
    return base


def typed_spec(base: QuantSpec, fields: Mapping[str, Any]) -> QuantSpec:
    """`fields` laid over `base`, those of another type left out."""
    typed = {key: fields[key] for key in REQUIRED if isinstance(fields.get(key), _TYPES[key])}
    try:
        return replace(base, **typed)
    except ConfigError as error:
        raise Refusal(str(error)) from error
