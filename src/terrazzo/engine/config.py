"""Engine options, and the limits they become once the model and the memory are known."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final


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
    prefix_caching: reuse the pages of equal prompt beginnings.
    """

    max_num_seqs: int = 32
    max_num_batched_tokens: int = 1024
    max_model_len: int | Auto = AUTO
    page_size: int = 32
    kv_cache_tokens: int | Auto = AUTO
    memory_fraction: float = 0.5
    prefix_caching: bool = True
