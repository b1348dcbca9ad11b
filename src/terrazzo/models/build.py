"""Builds the parts of a decoder from a `WeightSource`, each part when it is asked for.

Whoever builds block after block and lets each one go holds one block at a time: quantization does,
while `load` keeps them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.kernels.choose import KernelPolicy
from terrazzo.models.architectures import NO_NORM, HeadNormRule
from terrazzo.models.block import (
    AddNormStep,
    AnyStage,
    AttendStep,
    Block,
    GateStep,
    Stage,
    Step,
)
from terrazzo.models.config import ModelConfig
from terrazzo.models.decoder import Decoder, Head
from terrazzo.models.experts import CombineExperts, ExpertStage, GateExperts, RouteStep
from terrazzo.models.latent import LatentStage, SqueezeStep
from terrazzo.models.latent_config import DIRECT, LATENT_EPS, Latent
from terrazzo.models.layout import LayerNames
from terrazzo.models.mlp_config import DenseMlp
from terrazzo.models.parameters import attention_groups, expert_groups
from terrazzo.models.source import WeightSource
from terrazzo.nn.attention import Attention, HeadStep, Scoring
from terrazzo.nn.embedding import Embedding
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.latent import LatentAttention
from terrazzo.nn.moe import ExpertBank, Router
from terrazzo.nn.norm import HeadNorm, Norm, PlainHeads, PlainHidden, ProjectionNorm, RMSNorm
from terrazzo.nn.rope import RotaryEmbeddings
from terrazzo.spec import Name


def build_decoder(
    config: ModelConfig, source: WeightSource, policy: KernelPolicy = KernelPolicy.SPEED
) -> Decoder:
    """The whole model; `source` is asked for one module after the other."""
    return Decoder(
        config,
        build_embedding(config, source),
        build_rotary(config),
        tuple(build_block(config, layer, source, policy) for layer in range(config.num_layers)),
        build_head(config, source, policy),
    )


def build_embedding(config: ModelConfig, source: WeightSource) -> Embedding:
    weight_VH = source.embedding(config.layout.embedding)
    return Embedding(weight_VH, config.multipliers.embedding)


def build_rotary(config: ModelConfig) -> RotaryEmbeddings:
    return RotaryEmbeddings.of(config.ropes, config.rotary_dim, config.architecture.pairing)


def build_block(
    config: ModelConfig,
    layer: int,
    source: WeightSource,
    policy: KernelPolicy = KernelPolicy.SPEED,
) -> Block:
    """Reads the weights of decoder layer `layer`."""
    names, norms = config.layout.layer(layer), config.architecture.norms

    def norm(child: str) -> Norm:
        return PlainHidden() if child == NO_NORM else _norm(config, names.under(child), source)

    multiplier = config.multipliers.residual
    settle = AddNormStep(norm(norms.after_attention), multiplier, norm(norms.before_mlp))
    finish = AddNormStep(norm(norms.after_mlp), multiplier, PlainHidden())
    stages = (
        *_attention_stages(config, layer, source, policy),
        Stage(_fused(names.output, source, policy), settle),
        *_mlp_stages(config, layer, source, policy, finish),
    )
    return Block(norm(norms.before_attention), stages)


def _attention_stages(
    config: ModelConfig, layer: int, source: WeightSource, policy: KernelPolicy
) -> tuple[AnyStage, ...]:
    names, heads = config.layout.layer(layer), config.heads
    if not isinstance(heads, Latent):
        attend = AttendStep(_attention(config, layer, _head_step(config, names, source)))
        return (Stage(_fused(names.qkv, source, policy), attend),)
    is_direct = heads.query_rank == DIRECT
    norms = (
        (names.kv_latent_norm,) if is_direct else (names.query_latent_norm, names.kv_latent_norm)
    )
    squeeze = SqueezeStep(
        config.query_features if is_direct else 0,
        tuple(RMSNorm(source.norm(name), LATENT_EPS) for name in norms),
        heads.turning_dim,
    )
    first, *others = attention_groups(names, heads)
    return (
        Stage(_fused(first, source, policy), squeeze),
        LatentStage(
            tuple(_fused(group, source, policy) for group in others),
            _latent_attention(config, heads, layer),
        ),
    )


def _latent_attention(config: ModelConfig, heads: Latent, layer: int) -> LatentAttention:
    return LatentAttention(
        layer,
        config.num_attention_heads,
        heads.plain_dim,
        heads.turning_dim,
        heads.value_dim,
        config.ropes.index(config.layers[layer].rope),
        _scoring(config, layer),
    )


def _mlp_stages(
    config: ModelConfig, layer: int, source: WeightSource, policy: KernelPolicy, finish: Step
) -> tuple[AnyStage, ...]:
    names, mlp = config.layout.layer(layer), config.mlps[layer]
    if isinstance(mlp, DenseMlp):
        return (
            Stage(_fused(names.gate_up, source, policy), GateStep(config.activation)),
            Stage(_fused(names.down, source, policy), finish),
        )
    groups = expert_groups(names, mlp)

    def experts(
        inputs: Sequence[Sequence[Name]], step: GateExperts | CombineExperts
    ) -> ExpertStage:
        linears = [_fused(names, source, policy) for names in inputs]
        bank = ExpertBank(linears[: mlp.num_experts])
        return ExpertStage(bank, tuple(linears[mlp.num_experts :]), step)

    router = Router(mlp.num_experts, mlp.top_k, mlp.weights, mlp.shared, mlp.scale)
    return (
        Stage(_fused(groups.router, source, policy.exact), RouteStep(router)),
        experts(groups.gate_up, GateExperts(config.activation)),
        experts(groups.down, CombineExperts(finish)),
    )


def _attention(config: ModelConfig, layer: int, normalize: HeadStep) -> Attention:
    return Attention(
        layer,
        config.num_attention_heads,
        config.num_kv_heads,
        config.head_dim,
        normalize,
        config.ropes.index(config.layers[layer].rope),
        _scoring(config, layer),
    )


def _scoring(config: ModelConfig, layer: int) -> Scoring:
    multipliers = config.multipliers
    return Scoring(multipliers.attention, config.layers[layer].window, multipliers.attention_cap)


def build_head(
    config: ModelConfig, source: WeightSource, policy: KernelPolicy = KernelPolicy.SPEED
) -> Head:
    return Head(
        _norm(config, config.layout.final_norm, source),
        _fused((config.layout.head,), source, policy),
        config.multipliers.logits,
        config.multipliers.logits_cap,
    )


def _norm(config: ModelConfig, name: Name, source: WeightSource) -> RMSNorm:
    return RMSNorm(source.norm(name), config.rms_norm_eps)


def _head_step(config: ModelConfig, names: LayerNames, source: WeightSource) -> HeadStep:
    rule, eps = config.architecture.head_norm, config.rms_norm_eps
    if rule is HeadNormRule.PLAIN:
        return PlainHeads()
    query, key = source.norm(names.query_norm), source.norm(names.key_norm)
    if rule is HeadNormRule.WHOLE:
        width = config.head_dim
        return ProjectionNorm(query.view(-1, width), key.view(-1, width), eps)
    return HeadNorm.of(query, key, config.num_attention_heads, config.num_kv_heads, eps)


def _fused(names: Sequence[Name], source: WeightSource, policy: KernelPolicy) -> FusedLinear:
    return FusedLinear([source.linear(name) for name in names], policy)
