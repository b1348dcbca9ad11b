"""Rules that decide nothing: dead ones, and those that earlier rules leave nothing to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from terrazzo.rules import Rule, RuleSet
from terrazzo.spec import Name


@dataclass(frozen=True, slots=True)
class IdleRule:
    """A rule that decides no module.

    shadowed_by: the earlier rules that took all its matches; empty for a dead rule, whose pattern
    matches no module at all.
    """

    rule: Rule
    shadowed_by: tuple[Rule, ...]

    def __str__(self) -> str:
        if not self.shadowed_by:
            return f"rule {self.rule.entry!r} matches no module"
        takers = ", ".join(repr(rule.entry) for rule in self.shadowed_by)
        return f"rule {self.rule.entry!r} decides nothing: its matches are taken by {takers}"


def idle_rules(rules: RuleSet, names: Sequence[Name]) -> tuple[IdleRule, ...]:
    """The dead and shadowed rules of `rules` over `names`, in rule order."""
    deciders = {name: rules.resolve_name(name).decided_by for name in names}
    busy = {decider.key for decider in deciders.values() if isinstance(decider, Rule)}
    idle = []
    for rule in rules.rules:
        if rule.key in busy:
            continue
        takers = {
            decider.key: decider
            for name, decider in deciders.items()
            if isinstance(decider, Rule) and rule.matches(name)
        }
        idle.append(IdleRule(rule, tuple(takers.values())))
    return tuple(idle)
