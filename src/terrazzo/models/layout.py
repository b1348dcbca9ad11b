"""How a checkpoint names the modules of a decoder; its tensors decide."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from terrazzo.spec import Name
from terrazzo.spellings import HEADS, LM_HEAD, NESTED_HEAD, TOWERS

QKV = "self_attn.qkv_proj"
GATE_UP = "mlp.gate_up_proj"
SHARDS = {
    QKV: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    GATE_UP: ("mlp.gate_proj", "mlp.up_proj"),
}
"""Linears that some tools store as one module, its shards along the output in this order."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What the modules of experts are called below a layer. root: of the router and the experts."""

    root: str
    gate: str
    up: str
    down: str


EXPERT_NAMES = ExpertNames("mlp", "gate_proj", "up_proj", "down_proj")
MIXTRAL_NAMES = ExpertNames("block_sparse_moe", "w1", "w3", "w2")
"""The second is the older spelling of Mixtral."""

PREFIXES = tuple(each.value.removesuffix(".layers") for each in TOWERS)
"""Where the decoder is: alone, or beside encoders for pictures and sound."""


@dataclass(frozen=True, slots=True)
class Layout:
    """prefix: of every module but the head. fused: the keys of SHARDS that are one module."""

    prefix: str = PREFIXES[0]
    head: Name = LM_HEAD
    fused: frozenset[str] = frozenset()
    experts: ExpertNames = EXPERT_NAMES

    @classmethod
    def of(cls, tensor_names: Collection[str], usual: frozenset[str]) -> Layout:
        """What the tensors say; where they say nothing, `usual` linears are fused."""
        prefixes = [each for each in PREFIXES if _has_embedding(each, tensor_names)]
        prefix = prefixes[0] if prefixes else PREFIXES[0]
        head = HEADS[any(name.startswith(f"{NESTED_HEAD}.") for name in tensor_names)]
        first_layer = f"{prefix}.layers.0."
        inside = [name.removeprefix(first_layer) for name in tensor_names]
        fused = {each for each in SHARDS if _is_fused(each, inside, each in usual)}
        older = any(f".{MIXTRAL_NAMES.root}." in name for name in tensor_names)
        experts = MIXTRAL_NAMES if older else EXPERT_NAMES
        return cls(prefix, head, frozenset(fused), experts)

    @property
    def embedding(self) -> Name:
        return f"{self.prefix}.embed_tokens"

    @property
    def final_norm(self) -> Name:
        return f"{self.prefix}.norm"

    def layer(self, index: int) -> LayerNames:
        return LayerNames(f"{self.prefix}.layers.{index}", self.fused, self.experts)


def _has_embedding(prefix: str, tensor_names: Collection[str]) -> bool:
    """A few tools quantize it like a linear."""
    name = f"{prefix}.embed_tokens"
    return f"{name}.weight" in tensor_names or f"{name}.qweight" in tensor_names


def _is_fused(fusion: str, inside: Iterable[str], usual: bool) -> bool:
    """inside: names of tensors below the first layer."""
    modules = {name.rpartition(".")[0] for name in inside}
    if fusion in modules:
        return True
    return usual and modules.isdisjoint(SHARDS[fusion])


@dataclass(frozen=True, slots=True)
class LayerNames:
    """The module names of one decoder layer. root: its own name."""

    root: Name
    fused: frozenset[str]
    experts: ExpertNames

    def under(self, child: str) -> Name:
        return f"{self.root}.{child}"

    @property
    def query_norm(self) -> Name:
        return self.under("self_attn.q_norm")

    @property
    def key_norm(self) -> Name:
        return self.under("self_attn.k_norm")

    @property
    def qkv(self) -> tuple[Name, ...]:
        return self._shards(QKV)

    @property
    def output(self) -> tuple[Name]:
        return (self.under("self_attn.o_proj"),)

    @property
    def query_latent(self) -> Name:
        return self.under("self_attn.q_a_proj")

    @property
    def query_latent_norm(self) -> Name:
        return self.under("self_attn.q_a_layernorm")

    @property
    def query_of_latent(self) -> Name:
        return self.under("self_attn.q_b_proj")

    @property
    def query(self) -> Name:
        return self.under("self_attn.q_proj")

    @property
    def kv_latent(self) -> Name:
        """With the part of the key that turns."""
        return self.under("self_attn.kv_a_proj_with_mqa")

    @property
    def kv_latent_norm(self) -> Name:
        return self.under("self_attn.kv_a_layernorm")

    @property
    def kv_of_latent(self) -> Name:
        return self.under("self_attn.kv_b_proj")

    @property
    def gate_up(self) -> tuple[Name, ...]:
        return self._shards(GATE_UP)

    @property
    def down(self) -> tuple[Name]:
        return (self.under("mlp.down_proj"),)

    @property
    def router(self) -> Name:
        return self.under(f"{self.experts.root}.gate")

    @property
    def shared_gate(self) -> Name:
        return self.under(f"{self.experts.root}.shared_expert_gate")

    @property
    def shared_expert(self) -> Name:
        return self.under(f"{self.experts.root}.shared_expert")

    @property
    def shared_experts(self) -> Name:
        """Several as one, of their widths together."""
        return self.under(f"{self.experts.root}.shared_experts")

    def expert(self, index: int) -> Name:
        return self.under(f"{self.experts.root}.experts.{index}")

    def _shards(self, fusion: str) -> tuple[Name, ...]:
        names = (fusion,) if fusion in self.fused else SHARDS[fusion]
        return tuple(self.under(name) for name in names)
