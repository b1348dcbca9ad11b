"""The only room that touches the process environment: every variable we obey, validated."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from terrazzo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Environment:
    """TERRAZZO_THREADS: CPU threads for compute; 0 lets torch decide (its default)."""

    threads: int = 0


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Raises ConfigError naming the variable, the value seen and what is legal."""
    return Environment(threads=_natural("TERRAZZO_THREADS", variables.get("TERRAZZO_THREADS", "0")))


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
