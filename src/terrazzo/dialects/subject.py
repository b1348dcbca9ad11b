"""What a prediction looks at: the linears as the tensors have them, and the configs as written."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.config import EMBEDDED_KEY, SEPARATE_FILES, embedded_config
from terrazzo.checkpoint.json_files import read_json
from terrazzo.checkpoint.zero_points import ZeroReading
from terrazzo.rules import Rule, RuleSet
from terrazzo.spec import Dense, Name, QuantSpec, WordFormat
from terrazzo.spellings import Spelling

SEQUENTIAL = ""
"""The `order` of a linear whose groups follow its inputs."""

WORD_TYPE = "int32"
"""The type of words that every engine reads."""


class Place(enum.Enum):
    """Where config.json has its quantization config."""

    TOP = "quantization_config"
    TEXT_TOWER = "text_config.quantization_config"


@dataclass(frozen=True, slots=True)
class Linear:
    """One module on disk. order: a digest of `g_idx`, or SEQUENTIAL. zeros: how they are
    read. word_type: `pack_dtype` as the tensors have it.
    """

    name: Name
    spec: QuantSpec | Dense
    out_features: int
    in_features: int
    order: str = SEQUENTIAL
    zeros: ZeroReading = ZeroReading.AS_LABELLED
    word_type: str = WORD_TYPE

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, slots=True)
class Subject:
    """embedded: `quantization_config` of config.json, separate: quantize_config.json; both as
    written, in their order, empty where there is none. label, rules: as GPTQModel takes them.
    architecture: the first of config.json. ties_head: the head is the embedding.
    """

    linears: tuple[Linear, ...]
    embedded: Mapping[str, Any]
    separate: Mapping[str, Any]
    label: WordFormat
    rules: RuleSet
    architecture: str
    ties_head: bool
    place: Place = Place.TOP

    @property
    def outer(self) -> Mapping[str, Any]:
        """`quantization_config` as engines see it that do not look into the text tower."""
        return self.embedded if self.place is Place.TOP else {}

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Subject:
        config = checkpoint.model_config
        embedded = embedded_config(config)
        files = [checkpoint.folder / name for name in SEPARATE_FILES]
        separate = [read_json(file) for file in files if file.is_file()]
        return cls(
            linears=_linears(checkpoint),
            embedded=embedded if isinstance(embedded, Mapping) else {},
            separate=separate[0] if separate else {},
            label=checkpoint.word_format,
            rules=replace(checkpoint.rules, rules=tuple(_dynamic(checkpoint.rules))),
            architecture=str(next(iter(config.get("architectures") or []), "")),
            ties_head=bool(config.get("tie_word_embeddings", False)),
            place=Place.TEXT_TOWER if config.get(EMBEDDED_KEY) is None else Place.TOP,
        )


def _dynamic(rules: RuleSet) -> Iterator[Rule]:
    """The rules that `dynamic` has, without those that other fields were translated into; no
    engine tries them on other spellings than its own.
    """
    for rule in rules.rules:
        if rule.entry == rule.key:
            yield replace(rule, spelling=Spelling.AS_STORED)


def _linears(checkpoint: Checkpoint) -> tuple[Linear, ...]:
    mislabelled = {c.module for c in checkpoint.conflicts if c.field == "checkpoint_format"}
    return tuple(
        Linear(
            name,
            resolution.spec,
            *checkpoint.linear_shape(name),
            _order(checkpoint, name, resolution.spec),
            ZeroReading.MIDDLE if name in mislabelled else ZeroReading.AS_LABELLED,
            _word_type(checkpoint, name, resolution.spec),
        )
        for name, resolution in checkpoint.plan.items()
    )


def _word_type(checkpoint: Checkpoint, name: Name, spec: QuantSpec | Dense) -> str:
    if not isinstance(spec, QuantSpec):
        return WORD_TYPE
    return str(checkpoint.dtype(f"{name}.qweight")).removeprefix("torch.")


def _order(checkpoint: Checkpoint, name: Name, spec: QuantSpec | Dense) -> str:
    if not isinstance(spec, QuantSpec) or not spec.desc_act:
        return SEQUENTIAL
    return hashlib.sha256(checkpoint.tensor(f"{name}.g_idx").numpy().tobytes()).hexdigest()
