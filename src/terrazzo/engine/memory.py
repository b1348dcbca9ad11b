"""Memory as a plan: how large the KV cache will be and why, before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from terrazzo.engine.config import AUTO, EngineConfig, EngineLimits
from terrazzo.errors import ConfigError
from terrazzo.kernels.policy import KernelPolicy

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """What of a model decides its memory.

    weight_bytes: in the layout of the kernels that kernel_policy prefers. context_length: longest
    input. kv_dtype: of keys and values in the cache.
    """

    weight_bytes: int
    kv_bytes_per_token: int
    context_length: int
    kernel_policy: KernelPolicy = KernelPolicy.SPEED
    kv_dtype: torch.dtype = torch.float32


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The resolved limits and the reason for the size of the KV cache; `str` is for people."""

    limits: EngineLimits
    needs: ModelNeeds
    available_bytes: int
    reason: str

    @property
    def kv_bytes(self) -> int:
        return self.limits.capacity * self.needs.kv_bytes_per_token

    def __str__(self) -> str:
        limits = self.limits
        return (
            f"weights {self.needs.weight_bytes / _MIB:.0f} MiB "
            f"(kernels for {self.needs.kernel_policy.value}), KV cache "
            f"{self.kv_bytes / _MIB:.0f} MiB = {limits.capacity} tokens in {limits.num_pages} "
            f"pages ({self.reason}), of {self.available_bytes / _MIB:.0f} MiB available; "
            f"longest prompt plus output {limits.max_model_len} tokens"
        )


def resolve(config: EngineConfig, needs: ModelNeeds, available_bytes: int) -> MemoryPlan:
    """Size everything `config` left open.

    available_bytes: free memory before the weights are loaded. The KV cache holds what
    max_num_seqs sequences of max_model_len tokens need, or less where memory ends; it is never
    larger than that need. Raises ConfigError when not even a sequence of two tokens fits.
    """
    wanted = config.max_model_len
    longest = needs.context_length if wanted is AUTO else wanted
    if longest > needs.context_length:
        raise ConfigError(
            f"max_model_len is {longest}, but the model knows "
            f"{needs.context_length} positions; ask for at most that"
        )
    need = _pages(longest, config) * config.max_num_seqs
    num_pages, reason = _num_pages(config, needs, available_bytes, need)
    capacity = num_pages * config.page_size
    if capacity < 2 or (wanted is not AUTO and capacity < longest):
        raise ConfigError(
            f"the KV cache holds {max(0, capacity)} tokens ({reason}), but a sequence of "
            f"{max(2, longest)} must fit; free memory, lower max_model_len or raise "
            "memory_fraction or kv_cache_tokens"
        )
    limits = EngineLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=min(longest, capacity),
        page_size=config.page_size,
        num_pages=num_pages,
        prefix_caching=config.prefix_caching,
    )
    return MemoryPlan(limits, needs, available_bytes, reason)


def _num_pages(
    config: EngineConfig, needs: ModelNeeds, available_bytes: int, need: int
) -> tuple[int, str]:
    """Pages and why so many."""
    if config.kv_cache_tokens is not AUTO:
        return _pages(config.kv_cache_tokens, config), "as asked"
    left = available_bytes - needs.weight_bytes
    affordable = int(left * config.memory_fraction) // (needs.kv_bytes_per_token * config.page_size)
    if affordable < need:
        return affordable, f"{config.memory_fraction:.0%} of the memory beside the weights"
    return need, f"all that {config.max_num_seqs} sequences can use"


def _pages(num_tokens: int, config: EngineConfig) -> int:
    return -(-num_tokens // config.page_size)


def available_memory() -> int:
    """Bytes this process may still take: the kernel's estimate, or less under a cgroup limit."""
    facts = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    system = int(facts["MemAvailable"].split()[0]) * 1024
    limit, current = (_cgroup(name) for name in ("memory.max", "memory.current"))
    return min(system, limit - current) if limit else system


def _cgroup(name: str) -> int:
    """A cgroup v2 figure in bytes; 0 where there is none or it is unlimited."""
    file = _CGROUP / name
    text = file.read_text().strip() if file.is_file() else "max"
    return 0 if text == "max" else int(text)
