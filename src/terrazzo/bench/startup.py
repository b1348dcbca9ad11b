"""From the start of a process to the first token of a model, phase by phase."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from terrazzo.bench.samples import Samples
from terrazzo.engine.config import AUTO, Auto
from terrazzo.errors import CheckpointError, ConfigError
from terrazzo.kernels.policy import KernelPolicy

CHILD = "terrazzo.bench.first_token"


@dataclass(frozen=True, slots=True)
class Start:
    """Seconds of one start. interpreter: until Python runs code of ours. imports: of torch and
    everything else. load: of the model. first_token: of a short prompt. total: all of it.
    """

    interpreter: float
    imports: float
    load: float
    first_token: float
    total: float


@dataclass(frozen=True, slots=True)
class StartupSpeed:
    """The starts of one model, all with its files in the page cache."""

    folder: Path
    starts: tuple[Start, ...]

    @property
    def phases(self) -> dict[str, Samples]:
        """Seconds, by the fields of `Start`."""
        return {
            each.name: Samples(tuple(getattr(start, each.name) for start in self.starts))
            for each in fields(Start)
        }


def measure_startup(
    folders: Sequence[Path], repeats: int, policy: KernelPolicy | Auto = AUTO
) -> tuple[StartupSpeed, ...]:
    """Folders take turns, after one round that does not count: it fills the page cache.

    Raises ConfigError for repeats below 1, CheckpointError where a model does not start.
    """
    if repeats < 1:
        raise ConfigError(f"repeats is {repeats}; legal values are 1 and above")
    starts: dict[Path, list[Start]] = {folder: [] for folder in folders}
    for _ in range(repeats + 1):
        for folder, taken in starts.items():
            taken.append(start_once(folder, policy))
    return tuple(StartupSpeed(folder, tuple(taken[1:])) for folder, taken in starts.items())


def start_once(folder: Path, policy: KernelPolicy | Auto) -> Start:
    """Raises CheckpointError with what the process said where it did not answer."""
    command = [sys.executable, "-m", CHILD, str(folder), policy.value]
    begun = time.monotonic()
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        said = child.stderr.strip() or f"the process ended with status {child.returncode}"
        raise CheckpointError(f"{folder} did not start: {said}")
    entered, imported, loaded, answered = json.loads(child.stdout)
    return Start(
        interpreter=entered - begun,
        imports=imported - entered,
        load=loaded - imported,
        first_token=answered - loaded,
        total=answered - begun,
    )
