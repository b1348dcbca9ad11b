"""Mixture of experts: which token goes to which expert, and the linears of all experts.

Tokens are sorted by expert once; then every projection reads and writes rows that stand together.
Experts that see every token, shared ones, need no rows of their own.

Shape suffixes: T tokens, E experts, R rows, one for each pair of a token and an expert it goes to.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from terrazzo.kernels.base import GemmProblem
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
    PLAIN = "one, counted as it is"


@dataclass(frozen=True, slots=True, eq=False)
class Routing:
    """tokens_R: int64, the token of each row. weights_R: float32, what its output counts.
    offsets: E + 1 numbers; rows offsets[e] to offsets[e + 1] are those of expert e. shared_weights:
    float32 [T, 1] or [1, 1], what the output of each shared expert counts.
    """

    tokens_R: Tensor
    weights_R: Tensor
    offsets: tuple[int, ...]
    shared_weights: tuple[Tensor, ...]

    def rows(self, x_RK: Tensor) -> tuple[Tensor, ...]:
        """Those of each expert, as views."""
        return tuple(x_RK[slice(*ends)] for ends in pairwise(self.offsets))

    def gather(self, x_TK: Tensor) -> Tensor:
        """float32 [T, K] -> float32 [R, K]."""
        return x_TK.index_select(0, self.tokens_R)

    def combine(self, y_RN: Tensor, shared: Sequence[Tensor], num_tokens: int) -> Tensor:
        """float32 [R, N], and [T, N] of each shared expert -> float32 [T, N]: outputs counted by
        their weights and added to their tokens. Overwrites its arguments.
        """
        weighted_RN = y_RN.mul_(self.weights_R[:, None])
        y_TN = y_RN.new_zeros((num_tokens, y_RN.shape[1])).index_add_(0, self.tokens_R, weighted_RN)
        for output_TN, weights_T1 in zip(shared, self.shared_weights, strict=True):
            y_TN += output_TN.mul_(weights_T1)
        return y_TN


@dataclass(frozen=True, slots=True)
class Router:
    """Softmax over the routed experts, then the `top_k` best of each token. scale: of weights."""

    num_experts: int
    top_k: int
    weights: TopKWeights
    shared: SharedExpert
    scale: float = 1.0

    def __call__(self, logits_TE: Tensor) -> Routing:
        """float32 [T, E], and one more column for the gate of a shared expert."""
        best = logits_TE[:, : self.num_experts].softmax(dim=-1).topk(self.top_k, dim=-1)
        weights_TR = best.values
        if self.weights is TopKWeights.SUM_TO_ONE:
            weights_TR = weights_TR / weights_TR.sum(dim=-1, keepdim=True)
        # Stable, so that rows of one expert stay in the order of their tokens.
        experts_R, order_R = best.indices.flatten().sort(stable=True)
        counts = torch.bincount(experts_R, minlength=self.num_experts).tolist()
        return Routing(
            order_R // self.top_k,
            weights_TR.flatten()[order_R].mul_(self.scale),
            tuple(accumulate(counts, initial=0)),
            self._shared_weights(logits_TE[:, self.num_experts :]),
        )

    def _shared_weights(self, gates: Tensor) -> tuple[Tensor, ...]:
        if self.shared is SharedExpert.NONE:
            return ()
        gated = self.shared is SharedExpert.GATED
        return (gates.sigmoid() if gated else gates.new_ones(1, 1),)


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """Experts of one shape and one spec: all that a kernel for many weights at once would need.

    members: where they stand among the experts of a routing.
    """

    members: tuple[int, ...]
    experts: tuple[FusedLinear, ...]

    def run(self, x_RK: Tensor, offsets: Sequence[int], out_RN: Tensor) -> None:
        """Overwrites the rows of these experts in `out_RN`; an expert without rows rests."""
        for member, expert in zip(self.members, self.experts, strict=True):
            start, end = offsets[member], offsets[member + 1]
            if start < end:
                expert.run(x_RK[start:end], out_RN[start:end])


class ExpertBank:
    """One projection of every routed expert, each with its own spec.

    experts: in the order of the router. groups: the same, those together that are alike.
    """

    __slots__ = ("experts", "groups")

    def __init__(self, experts: Sequence[FusedLinear]) -> None:
        assert len({expert.out_features for expert in experts}) == 1, "outputs must be of one width"
        self.experts = tuple(experts)
        alike: dict[tuple[GemmProblem, ...], list[int]] = {}
        for member, expert in enumerate(experts):
            alike.setdefault(expert.problems, []).append(member)
        self.groups = tuple(
            ExpertGroup(tuple(members), tuple(experts[member] for member in members))
            for members in alike.values()
        )

    @property
    def names(self) -> tuple[tuple[Name, ...], ...]:
        """Un-fused names of the linears of each expert."""
        return tuple(expert.names for expert in self.experts)

    def __call__(self, x_RK: Tensor, offsets: Sequence[int]) -> Tensor:
        """float32 [R, K], sorted by expert -> float32 [R, N]. offsets: as in `Routing`."""
        out_RN = x_RK.new_empty((x_RK.shape[0], self.experts[0].out_features))
        for group in self.groups:
            group.run(x_RK, offsets, out_RN)
        return out_RN
