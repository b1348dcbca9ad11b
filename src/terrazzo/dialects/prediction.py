"""What an engine will make of a checkpoint, and why."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from terrazzo.spec import Name

CONFIG = "config"
"""The `module` of a finding that concerns the whole folder."""


class Outcome(enum.Enum):
    """From best to worst is LOADS, REFUSES, SILENTLY_WRONG; an engine that refuses never starts.
    UNKNOWN is for parts of an engine that nobody looked at.
    """

    UNKNOWN = "not predicted"
    LOADS = "loads"
    REFUSES = "refuses"
    SILENTLY_WRONG = "silently wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """module: as on disk, or CONFIG. reason: what happens there, with the error in short."""

    module: Name
    outcome: Outcome
    reason: str


class Refusal(Exception):
    """The engine stops here; the text is what it says, in short."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """engine: name and version. checked: the day its code was read. findings: in module order."""

    engine: str
    checked: str
    findings: tuple[Finding, ...]

    @property
    def outcome(self) -> Outcome:
        found = {finding.outcome for finding in self.findings}
        worst = (Outcome.REFUSES, Outcome.SILENTLY_WRONG, Outcome.UNKNOWN)
        return next((outcome for outcome in worst if outcome in found), Outcome.LOADS)

    def grouped(self) -> list[tuple[Finding, list[Name]]]:
        """Findings of equal outcome and reason, each with all its modules."""
        groups: dict[tuple[Outcome, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault((finding.outcome, finding.reason), []).append(finding)
        return [(found[0], [f.module for f in found]) for found in groups.values()]

    def __str__(self) -> str:
        lines = [f"{self.engine} (as of {self.checked}): {self.outcome.value}"]
        for finding, modules in self.grouped():
            more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
            lines.append(f"  {finding.outcome.value}: {modules[0]}{more}: {finding.reason}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        return {
            "engine": self.engine,
            "checked": self.checked,
            "outcome": self.outcome.value,
            "findings": [
                {"module": f.module, "outcome": f.outcome.value, "reason": f.reason}
                for f in self.findings
            ],
        }


def silently_wrong(modules: Iterable[Name], reason: str) -> list[Finding]:
    return [Finding(module, Outcome.SILENTLY_WRONG, reason) for module in modules]


def refuses(modules: Iterable[Name], reason: str) -> list[Finding]:
    return [Finding(module, Outcome.REFUSES, reason) for module in modules]
