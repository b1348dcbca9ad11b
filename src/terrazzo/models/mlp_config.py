"""Reads which layers have experts, how many, and how a router chooses among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from terrazzo.errors import UnsupportedError
from terrazzo.models.architectures import Architecture, AttentionKind, NoExperts
from terrazzo.models.keys import Keys
from terrazzo.nn.moe import SharedExpert, TopKWeights


@dataclass(frozen=True, slots=True)
class DenseMlp:
    """One MLP for every token. features: between up and down."""

    features: int


@dataclass(frozen=True, slots=True)
class ExpertsMlp:
    """num_experts: routed ones, of which each token sees `top_k`. scale: of their weights. widths:
    features between up and down of each expert, the shared one last.
    """

    num_experts: int
    top_k: int
    weights: TopKWeights
    shared: SharedExpert
    widths: tuple[int, ...]
    scale: float = 1.0


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
    if shared is SharedExpert.PLAIN:
        others = [features * keys.integer("n_shared_experts")]
    # Folders that transformers saved use the first name also where the architecture has the second.
    written = keys.integer_or(architecture.experts.count, 1)
    count = keys.integer_or("num_local_experts", written)
    _refuse_unknown_routing(keys, architecture)
    sums = keys.switch_or("norm_topk_prob", default=False)
    weights = TopKWeights.SUM_TO_ONE if sums else TopKWeights.PROBABILITIES
    top_k = keys.integer("num_experts_per_tok")
    if top_k > count:
        raise keys.illegal("num_experts_per_tok", f"legal is at most the {count} experts")
    scale = keys.number_or("routed_scaling_factor", 1.0)
    experts = ExpertsMlp(count, top_k, weights, shared, (*[features] * count, *others), scale)
    step = keys.integer_or("decoder_sparse_step", 1)
    plain = keys.wholes_or("mlp_only_layers", ())
    (first,) = keys.wholes_or("first_k_dense_replace", (0,))
    return tuple(
        dense if layer < first or layer in plain or (layer + 1) % step != 0 else experts
        for layer in range(num_layers)
    )


def _refuse_unknown_routing(keys: Keys, architecture: Architecture) -> None:
    """What DeepSeek's larger models do otherwise, and what implementations disagree on."""
    if architecture.attention is not AttentionKind.LATENT:
        return
    known = {
        "topk_method": (keys.text_or("topk_method", "greedy"), "greedy"),
        "scoring_func": (keys.text_or("scoring_func", "softmax"), "softmax"),
        "moe_layer_freq": (keys.integer_or("moe_layer_freq", 1), 1),
        "norm_topk_prob": (keys.switch_or("norm_topk_prob", default=False), False),
    }
    for key, (seen, supported) in known.items():
        if seen != supported:
            raise UnsupportedError(
                f"{keys.source}: {keys.prefix}{key} is {seen!r}; of {architecture.name} only "
                f"{supported!r} is supported"
            )
