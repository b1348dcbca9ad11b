"""The grammar of on-disk names: which tensors make a linear, and which linears GPTQ tools skip."""

from __future__ import annotations

from collections.abc import Mapping

from terrazzo.checkpoint.files import TensorHeader
from terrazzo.spec import Name
from terrazzo.spellings import HEADS, layer_relative

QWEIGHT = "qweight"
PACKED_SUFFIXES = (QWEIGHT, "qzeros", "scales")
GROUP_INDEX = "g_idx"
WEIGHT = "weight"

EMBEDDINGS = frozenset(
    {
        "embed_in",
        "embed_tokens",
        "position_embedding",
        "position_embeddings",
        "shared",
        "tok_embeddings",
        "word_embeddings",
        "wpe",
        "wte",
    }
)
"""Last parts of names of lookup tables: matrices that multiply nothing."""

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Last parts of names of expert routers, which no GPTQ tool quantizes by default."""

TOWERS = frozenset({"visual", "vision_tower", "vision_model", "audio_tower", "audio_model"})
"""Parts of names of encoders for pictures and sound, left dense by GPTQ tools."""


def linear_names(headers: Mapping[str, TensorHeader]) -> dict[Name, str]:
    """Every linear module with the suffix of its weight, `qweight` or `weight`, in name order.

    A module that has both is quantized: the `.weight` is a left-over.
    """
    linears: dict[Name, str] = {}
    for tensor in sorted(headers):
        module, _, suffix = tensor.rpartition(".")
        if suffix == QWEIGHT or (suffix == WEIGHT and _is_linear(module, headers[tensor].shape)):
            linears[module] = min(suffix, linears.get(module, suffix))
    return linears


def is_quantizable(name: Name) -> bool:
    """Whether GPTQ tools quantize a linear of this name unless a rule says otherwise.

    They take the linears inside decoder layers except routers; the head has its own switch.
    """
    parts = name.split(".")
    return name in HEADS or (
        layer_relative(name) != name and parts[-1] not in ROUTERS and TOWERS.isdisjoint(parts)
    )


def _is_linear(module: Name, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2 and module.rpartition(".")[2] not in EMBEDDINGS
