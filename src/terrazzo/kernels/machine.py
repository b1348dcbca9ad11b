"""The CPU as the native kernels see it: their instruction set and their team of threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import torch

from terrazzo.env import read_environment

PORTABLE = "portable"
"""The instruction set of every machine."""

try:
    from terrazzo import _native
except ImportError as error:
    _found: ModuleType | str = (
        f"the native kernels are not there ({error}); install terrazzo where a C++20 compiler and "
        "CMake are, to run many times faster"
    )
else:
    _found = _native
    if _native.instruction_sets() == [PORTABLE]:
        _found = (
            "this machine has neither AVX2 with FMA nor AVX-512 with VNNI; the portable kernels "
            "are there to check the others, and torch is faster"
        )


def why_not_native() -> str:
    """Why there are no native kernels; empty when there are."""
    return _found if isinstance(_found, str) else ""


def native() -> ModuleType:
    """The extension module; only where `why_not_native` is empty."""
    assert isinstance(_found, ModuleType), _found
    return _found


@cache
def machine() -> _native.Machine:
    """The threads of this process, which all native kernels share, created when first needed.

    As many as TERRAZZO_THREADS or OMP_NUM_THREADS say, or else one per physical core.
    """
    made: _native.Machine = native().Machine(num_threads(), native().instruction_sets()[0])
    return made


@contextmanager
def no_other_threads() -> Iterator[None]:
    """Where the native kernels compute, torch keeps to one thread: those of its pool would stay
    awake after each operation and take the cores from ours.
    """
    if why_not_native():
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def num_threads() -> int:
    """Raises ConfigError where the environment asks for an illegal number."""
    environment = read_environment()
    return environment.threads or environment.openmp_threads or _physical_cores()


def _physical_cores() -> int:
    """Cores this process may run on; two threads of one core count once."""
    allowed = os.sched_getaffinity(0)
    siblings = {_siblings(cpu) for cpu in allowed}
    return max(1, len(siblings))


def _siblings(cpu: int) -> str:
    """The CPUs that share the core of `cpu`, as Linux lists them."""
    path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return str(cpu)
