"""The numbers that some architectures multiply or cap hidden states and scores with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from terrazzo.models.architectures import Architecture, EmbeddingRule, ScaleRule
from terrazzo.models.keys import Keys
from terrazzo.nn.grouped import NO_CAP


@dataclass(frozen=True, slots=True)
class Multipliers:
    """attention: of the products of queries and keys. embedding: of token embeddings. residual: of
    what attention and MLP add to the stream. logits: of the logits. attention_cap, logits_cap: soft
    caps of scores and of logits, infinite where there is none.
    """

    attention: float
    embedding: float
    residual: float
    logits: float
    attention_cap: float
    logits_cap: float


def read_multipliers(
    keys: Keys, architecture: Architecture, hidden_size: int, head_dim: int
) -> Multipliers:
    """Keys that the row of the architecture does not know are not read."""

    def known(key: str, otherwise: float) -> float:
        return keys.number_or(key, otherwise) if key in architecture.defaults else otherwise

    root = hidden_size**0.5 if architecture.embedding is EmbeddingRule.ROOT_OF_HIDDEN else 1.0
    return Multipliers(
        attention=_attention(keys, architecture.scale, head_dim),
        embedding=root * known("embedding_multiplier", 1.0),
        residual=known("residual_multiplier", 1.0),
        logits=1.0 / known("logits_scaling", 1.0),
        attention_cap=known("attn_logit_softcapping", NO_CAP),
        logits_cap=known("final_logit_softcapping", NO_CAP),
    )


def _attention(keys: Keys, rule: ScaleRule, head_dim: int) -> float:
    if rule is ScaleRule.MULTIPLIER:
        return keys.number(rule.value)
    divisor = keys.number(rule.value) if rule is ScaleRule.QUERY_SCALAR else head_dim
    grown = _yarn_growth(keys) if rule is ScaleRule.HEAD_DIM_AND_YARN else 1.0
    return grown**2 / math.sqrt(divisor)


def _yarn_growth(keys: Keys) -> float:
    """Of queries, and of keys: DeepSeek's YaRN stretches scores, not sines and cosines."""
    scaling = keys.object("rope_parameters" if keys.has("rope_parameters") else "rope_scaling")
    weight = scaling.number_or(ScaleRule.HEAD_DIM_AND_YARN.value, 0.0)
    factor = scaling.number_or("factor", 1.0)
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
