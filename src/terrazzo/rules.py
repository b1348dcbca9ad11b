"""`quantization_config.dynamic`: the only place that knows patterns.

GPTQModel's semantics, exactly. A key is a PCRE2 pattern, matched at the start of a module name and
not necessarily to its end; `-:` in front makes the rule negative, `+:` or nothing positive. Keys
that begin with `-` are tried first, otherwise the order of the file holds; the first match decides
and nothing is merged from later rules. Three outcomes exist:

* a negative rule matches: the module stays dense;
* a positive rule matches: its fields are laid over the base config (`{}` shields from later rules);
* no rule matches: the base config.

A negative pattern is also tried on the layer-relative name (`self_attn.q_proj`), because GPTQModel
decides there which modules to skip. The engine is PCRE2 itself, the one that GPTQModel calls.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pcre2

from terrazzo.errors import ConfigError, RuleError
from terrazzo.spec import DEFAULT_SPEC, DENSE, Dense, Name, QuantSpec
from terrazzo.spellings import HEADS, Spelling
from terrazzo.spellings import LM_HEAD as LM_HEAD
from terrazzo.spellings import layer_relative as layer_relative

SPEC_FIELDS = ("bits", "group_size", "sym", "desc_act")

_LITERAL = re.compile(r"\^?((?:[\w-]|\\[^\w\s])+)\$", re.ASCII)
_ESCAPE = re.compile(r"\\(.)")


class Polarity(enum.Enum):
    POSITIVE = "+:"
    NEGATIVE = "-:"


class TriedOn(enum.Enum):
    """The names of a module that a pattern is tried on."""

    FULL = "model.layers.3.self_attn.q_proj"
    RELATIVE_TOO = "that, and self_attn.q_proj"


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of `dynamic`, or of another list that says the same.

    key: as `dynamic` has it, prefix included. polarity: what a match means. pattern: PCRE2 text.
    override: the fields of a spec that it sets. options: the fields that only the quantizer reads
    (`mse`, `damp_percent`, ...) and `pack_dtype`. entry: as its file writes it. spelling: of the
    names that the pattern is tried on.
    """

    key: str
    polarity: Polarity
    pattern: str
    override: Mapping[str, Any]
    options: Mapping[str, Any]
    entry: str
    tried_on: TriedOn
    compiled: pcre2.Pattern = field(repr=False, compare=False)
    spelling: Spelling = Spelling.AS_STORED

    @classmethod
    def parse(cls, key: str, value: object) -> Rule:
        """Raises RuleError naming the key when the pattern or the value is illegal."""
        polarity = Polarity.NEGATIVE if key.startswith("-:") else Polarity.POSITIVE
        pattern = key[2:] if key.startswith(("-:", "+:")) else key
        fields = _fields_of(key, value, polarity)
        relative = polarity is Polarity.NEGATIVE
        tried_on = TriedOn.RELATIVE_TOO if relative else TriedOn.FULL
        return cls._of(key, polarity, pattern, fields, key, tried_on)

    @classmethod
    def translated(
        cls, entry: str, polarity: Polarity, pattern: str, fields: Mapping[str, Any]
    ) -> Rule:
        """What another tool writes as `entry`; its pattern is tried on full names only."""
        key = f"{polarity.value}{pattern}"
        return cls._of(key, polarity, pattern, fields, entry, TriedOn.FULL)

    @classmethod
    def _of(
        cls,
        key: str,
        polarity: Polarity,
        pattern: str,
        fields: Mapping[str, Any],
        entry: str,
        tried_on: TriedOn,
    ) -> Rule:
        override = {
            name: _checked(entry, name, fields[name]) for name in SPEC_FIELDS if name in fields
        }
        options = {name: option for name, option in fields.items() if name not in SPEC_FIELDS}
        compiled = _compile(entry, pattern)
        return cls(key, polarity, pattern, override, options, entry, tried_on, compiled)

    def apply(self, base: QuantSpec) -> QuantSpec | Dense:
        if self.polarity is Polarity.NEGATIVE:
            return DENSE
        try:
            return replace(base, **self.override)
        except ConfigError as error:
            raise RuleError(f"dynamic rule {self.entry!r}: {error}") from error

    def matches(self, name: Name) -> bool:
        return self._matches_text(self.spelling.of(name)) or (
            self.tried_on is TriedOn.RELATIVE_TOO and self._matches_text(layer_relative(name))
        )

    def _matches_text(self, text: str) -> bool:
        try:
            match = self.compiled.match(text)
        except pcre2.LibraryError as error:
            raise RuleError(
                f"dynamic rule {self.entry!r}: PCRE2 gave up on module {text!r} ({error}); "
                "write a pattern without nested repetition"
            ) from error
        # A pattern that moves its own start with \K does not match at the start of the name.
        return match is not None and match.start() == 0

    def __str__(self) -> str:
        spelled = self.spelling is not Spelling.AS_STORED
        return f"{self.entry} (as {self.spelling.value})" if spelled else self.entry


class Otherwise(enum.Enum):
    """What decides a module where no rule does.

    HEAD_SWITCH: whatever the rules say. NO_CONFIG: an ordinary model. OUT_OF_REACH: a router, tower
    or projector, which quantizers leave dense before they look at rules.
    """

    BASE = "base config"
    HEAD_SWITCH = "lm_head: false"
    NO_CONFIG = "no quantization config"
    OUT_OF_REACH = "left dense by quantizers"

    def __str__(self) -> str:
        return self.value


