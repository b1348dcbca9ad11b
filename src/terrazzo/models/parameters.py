"""Everything an architecture has on disk: names, kinds and shapes, un-fused."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from terrazzo.models.architectures import HeadNormRule
from terrazzo.models.config import ModelConfig
from terrazzo.rules import LM_HEAD
from terrazzo.spec import Name

EMBEDDING: Name = "model.embed_tokens"
FINAL_NORM: Name = "model.norm"


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


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The module names of one decoder layer."""

    layer: int

    def _under(self, child: str) -> Name:
        return f"model.layers.{self.layer}.{child}"

    @property
    def input_norm(self) -> Name:
        return self._under("input_layernorm")

    @property
    def post_attention_norm(self) -> Name:
        return self._under("post_attention_layernorm")

    @property
    def query_norm(self) -> Name:
        return self._under("self_attn.q_norm")

    @property
    def key_norm(self) -> Name:
        return self._under("self_attn.k_norm")

    @property
    def qkv(self) -> tuple[Name, Name, Name]:
        return (
            self._under("self_attn.q_proj"),
            self._under("self_attn.k_proj"),
            self._under("self_attn.v_proj"),
        )

    @property
    def output(self) -> tuple[Name]:
        return (self._under("self_attn.o_proj"),)

    @property
    def gate_up(self) -> tuple[Name, Name]:
        return self._under("mlp.gate_proj"), self._under("mlp.up_proj")

    @property
    def down(self) -> tuple[Name]:
        return (self._under("mlp.down_proj"),)


def shared_inputs(config: ModelConfig, layer: int) -> tuple[tuple[Name, ...], ...]:
    """Linears of one layer, grouped by the input they share, in the order they run."""
    assert 0 <= layer < config.num_layers, f"no layer {layer} among {config.num_layers}"
    names = LayerNames(layer)
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
        EMBEDDING, ParameterKind.EMBEDDING, (config.vocab_size, config.hidden_size)
    )
    layers = [
        parameter for layer in range(config.num_layers) for parameter in _layer(config, layer)
    ]
    final_norm = Parameter(FINAL_NORM, ParameterKind.NORM, width)
    heads = () if config.tie_word_embeddings else (head_parameter(config),)
    return (embedding, *layers, final_norm, *heads)


def head_parameter(config: ModelConfig) -> Parameter:
    """The output head as a linear of its own."""
    return Parameter(LM_HEAD, ParameterKind.LINEAR, (config.vocab_size, config.hidden_size))


def _layer(config: ModelConfig, layer: int) -> list[Parameter]:
    names = LayerNames(layer)
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.query_features, config.kv_features
    query_name, *kv_names = names.qkv
    found = [Parameter(names.input_norm, ParameterKind.NORM, (hidden,))]
    found += _linear(query_name, query, hidden, config.qkv_bias)
    for name in kv_names:
        found += _linear(name, kv, hidden, config.qkv_bias)
    if config.architecture.head_norm is HeadNormRule.PER_HEAD:
        for name in (names.query_norm, names.key_norm):
            found.append(Parameter(name, ParameterKind.NORM, (config.head_dim,)))
    found += _linear(names.output[0], hidden, query, config.output_bias)
    found.append(Parameter(names.post_attention_norm, ParameterKind.NORM, (hidden,)))
    for name in names.gate_up:
        found += _linear(name, inner, hidden, config.mlp_bias)
    return found + _linear(names.down[0], hidden, inner, config.mlp_bias)


def _linear(name: Name, out_features: int, in_features: int, has_bias: bool) -> list[Parameter]:
    weight = Parameter(name, ParameterKind.LINEAR, (out_features, in_features))
    bias = Parameter(name, ParameterKind.LINEAR_BIAS, (out_features,))
    return [weight, bias] if has_bias else [weight]
