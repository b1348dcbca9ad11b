"""Mixture of experts: which token goes to which expert, and the linears of all experts.

The rows of a layer are sorted by expert, so that each expert works on one slice. An expert that
sees every token, a shared one, is the last slice, whose weight is the sigmoid of its own gate.

Shape suffixes: T tokens, E experts, R rows, one for each pair of a token and an expert it goes to.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.nn.fused import FusedLinear
from terrazzo.spec import Name


class TopKWeights(enum.Enum):
    """What the weights of the chosen experts of one token are."""

    PROBABILITIES = "as the softmax over all experts gave them"
    SUM_TO_ONE = "divided by their sum"


class SharedExpert(enum.Enum):
    """Whether an expert sees every token, beside the routed ones."""

    NONE = "none"
    GATED = "one, weighted by the sigmoid of its gate"


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """tokens_R: int64, the token of each row. weights_R: float32, what its output counts. slices:
    the rows of each expert, in order and without gaps; the shared one is the last.
    """

    tokens_R: Tensor
    weights_R: Tensor
    slices: tuple[slice, ...]

    def gather(self, x_TK: Tensor) -> Tensor:
        """float32 [T, K] -> float32 [R, K]."""
        return x_TK.index_select(0, self.tokens_R)

    def combine(self, y_RN: Tensor, num_tokens: int) -> Tensor:
        """float32 [R, N] -> float32 [T, N], each row counted by its weight and added to its token.
        Overwrites `y_RN`.
        """
        weighted_RN = y_RN.mul_(self.weights_R[:, None])
        return y_RN.new_zeros((num_tokens, y_RN.shape[1])).index_add_(0, self.tokens_R, weighted_RN)


@dataclass(frozen=True, slots=True)
class Router:
    """Softmax over the routed experts, then the `top_k` best of each token."""

    num_experts: int
    top_k: int
    weights: TopKWeights
    shared: SharedExpert

    def __call__(self, logits_TE: Tensor) -> Routing:
        """float32 [T, E], and one more column for the gate of a shared expert."""
        num_tokens = logits_TE.shape[0]
        best = logits_TE[:, : self.num_experts].softmax(dim=-1).topk(self.top_k, dim=-1)
        weights_TR = best.values
        if self.weights is TopKWeights.SUM_TO_ONE:
            weights_TR = weights_TR / weights_TR.sum(dim=-1, keepdim=True)
        # Stable, so that rows of one expert stay in the order of their tokens.
        experts_R, order_R = best.indices.flatten().sort(stable=True)
        tokens = [order_R // self.top_k]
        weights = [weights_TR.flatten()[order_R]]
        counts = torch.bincount(experts_R, minlength=self.num_experts).tolist()
        if self.shared is SharedExpert.GATED:
            tokens.append(torch.arange(num_tokens, device=logits_TE.device))
            weights.append(logits_TE[:, self.num_experts].sigmoid())
            counts.append(num_tokens)
        return Routing(torch.cat(tokens), torch.cat(weights), _slices(counts))


class ExpertBank:
    """One projection of every expert, each with its own spec. experts: in the order of slices."""

    __slots__ = ("experts",)

    def __init__(self, experts: Sequence[FusedLinear]) -> None:
        self.experts = tuple(experts)

    @property
    def names(self) -> tuple[tuple[Name, ...], ...]:
        """Un-fused names of the linears of each expert."""
        return tuple(expert.names for expert in self.experts)

    def __call__(self, rows: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """float32 [R_e, K_e] of each expert -> float32 [R_e, N_e]; experts without rows rest."""
        return tuple(
            expert(x_RK) if len(x_RK) else x_RK.new_empty((0, expert.out_features))
            for expert, x_RK in zip(self.experts, rows, strict=True)
        )


def _slices(counts: Sequence[int]) -> tuple[slice, ...]:
    slices, start = [], 0
    for count in counts:
        slices.append(slice(start, start + count))
        start += count
    return tuple(slices)