BASE = Otherwise.BASE
HEAD_SWITCH = Otherwise.HEAD_SWITCH
NO_CONFIG = Otherwise.NO_CONFIG
OUT_OF_REACH = Otherwise.OUT_OF_REACH
Decider = Rule | Otherwise


@dataclass(frozen=True, slots=True)
class Resolution:
    """What one module is, and what decided it."""

    name: Name
    spec: QuantSpec | Dense
    decided_by: Decider


class Plan(Mapping[Name, Resolution]):
    """Every un-fused module name with its Resolution, in the order the names were given."""

    def __init__(self, resolutions: Iterable[Resolution]) -> None:
        self._by_name = {resolution.name: resolution for resolution in resolutions}

    def __getitem__(self, name: Name) -> Resolution:
        return self._by_name[name]

    def __iter__(self) -> Iterator[Name]:
        return iter(self._by_name)

    def __len__(self) -> int:
        return len(self._by_name)

    @property
    def quantized(self) -> dict[Name, QuantSpec]:
        return {r.name: r.spec for r in self.values() if isinstance(r.spec, QuantSpec)}

    @property
    def dense(self) -> tuple[Name, ...]:
        return tuple(r.name for r in self.values() if isinstance(r.spec, Dense))


@dataclass(frozen=True, slots=True)
class _Index:
    """Tools write a rule for each of ten thousand experts: those that spell out one name are found
    by it. literal: name -> its rules, by position. patterns: all other rules, by position.
    """

    literal: Mapping[str, Mapping[int, Rule]]
    patterns: Mapping[int, Rule]

    @classmethod
    def of(cls, rules: Sequence[Rule]) -> _Index:
        literal: dict[str, dict[int, Rule]] = {}
        patterns: dict[int, Rule] = {}
        for position, rule in enumerate(rules):
            spelled = _LITERAL.fullmatch(rule.pattern)
            name = "" if spelled is None else _ESCAPE.sub(r"\1", spelled[1])
            (literal.setdefault(name, {}) if spelled else patterns)[position] = rule
        return cls(literal, patterns)

    def candidates(self, name: Name) -> Iterable[Rule]:
        """In the order they are tried; no other rule matches."""
        own: dict[int, Rule] = {}
        for text in (layer_relative(name), *(spelling.of(name) for spelling in Spelling)):
            own |= self.literal.get(text, {})
        if not own:
            return self.patterns.values()
        return [rule for _, rule in sorted({**self.patterns, **own}.items())]


@dataclass(frozen=True, slots=True)
class RuleSet:
    """A base spec, the rules in the order they are tried, and whether the head is quantized."""

    base: QuantSpec = DEFAULT_SPEC
    rules: tuple[Rule, ...] = ()
    lm_head: bool = False
    _index: _Index = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_index", _Index.of(self.rules))

    @classmethod
    def parse(
        cls, dynamic: Mapping[str, object], base: QuantSpec = DEFAULT_SPEC, *, lm_head: bool = False
    ) -> RuleSet:
        """`dynamic` as a quantization config holds it; keys that begin with `-` go to the front.

        Raises RuleError naming the key whose pattern or value is illegal.
        """
        ordered = sorted(dynamic, key=lambda key: not key.startswith("-"))
        rule_set = cls(base, tuple(Rule.parse(key, dynamic[key]) for key in ordered), lm_head)
        for rule in rule_set.rules:
            rule.apply(base)
        return rule_set

    def resolve_name(self, name: Name) -> Resolution:
        if name in HEADS and not self.lm_head:
            return Resolution(name, DENSE, HEAD_SWITCH)
        for rule in self.matching(name):
            return Resolution(name, rule.apply(self.base), rule)
        return Resolution(name, self.base, BASE)

    def matching(self, name: Name) -> Iterator[Rule]:
        """The rules that match, in the order they are tried; the first one decides."""
        yield from (rule for rule in self._index.candidates(name) if rule.matches(name))

    def to_dynamic(self) -> dict[str, dict[str, Any]]:
        """The `dynamic` field that parses back to this rule set."""
        return {rule.key: {**rule.override, **rule.options} for rule in self.rules}


def resolve(rules: RuleSet, names: Iterable[Name]) -> Plan:
    """Decide every module once; afterwards nobody sees a pattern.

    names: un-fused on-disk module names without `.weight`. Raises RuleError when PCRE2 gives up on
    one. `lm_head` stays dense unless `rules.lm_head` is set.
    """
    return Plan(rules.resolve_name(name) for name in names)


def _compile(key: str, pattern: str) -> pcre2.Pattern:
    try:
        return pcre2.compile(pattern, jit=False)
    except (pcre2.PatternError, pcre2.LibraryError, UnicodeEncodeError) as error:
        raise RuleError(
            f"dynamic rule {key!r}: {pattern!r} is not a PCRE2 pattern ({error}); "
            "correct the pattern, or escape literal characters with a backslash"
        ) from error


def _fields_of(key: str, value: object, polarity: Polarity) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    if value is None and polarity is Polarity.NEGATIVE:
        return {}
    raise RuleError(
        f"dynamic rule {key!r}: its value is {value!r}; legal is an object of fields, "
        'for example {"bits": 8, "group_size": 32}, or {} for none'
    )


def _checked(key: str, name: str, value: object) -> int | bool:
    if name in ("bits", "group_size"):
        if isinstance(value, int) and not isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lstrip("-").isdecimal():
            return int(value)
        raise RuleError(f"dynamic rule {key!r}: {name} is {value!r}; legal is a whole number")
    if isinstance(value, bool):
        return value
    raise RuleError(f"dynamic rule {key!r}: {name} is {value!r}; legal is true or false")
