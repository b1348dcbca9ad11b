"""What kernels of a card are written against: functions that start on it, and its size."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

SOURCES = Path(__file__).parent / "cuda"


@dataclass(frozen=True, slots=True)
class Source:
    """One kernel, in a file of the same name in `cuda/`. defines: `NAME=value` each."""

    name: str
    defines: tuple[str, ...]

    @property
    def file(self) -> Path:
        return SOURCES / f"{self.name}.cu"


class Function(Protocol):
    """A compiled kernel."""

    def launch(self, grid: tuple[int, int], shared_bytes: int, arguments: ctypes.Structure) -> None:
        """Starts when the kernel before it allows, or ends: the kernel itself waits for its inputs
        (programmatic dependent launch). grid: blocks in x and y.
        """


class Card(Protocol):
    """Where kernels run: on NVIDIA hardware, or emulated by the tests."""

    @property
    def device(self) -> torch.device:
        """Of the tensors that kernels read and write."""

    @property
    def num_sms(self) -> int: ...

    def function(self, source: Source, threads: int) -> Function:
        """Compiled when first asked for. threads: of a block. Raises KernelError."""
