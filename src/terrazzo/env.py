"""The only room that touches the process environment: every variable we obey, validated."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from terrazzo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Environment:
    """threads: TERRAZZO_THREADS, CPU threads for compute; 0 leaves it to the kernels.

    openmp_threads: OMP_NUM_THREADS, of its outermost level; 0 where it is not set.
    cache_folder: TERRAZZO_CACHE, or else `terrazzo` in the user's usual cache; what is in it can be
    made again. A `~` is still to be expanded.
    """

    threads: int = 0
    openmp_threads: int = 0
    cache_folder: Path = Path("~/.cache/terrazzo")


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Raises ConfigError naming the variable, the value seen and what is legal."""
    openmp = variables.get("OMP_NUM_THREADS", "0")
    return Environment(
        threads=_natural("TERRAZZO_THREADS", variables.get("TERRAZZO_THREADS", "0")),
        # OpenMP takes a list, one number for each level of nesting.
        openmp_threads=_natural("OMP_NUM_THREADS", openmp.split(",")[0]),
        cache_folder=_cache_folder(variables),
    )


def _cache_folder(variables: Mapping[str, str]) -> Path:
    """An empty variable is as good as none, as the XDG specification has it."""
    chosen, usual = variables.get("TERRAZZO_CACHE"), variables.get("XDG_CACHE_HOME")
    return Path(chosen) if chosen else Path(usual or "~/.cache") / "terrazzo"


def _natural(variable: str, text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{variable} is {text!r}; legal values are 0, 1, 2, ...")
    return int(text)


def let_idle_threads_sleep(variables: MutableMapping[str, str] = os.environ) -> None:
    """Must run before torch is imported; what the user has set stays.

    OpenMP threads that wait for each other spin by default. Where another process holds one of the
    cores, two spinning threads take several times as long as one; sleeping ones do not.
    """
    variables.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    variables.setdefault("GOMP_SPINCOUNT", "0")
