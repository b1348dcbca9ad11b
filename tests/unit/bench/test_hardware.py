"""What /proc and /sys say about a processor."""

from __future__ import annotations

import torch

from terrazzo.bench.hardware import (
    READ_BYTES,
    MemoryReader,
    cpu_facts,
    largest_cache,
    this_machine,
)

CPUINFO = """\
processor\t: 0
model name\t: Some CPU @ 2.5 GHz: fast
flags\t\t: fpu avx avx2 fma
power management:

processor\t: 1
model name\t: Another CPU
"""


def test_the_first_processor_counts() -> None:
    facts = cpu_facts(CPUINFO)
    assert facts["model name"] == "Some CPU @ 2.5 GHz: fast"
    assert facts["flags"].split() == ["fpu", "avx", "avx2", "fma"]
    assert cpu_facts("") == {}


def test_the_largest_cache() -> None:
    assert largest_cache(["32K\n", "512K\n", "36M\n"]) == 36 << 20
    assert largest_cache(["", "12"]) == 0


def test_this_machine_is_described() -> None:
    hardware = this_machine()
    assert hardware.processor
    assert hardware.cores >= 1
    assert hardware.threads == torch.get_num_threads()
    assert hardware.torch == torch.__version__
    assert f"{hardware.threads} threads" in str(hardware)


def test_reading_memory_counts_every_byte() -> None:
    moments = iter([10.0, 10.5])
    reader = MemoryReader(0, clock=lambda: next(moments))
    assert reader.gb_per_s() == READ_BYTES / 0.5 / 1e9
