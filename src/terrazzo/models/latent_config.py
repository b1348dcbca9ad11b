"""Reads how keys, values and perhaps queries are squeezed through latents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from terrazzo.models.architectures import Architecture, AttentionKind
from terrazzo.models.keys import Keys

DIRECT = 0
"""The rank of queries that go through no latent."""

LATENT_EPS = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says."""


@dataclass(frozen=True, slots=True)
class ProjectedHeads:
    """Queries, keys and values are projected from the hidden state."""


@dataclass(frozen=True, slots=True)
class Latent:
    """query_rank, kv_rank: widths of the latents; the first may be DIRECT. plain_dim, turning_dim:
    features of a query and key without and with rotation. value_dim: features of a value.
    """

    query_rank: int
    kv_rank: int
    plain_dim: int
    turning_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        return self.plain_dim + self.turning_dim


AnyHeads: TypeAlias = ProjectedHeads | Latent


def read_heads(keys: Keys, architecture: Architecture) -> AnyHeads:
    """Raises ConfigError for what is missing or illegal."""
    if architecture.attention is AttentionKind.HEADS:
        return ProjectedHeads()
    latent = Latent(
        keys.integer_or("q_lora_rank", DIRECT),
        keys.integer("kv_lora_rank"),
        keys.integer("qk_nope_head_dim"),
        keys.integer("qk_rope_head_dim"),
        keys.integer("v_head_dim"),
    )
    if latent.turning_dim % 2 != 0:
        raise keys.illegal("qk_rope_head_dim", "legal is an even number: pairs of features turn")
    if latent.value_dim > latent.head_dim:
        raise keys.illegal("v_head_dim", f"legal is at most {latent.head_dim}, the width of keys")
    return latent
