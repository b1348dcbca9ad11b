"""The knobs of a run. They import nothing heavy, so that the command line can name them at once."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import ConfigError


class ScaleSearch(enum.Enum):
    """How a grid is chosen: MIN_MAX takes the range of the weights, HESSIAN searches below it."""

    MIN_MAX = "min_max"
    HESSIAN = "hessian"


@dataclass(frozen=True, slots=True)
class GptqOptions:
    """Knobs of the sweep that are not in the bytes' description.

    damp: part of the mean of `diag(H)` added to the diagonal. search: how grids are chosen.
    block_size: columns per matrix product; it changes speed, and codes only by rounding.
    """

    damp: float = 0.01
    search: ScaleSearch = ScaleSearch.HESSIAN
    block_size: int = 128

    def __post_init__(self) -> None:
        if not 0 < self.damp < 1:
            raise ConfigError(
                f"damp is {self.damp}; legal is a number between 0 and 1, usually 0.01"
            )
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}; legal is a positive number")


DEFAULT_GPTQ = GptqOptions()


@dataclass(frozen=True, slots=True)
class BuiltinText:
    """The text that ships with the package."""

    def __str__(self) -> str:
        return "builtin"


BUILTIN = BuiltinText()


@dataclass(frozen=True, slots=True)
class CalibrationOptions:
    """Which text, and how much of it.

    source: BUILTIN, a `.txt` file, or a `.jsonl` file whose lines are objects with a `text` or with
    `messages`. num_tokens: rounded up to whole sequences. seed: chooses the sequences.
    """

    source: Path | BuiltinText = BUILTIN
    num_tokens: int = 16384
    sequence_length: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("num_tokens", 1), ("sequence_length", 2), ("seed", 0)):
            if getattr(self, name) < least:
                raise ConfigError(
                    f"calibration {name} is {getattr(self, name)}; legal is {least} or more"
                )

    @property
    def source_name(self) -> str:
        """Without the folder, which says nothing about the text."""
        return self.source.name if isinstance(self.source, Path) else str(self.source)

    @property
    def num_sequences(self) -> int:
        return -(-self.num_tokens // self.sequence_length)


DEFAULT_CALIBRATION = CalibrationOptions()
