"""Repeated measurements of one figure, in the order they were taken."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Clock: TypeAlias = Callable[[], float]
"""Seconds since any moment, the same one at every call."""


@dataclass(frozen=True, slots=True)
class Samples:
    """values: at least one, all of one unit."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert self.values, "nothing was measured"

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.4g} ({min(self.values):.4g} to {max(self.values):.4g})"

    def to_json(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": list(self.values),
        }
