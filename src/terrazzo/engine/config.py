"""Engine options, and the limits they become once the model and the memory are known."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields
from typing import Final

from terrazzo.errors import ConfigError
from terrazzo.kernels.policy import KernelPolicy


class Auto(enum.Enum):
    """The value follows from the model and the memory."""

    AUTO = "auto"


AUTO: Final = Auto.AUTO


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user may choose. Raises ConfigError naming the illegal field.

    max_num_seqs: sequences that run at once.
    max_num_batched_tokens: token budget of one step; at least max_num_seqs.
    max_model_len: longest prompt plus output; AUTO: the model's, cut to what memory holds.
    page_size: tokens per page of the KV cache.
    kv_cache_tokens: capacity of the KV cache; AUTO: max_num_seqs * max_model_len, cut to
        memory_fraction of the memory left beside the weights.
    memory_fraction: above 0, at most 1.
    prefix_caching: reuse the pages of equal prompt beginnings.
    kernel_policy: which kernels to prefer; AUTO: INT8 with native kernels, or else
        SPEED if its weights leave room.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    max_model_len: int | Auto = AUTO
    page_size: int = 32
    kv_cache_tokens: int | Auto = AUTO
    memory_fraction: float = 0.5
    prefix_caching: bool = True
    kernel_policy: KernelPolicy | Auto = AUTO

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int) and value < 1 and each.name != "prefix_caching":
                raise ConfigError(f"{each.name} is {value}; legal values are 1 and above")
        if not 0.0 < self.memory_fraction <= 1.0:
            raise ConfigError(
                f"memory_fraction is {self.memory_fraction}; legal values are above 0, at most 1"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, but each of the "
                f"max_num_seqs = {self.max_num_seqs} sequences takes one token of a step; raise "
                "the one or lower the other"
            )


DEFAULT_CONFIG: Final = EngineConfig()


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """An EngineConfig with nothing left open; tokens and pages are counts."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        assert self.max_num_batched_tokens >= self.max_num_seqs
        assert 2 <= self.max_model_len <= self.num_pages * self.page_size

    @property
    def capacity(self) -> int:
        """Tokens the KV cache holds."""
        return self.num_pages * self.page_size
