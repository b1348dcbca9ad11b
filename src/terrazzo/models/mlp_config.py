"""Reads which layers have experts, how many, and how a router chooses among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from terrazzo.models.architectures import Architecture, NoExperts
from terrazzo.models.keys import Keys
from terrazzo.nn.moe import SharedExpert, TopKWeights


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """One MLP for every token. features: between up and down."""

    features: int


@dataclass(frozen=True, slots=True)
class ExpertsMlp:
    """num_experts: routed ones, of which each token sees `top_k`. widths: features between up and
    down of each expert, the shared one last.
    """

    num_experts: int
    top_k: int
    weights: TopKWeights
    shared: SharedExpert
    widths: tuple[int, ...]


AnyMlp: TypeAlias = DenseMlp | ExpertsMlp


def read_mlps(keys: Keys, architecture: Architecture, num_layers: int) -> tuple[AnyMlp, ...]:
    """One per layer. Raises ConfigError for what is missing or illegal."""
    dense = DenseMlp(keys.integer("intermediate_size"))
    if isinstance(architecture.experts, NoExperts):
        return (dense,) * num_layers
    features = keys.integer(architecture.experts.features)
    shared = architecture.experts.shared
    others = []
    if shared is SharedExpert.GATED:
        others = [keys.integer("shared_expert_intermediate_size")]
    # Folders that transformers saved use the first name also where the architecture has the second.
    count = keys.integer_or("num_local_experts", keys.integer_or("num_experts", 1))
    sums = keys.switch_or("norm_topk_prob", default=False)
    weights = TopKWeights.SUM_TO_ONE if sums else TopKWeights.PROBABILITIES
    top_k = keys.integer("num_experts_per_tok")
    if top_k > count:
        raise keys.illegal("num_experts_per_tok", f"legal is at most the {count} experts")
    experts = ExpertsMlp(count, top_k, weights, shared, (*[features] * count, *others))
    step = keys.integer_or("decoder_sparse_step", 1)
    plain = keys.wholes_or("mlp_only_layers", ())
    return tuple(
        dense if layer in plain or (layer + 1) % step != 0 else experts
        for layer in range(num_layers)
    )
