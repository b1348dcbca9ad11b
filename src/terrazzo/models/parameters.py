"""Everything an architecture has on disk: names, kinds and shapes, un-fused."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from terrazzo.models.architectures import NO_NORM, HeadNormRule
from terrazzo.models.config import ModelConfig
from terrazzo.models.latent_config import DIRECT, AnyHeads, Latent
from terrazzo.models.layout import LayerNames
from terrazzo.models.mlp_config import AnyMlp, DenseMlp, ExpertsMlp
from terrazzo.nn.moe import SharedExpert
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
    names, mlp = config.layout.layer(layer), config.mlps[layer]
    attention = (*attention_groups(names, config.heads), names.output)
    if isinstance(mlp, DenseMlp):
        return (*attention, names.gate_up, names.down)
    groups = expert_groups(names, mlp)
    return (*attention, groups.router, *groups.gate_up, *groups.down)


def attention_groups(names: LayerNames, heads: AnyHeads) -> tuple[tuple[Name, ...], ...]:
    """The linears before attention, grouped by the input they share."""
    if not isinstance(heads, Latent):
        return (names.qkv,)
    if heads.query_rank == DIRECT:
        return ((names.query, names.kv_latent), (names.kv_of_latent,))
    first = (names.query_latent, names.kv_latent)
    return (first, (names.query_of_latent,), (names.kv_of_latent,))


@dataclass(frozen=True, slots=True)
class ExpertGroups:
    """The linears of a layer with experts. router: with the gate of a shared expert. gate_up, down:
    of each expert, the shared one last.
    """

    router: tuple[Name, ...]
    gate_up: tuple[tuple[Name, ...], ...]
    down: tuple[tuple[Name], ...]


def expert_groups(names: LayerNames, mlp: ExpertsMlp) -> ExpertGroups:
    """Names of linears, grouped by the input they share."""
    shards, experts = names.experts, [names.expert(index) for index in range(mlp.num_experts)]
    gate_up = [(f"{expert}.{shards.gate}", f"{expert}.{shards.up}") for expert in experts]
    down = [(f"{expert}.{shards.down}",) for expert in experts]
    if mlp.shared is SharedExpert.NONE:
        return ExpertGroups((names.router,), tuple(gate_up), tuple(down))
    gated = mlp.shared is SharedExpert.GATED
    shared = names.shared_expert if gated else names.shared_experts
    gate_up.append((f"{shared}.gate_proj", f"{shared}.up_proj"))
    down.append((f"{shared}.down_proj",))
    router = (names.router, names.shared_gate) if gated else (names.router,)
    return ExpertGroups(router, tuple(gate_up), tuple(down))


def router_names(config: ModelConfig) -> frozenset[Name]:
    """Linears that decide which experts run, and how much a shared expert counts."""
    return frozenset(
        name
        for layer, mlp in enumerate(config.mlps)
        if isinstance(mlp, ExpertsMlp)
        for name in expert_groups(config.layout.layer(layer), mlp).router
    )


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
    hidden = config.hidden_size
    return [
        *_norm(config, names, norms.before_attention),
        *_attention(config, names),
        *_linear(names.output[0], hidden, config.attended_features, config.output_bias),
        *_norm(config, names, norms.after_attention),
        *_norm(config, names, norms.before_mlp),
        *_mlp(config, names, config.mlps[layer]),
        *_norm(config, names, norms.after_mlp),
    ]


def _attention(config: ModelConfig, names: LayerNames) -> list[Parameter]:
    heads, hidden = config.heads, config.hidden_size
    if not isinstance(heads, Latent):
        query, kv = config.query_features, config.kv_features
        linears = _linears(names.qkv, (query, kv, kv), hidden, config.qkv_bias)
        return [*linears, *_head_norms(config, names)]
    squeezed = heads.kv_rank + heads.turning_dim
    expanded = config.num_attention_heads * (heads.plain_dim + heads.value_dim)
    keys = [
        *_linear(names.kv_latent, squeezed, hidden, False),
        Parameter(names.kv_latent_norm, ParameterKind.NORM, (heads.kv_rank,)),
        *_linear(names.kv_of_latent, expanded, heads.kv_rank, False),
    ]
    if heads.query_rank == DIRECT:
        return [*_linear(names.query, config.query_features, hidden, False), *keys]
    return [
        *_linear(names.query_latent, heads.query_rank, hidden, False),
        Parameter(names.query_latent_norm, ParameterKind.NORM, (heads.query_rank,)),
        *_linear(names.query_of_latent, config.query_features, heads.query_rank, False),
        *keys,
    ]


def _mlp(config: ModelConfig, names: LayerNames, mlp: AnyMlp) -> list[Parameter]:
    hidden, bias = config.hidden_size, config.mlp_bias
    if isinstance(mlp, DenseMlp):
        gate_up = _linears(names.gate_up, (mlp.features, mlp.features), hidden, bias)
        return [*gate_up, *_linear(names.down[0], hidden, mlp.features, bias)]
    groups = expert_groups(names, mlp)
    widths = mlp.widths
    router_outputs = (mlp.num_experts, 1)[: len(groups.router)]
    linears = _linears(groups.router, router_outputs, hidden, False)
    for group, width in zip(groups.gate_up, widths, strict=True):
        linears += _linears(group, (width, width), hidden, bias)
    for (name,), width in zip(groups.down, widths, strict=True):
        linears += _linear(name, hidden, width, bias)
    return linears


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
