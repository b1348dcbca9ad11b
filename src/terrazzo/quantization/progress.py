"""How a long run tells what it is doing, without knowing who listens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from terrazzo.spec import Name


class Progress(Protocol):
    """Told by a run as it goes. Work is counted in operations, see `work`."""

    def begin(self, work: float) -> None:
        """All of the work that is to come."""

    def doing(self, name: Name) -> None:
        """Which module is quantized now."""

    def advance(self, work: float) -> None:
        """So much of it is done."""


@dataclass(frozen=True, slots=True)
class Silent:
    """Nobody listens."""

    def begin(self, work: float) -> None: ...

    def doing(self, name: Name) -> None: ...

    def advance(self, work: float) -> None: ...


SILENT = Silent()
