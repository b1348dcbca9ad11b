"""Everything an architecture has on disk: names, kinds and shapes, un-fused."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from terrazzo.models.architectures import NO_NORM, HeadNormRule
from terrazzo.models.config import ModelConfig
from terrazzo.models.layout import LayerNames
from terrazzo.spec import Name


class ParameterKind(enum.Enum):
    """A LINEAR has `.weight` where it is dense, and the tensors of the format where quantized."""

    EMBEDDING = "embedding"
    NORM = "norm"
    LINEAR = "linear"
    LINEAR_BIAS = "bias of a linear"


@dataclass(frozen=True, slots=True)
class Parameter:
    """name: the module. shape: of the dense tensor, [out, in] for a linear."""

    name: Name
    kind: ParameterKind
    shape: tuple[int, ...]

    @property
    def tensor(self) -> str:
        """Name of the dense tensor."""
        suffix = "bias" if self.kind is ParameterKind.LINEAR_BIAS else "weight"
        return f"{self.name}.{suffix}"


def shared_inputs(config: ModelConfig, layer: int) -> tuple[tuple[Name, ...], ...]:
    """Linears of one layer, grouped by the input they share, in the order they run."""
    assert 0 <= layer < config.num_layers, f"no layer {layer} among {config.num_layers}"
    names = config.layout.layer(layer)
    return (names.qkv, names.output, names.gate_up, names.down)


def linear_names(config: ModelConfig) -> tuple[Name, ...]:
    """Every linear of the decoder layers in the order they run, without the head."""
    return tuple(
        name
        for layer in range(config.num_layers)
        for group in shared_inputs(config, layer)
        for name in group
    )


def parameters(config: ModelConfig) -> tuple[Parameter, ...]:
    """In the order they are used. A head tied to the embedding has no parameter of its own."""
    width = (config.hidden_size,)
    embedding = Parameter(
        config.layout.embedding, ParameterKind.EMBEDDING, (config.vocab_size, config.hidden_size)
    )
    layers = [
        parameter for layer in range(config.num_layers) for parameter in _layer(config, layer)
    ]
    final_norm = Parameter(config.layout.final_norm, ParameterKind.NORM, width)
    heads = () if config.tie_word_embeddings else (head_parameter(config),)
    return (embedding, *layers, final_norm, *heads)


def head_parameter(config: ModelConfig) -> Parameter:
    """The output head as a linear of its own."""
    shape = (config.vocab_size, config.hidden_size)
    return Parameter(config.layout.head, ParameterKind.LINEAR, shape)


def _layer(config: ModelConfig, layer: int) -> list[Parameter]:
    names, norms = config.layout.layer(layer), config.architecture.norms
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.query_features, config.kv_features
    return [
        *_norm(config, names, norms.before_attention),
        *_linears(names.qkv, (query, kv, kv), hidden, config.qkv_bias),
        *_head_norms(config, names),
        *_linear(names.output[0], hidden, query, config.output_bias),
        *_norm(config, names, norms.after_attention),
        *_norm(config, names, norms.before_mlp),
        *_linears(names.gate_up, (inner, inner), hidden, config.mlp_bias),
        *_linear(names.down[0], hidden, inner, config.mlp_bias),
        *_norm(config, names, norms.after_mlp),
    ]


def _norm(config: ModelConfig, names: LayerNames, child: str) -> list[Parameter]:
    if child == NO_NORM:
        return []
    return [Parameter(names.under(child), ParameterKind.NORM, (config.hidden_size,))]


def _head_norms(config: ModelConfig, names: LayerNames) -> list[Parameter]:
    rule = config.architecture.head_norm
    if rule is HeadNormRule.PLAIN:
        return []
    heads = rule is HeadNormRule.WHOLE
    query = config.query_features if heads else config.head_dim
    key = config.kv_features if heads else config.head_dim
    return [
        Parameter(names.query_norm, ParameterKind.NORM, (query,)),
        Parameter(names.key_norm, ParameterKind.NORM, (key,)),
    ]


def _linears(
    names: tuple[Name, ...], outputs: tuple[int, ...], in_features: int, has_bias: bool
) -> list[Parameter]:
    """Linears of one input: one for each of `outputs`, or all of them fused."""
    sizes = outputs if len(names) == len(outputs) else (sum(outputs),)
    return [
        parameter
        for name, size in zip(names, sizes, strict=True)
        for parameter in _linear(name, size, in_features, has_bias)
    ]


def _linear(name: Name, out_features: int, in_features: int, has_bias: bool) -> list[Parameter]:
    weight = Parameter(name, ParameterKind.LINEAR, (out_features, in_features))
    bias = Parameter(name, ParameterKind.LINEAR_BIAS, (out_features,))
    return [weight, bias] if has_bias else [weight]
