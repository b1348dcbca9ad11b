"""A disagreement between what a config says and what the tensors hold."""

from __future__ import annotations

from dataclasses import dataclass

from terrazzo.spec import Name


@dataclass(frozen=True, slots=True)
class Conflict:
    """Two sources that cannot both be right; the second is the one that is used.

    module: the module in question, or the name of a config file. field: what they disagree on.
    claim: what the config says, and which rule. fact: what holds, with the numbers that show it.
    remedy: what the user can do.
    """

    module: Name
    field: str
    claim: str
    fact: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.module}: {self.field}: {self.claim}, but {self.fact}. {self.remedy}"
