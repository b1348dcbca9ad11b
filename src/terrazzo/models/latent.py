"""Latent attention of a layer, as two stages that take the place of one.

    stage 0     q or its latent, and the latent of keys and values, of x -> norms of the latents
    stage 0b    q of its latent, where it has one; k, v of theirs -> attention -> x = heads

In stage 0b every linear has an input of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terrazzo.models.block import Flow
from terrazzo.nn.attention import Pass
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.latent import LatentAttention
from terrazzo.nn.norm import RMSNorm
from terrazzo.spec import Name


@dataclass(frozen=True, slots=True)
class LatentFlow(Flow):
    """latents: float32 [T, rank], of queries where they have one, and of keys and values. direct:
    the queries themselves, where they have none. key_TR: the part of the key that turns. x_TK: the
    last of the latents.
    """

    latents: tuple[Tensor, ...]
    direct: tuple[Tensor, ...]
    key_TR: Tensor

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.latents


@dataclass(frozen=True, slots=True)
class SqueezeStep:
    """What comes out of the first linears, side by side: queries as they are (direct_width), or
    latents as wide as their norms, then turning_width features of the key.
    """

    direct_width: int
    norms: tuple[RMSNorm, ...]
    turning_width: int

    def __call__(self, flow: Flow, y_TN: Tensor, forward: Pass) -> Flow:
        ranks = [norm.weight.shape[0] for norm in self.norms]
        widths = [self.direct_width, *ranks, self.turning_width]
        direct, *squeezed, key_TR = torch.split(y_TN, widths, dim=1)
        latents = tuple(norm(part) for norm, part in zip(self.norms, squeezed, strict=True))
        queries = (direct,) if self.direct_width else ()
        return LatentFlow(flow.residual_TH, latents[-1], latents, queries, key_TR)


@dataclass(frozen=True, slots=True)
class LatentStage:
    """linears: those of queries where they have a latent, and those of keys and values."""

    linears: tuple[FusedLinear, ...]
    attention: LatentAttention

    @property
    def groups(self) -> tuple[tuple[Name, ...], ...]:
        return tuple(linear.names for linear in self.linears)

    @property
    def num_routed(self) -> int:
        return 0

    def with_linears(self, linears: Sequence[FusedLinear]) -> LatentStage:
        """This stage with other weights; their names and order must be the same."""
        stage = replace(self, linears=tuple(linears))
        assert stage.groups == self.groups, f"{stage.groups} cannot stand in for {self.groups}"
        return stage

    def __call__(self, flow: Flow, forward: Pass) -> Flow:
        assert isinstance(flow, LatentFlow), "keys come from latents"
        made = [linear(x_TK) for linear, x_TK in zip(self.linears, flow.latents, strict=True)]
        q_TN, kv_TN = (*flow.direct, *made)
        return Flow(flow.residual_TH, self.attention(q_TN, kv_TN, flow.key_TR, forward))
