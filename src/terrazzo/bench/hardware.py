"""What a measurement is worth nothing without: processor, threads and versions."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

import terrazzo
from terrazzo.bench.samples import Clock

_CPUINFO = Path("/proc/cpuinfo")
_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

INSTRUCTION_SETS = (
    *("sse4_2", "avx", "f16c", "avx2", "fma", "avx_vnni"),
    *("avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""Those that kernels care about, as Linux spells them for x86 and ARM."""

READ_BYTES = 256 << 20
"""Least size of the buffer whose reading is timed."""
CACHES_READ = 4
"""The buffer is at least so many times the largest cache, hence mostly in memory."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """processor: its name. cores: that this process may use. cache_bytes: the largest cache, 0
    where the system does not tell. threads: of torch.
    """

    processor: str
    instruction_sets: tuple[str, ...]
    cores: int
    cache_bytes: int
    threads: int
    terrazzo: str
    torch: str
    python: str
    system: str

    def __str__(self) -> str:
        return (
            f"{self.processor}, {self.cores} cores, {' '.join(self.instruction_sets)}; "
            f"{self.threads} threads; terrazzo {self.terrazzo}, torch {self.torch}, Python "
            f"{self.python}, {self.system}"
        )


def this_machine() -> Hardware:
    facts = cpu_facts(_CPUINFO.read_text(encoding="utf-8") if _CPUINFO.is_file() else "")
    seen = {*facts.get("flags", "").split(), *facts.get("Features", "").split()}
    return Hardware(
        processor=facts.get("model name") or platform.machine(),
        instruction_sets=tuple(each for each in INSTRUCTION_SETS if each in seen),
        cores=len(os.sched_getaffinity(0)),
        cache_bytes=largest_cache(file.read_text() for file in _CACHES.glob("index*/size")),
        threads=torch.get_num_threads(),
        terrazzo=terrazzo.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=platform.platform(terse=True),
    )


def cpu_facts(text: str) -> dict[str, str]:
    """The first processor of /proc/cpuinfo, `name : value` on each line."""
    first = text.split("\n\n")[0]
    lines = [line.partition(":") for line in first.splitlines()]
    return {name.strip(): value.strip() for name, _, value in lines}


def largest_cache(sizes: Iterable[str]) -> int:
    """Bytes, of sizes such as `32768K`; 0 where there are none."""
    texts = [size.strip() for size in sizes]
    known = [each for each in texts if each[-1:] in _UNITS]
    return max((int(each[:-1]) * _UNITS[each[-1]] for each in known), default=0)


class MemoryReader:
    """Reads a buffer that no cache holds, with the threads of torch: what decoding can hope for."""

    def __init__(self, cache_bytes: int, clock: Clock = time.perf_counter) -> None:
        size = max(READ_BYTES, CACHES_READ * cache_bytes)
        self._buffer = torch.ones(size // torch.float32.itemsize)
        self._clock = clock

    def gb_per_s(self) -> float:
        """1e9 bytes per second, of one reading."""
        start = self._clock()
        self._buffer.sum()
        return self._buffer.nbytes / (self._clock() - start) / 1e9
