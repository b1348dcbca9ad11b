"""Rules that are written for another name of the text tower than a checkpoint has.

Only checkpoints that have a text tower are concerned; everywhere else rules mean exactly what they
mean to GPTQModel. A rule that matches any linear by its stored name is left as it is and tried as
ever. A rule of `dynamic` that matches none is tried under the other spellings of the tower, and the
first under which it matches a linear becomes its own. Such rules come last: they decide only what
no rule decides by stored names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from terrazzo.rules import RuleSet
from terrazzo.spec import Name
from terrazzo.spellings import Spelling

_BESIDE_TEXT = ("text_config", "vision_config", "audio_config")
_NESTED = tuple(f"{each.value}." for each in (Spelling.INSIDE, Spelling.OUTSIDE))


def respelled(
    rules: RuleSet, model_config: Mapping[str, Any], linears: Collection[Name]
) -> RuleSet:
    """linears: all of the checkpoint, by their stored names."""
    if not has_text_tower(model_config, linears):
        return rules
    spellings = {rule.key: Spelling.AS_STORED for rule in rules.rules if rule.entry != rule.key}
    for spelling in Spelling:
        for name in linears:
            for rule in rules.matching(spelling.of(name)):
                spellings.setdefault(rule.key, spelling)
    spelled = [
        replace(rule, spelling=spellings.get(rule.key, Spelling.AS_STORED)) for rule in rules.rules
    ]
    spelled.sort(key=lambda rule: rule.spelling is not Spelling.AS_STORED)
    return replace(rules, rules=tuple(spelled))


def has_text_tower(model_config: Mapping[str, Any], linears: Collection[Name]) -> bool:
    """Whether the decoder is, or was made, a part of something larger."""
    nested = any(name.startswith(_NESTED) for name in linears)
    return nested or any(key in model_config for key in _BESIDE_TEXT)


def spelling_remarks(rules: RuleSet) -> Iterator[str]:
    """What other engines will not see."""
    for rule in rules.rules:
        if rule.spelling is not Spelling.AS_STORED:
            yield (
                f"rule {rule.entry!r} is written for {rule.spelling.value}, and the tensors have "
                "other names: Terrazzo knows both, engines that do not ignore the rule. A pattern "
                r"that begins with `.*layers\.` means the same everywhere"
            )
