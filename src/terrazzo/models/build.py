"""Builds the parts of a decoder from a `WeightSource`, each part when it is asked for.

Whoever builds block after block and lets each one go holds one block at a time: quantization does,
while `load` keeps them all.
"""

from __future__ import annotations

from collections.abc import Sequence

from terrazzo.kernels.choose import KernelPolicy
from terrazzo.models.architectures import HeadNormRule
from terrazzo.models.block import AddNormStep, AddStep, AttendStep, Block, GateStep, Stage
from terrazzo.models.config import ModelConfig
from terrazzo.models.decoder import Decoder, Head
from terrazzo.models.parameters import EMBEDDING, FINAL_NORM, LayerNames
from terrazzo.models.source import WeightSource
from terrazzo.nn.attention import Attention, HeadStep
from terrazzo.nn.embedding import Embedding
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.norm import HeadNorm, PlainHeads, RMSNorm
from terrazzo.nn.rope import RotaryEmbedding
from terrazzo.rules import LM_HEAD
from terrazzo.spec import Name


def build_decoder(
    config: ModelConfig, source: WeightSource, policy: KernelPolicy = KernelPolicy.SPEED
) -> Decoder:
    """The whole model; `source` is asked for one module after the other."""
    return Decoder(
        config,
        build_embedding(source),
        build_rotary(config),
        tuple(build_block(config, layer, source, policy) for layer in range(config.num_layers)),
        build_head(config, source, policy),
    )


def build_embedding(source: WeightSource) -> Embedding:
    return Embedding(source.embedding(EMBEDDING))


def build_rotary(config: ModelConfig) -> RotaryEmbedding:
    return RotaryEmbedding.of(config.rope, config.head_dim)


def build_block(
    config: ModelConfig,
    layer: int,
    source: WeightSource,
    policy: KernelPolicy = KernelPolicy.SPEED,
) -> Block:
    """Reads the weights of decoder layer `layer`."""
    names = LayerNames(layer)
    attention = Attention(
        layer,
        config.num_attention_heads,
        config.num_kv_heads,
        config.head_dim,
        _head_step(config, names, source),
    )
    middle_norm = _norm(config, names.post_attention_norm, source)
    stages = (
        Stage(_fused(names.qkv, source, policy), AttendStep(attention)),
        Stage(_fused(names.output, source, policy), AddNormStep(middle_norm)),
        Stage(_fused(names.gate_up, source, policy), GateStep()),
        Stage(_fused(names.down, source, policy), AddStep()),
    )
    return Block(_norm(config, names.input_norm, source), stages)


def build_head(
    config: ModelConfig, source: WeightSource, policy: KernelPolicy = KernelPolicy.SPEED
) -> Head:
    return Head(_norm(config, FINAL_NORM, source), _fused((LM_HEAD,), source, policy))


def _norm(config: ModelConfig, name: Name, source: WeightSource) -> RMSNorm:
    return RMSNorm(source.norm(name), config.rms_norm_eps)


def _head_step(config: ModelConfig, names: LayerNames, source: WeightSource) -> HeadStep:
    if config.architecture.head_norm is HeadNormRule.PLAIN:
        return PlainHeads()
    return HeadNorm.of(
        source.norm(names.query_norm),
        source.norm(names.key_norm),
        config.num_attention_heads,
        config.num_kv_heads,
        config.rms_norm_eps,
    )


def _fused(names: Sequence[Name], source: WeightSource, policy: KernelPolicy) -> FusedLinear:
    return FusedLinear([source.linear(name) for name in names], policy)
