"""Writes a checkpoint anew so that an engine loads it, with the same numbers.

First everything is planned: specs, rules, and what the engine will make of the result. Only if that
is good is anything written, and each module is compared with its original on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.companions import companion_files
from terrazzo.checkpoint.config import EMBEDDED_KEY
from terrazzo.checkpoint.description import Description
from terrazzo.checkpoint.names import GROUP_INDEX, PACKED_SUFFIXES, WEIGHT
from terrazzo.checkpoint.writer import CheckpointWriter
from terrazzo.checkpoint.zero_points import ZeroReading
from terrazzo.dialects.emit import rules_for
from terrazzo.dialects.engines import Engine
from terrazzo.dialects.exact import (
    input_order,
    recode,
    symmetric_bits,
    with_inputs,
    with_outputs,
)
from terrazzo.dialects.prediction import Outcome, Prediction, Refusal
from terrazzo.dialects.reach import REACH, Order, Scope, Zeros
from terrazzo.dialects.subject import SEQUENTIAL, WORD_TYPE, Linear, Place, Subject
from terrazzo.errors import UnsupportedError
from terrazzo.packing import PLANAR_ONLY_BITS, QuantTensor, dequantize
from terrazzo.rules import Plan, RuleSet
from terrazzo.spec import Format, Name, QuantSpec

_MAKERS = ("gate_proj", "up_proj")
"""Their outputs are multiplied element by element and become the input of down_proj."""


_NAMES_SHOWN = 6
_CONFIG_FIELDS = (
    *("bits", "group_size", "sym", "desc_act", "lm_head", "checkpoint_format", "dynamic"),
    *("modules_in_block_to_quantize", "quant_method"),
)


@dataclass(frozen=True, slots=True)
class Conversion:
    """before, after: what the engine makes of the original and of the copy. changes: a line for
    each module that is not what it was. source_bytes, num_bytes: of the tensors of both.
    """

    before: Prediction
    after: Prediction
    changes: tuple[str, ...]
    source_bytes: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Folds:
    """New orders of features between linears. inputs, outputs: module -> int64 order."""

    inputs: Mapping[Name, Tensor] = field(default_factory=dict)
    outputs: Mapping[Name, Tensor] = field(default_factory=dict)


def convert(folder: Path, out: Path, engine: Engine) -> Conversion:
    """Write `out` so that `engine` loads it; every weight keeps its value to the bit.

    Bits may grow and groups be cut finer. Where the order of activation is folded into gate and up,
    features between them and down_proj change places, which changes no result. Raises
    UnsupportedError with every module that cannot be written so, and why; then nothing is written.
    """
    checkpoint = Checkpoint(folder)
    subject = Subject.of(checkpoint)
    folds = _folds(checkpoint, subject, engine)
    linears = tuple(_planned(checkpoint, subject, engine, folds))
    rules = rules_for(linears)
    description = _description(checkpoint, rules, linears, engine)
    form = _format(linears)
    after = _promised(subject, linears, description, form, engine)
    with CheckpointWriter(out, form) as writer:
        _write(checkpoint, linears, folds, writer)
        for file in companion_files(checkpoint.folder):
            writer.copy_file(file)
        writer.commit(description)
    return Conversion(
        engine.predict(subject),
        after,
        tuple(_changes(subject, linears, folds, description.documents(form)["config.json"])),
        source_bytes=_num_bytes(checkpoint),
        num_bytes=_num_bytes(Checkpoint(out)),
    )


def _folds(checkpoint: Checkpoint, subject: Subject, engine: Engine) -> Folds:
    """Act-order of down_proj, where the engine has none and gate and up can take it over."""
    if REACH[engine.name].order is Order.ANY:
        return Folds()
    names = {linear.name for linear in subject.linears}
    inputs: dict[Name, Tensor] = {}
    outputs: dict[Name, Tensor] = {}
    for linear in subject.linears:
        parent, _, leaf = linear.name.rpartition(".")
        makers = [f"{parent}.{maker}" for maker in _MAKERS]
        if leaf == "down_proj" and linear.order != SEQUENTIAL and names.issuperset(makers):
            weight = checkpoint.quant_tensor(linear.name)
            order = input_order(weight)
            if not with_inputs(weight, order).spec.desc_act:
                inputs[linear.name] = order
                outputs |= dict.fromkeys(makers, order)
    return Folds(inputs, outputs)


def _planned(
    checkpoint: Checkpoint, subject: Subject, engine: Engine, folds: Folds
) -> Iterator[Linear]:
    """Every linear as it will be. UnsupportedError lists those that cannot be."""
    reach = REACH[engine.name]
    folded = [_folded(linear, folds) for linear in subject.linears]
    problems: list[str] = []
    specs: dict[Name, QuantSpec] = {}
    for tied in reach.ties(folded):
        packed = [linear for linear in tied if isinstance(linear.spec, QuantSpec)]
        needs = _needs(checkpoint, packed, reach.zeros)
        try:
            if packed:
                specs |= dict.fromkeys([x.name for x in packed], reach.spec_for(tied, needs))
        except Refusal as refusal:
            problems.append(f"{_names([linear.name for linear in tied])}: {refusal}")
    if problems:
        raise _unsupported(engine, problems)
    for linear in folded:
        yield replace(
            linear,
            spec=specs.get(linear.name, linear.spec),
            zeros=ZeroReading.AS_LABELLED,
            word_type=WORD_TYPE,
        )


def _folded(linear: Linear, folds: Folds) -> Linear:
    if linear.name not in folds.inputs:
        return linear
    assert isinstance(linear.spec, QuantSpec)
    return replace(linear, spec=replace(linear.spec, desc_act=False), order=SEQUENTIAL)


def _needs(checkpoint: Checkpoint, packed: Sequence[Linear], zeros: Zeros) -> dict[Name, int]:
    """Bits around the middle code; the codes are read only where zero points are elsewhere."""
    needs = {}
    for linear in packed:
        assert isinstance(linear.spec, QuantSpec)
        reads = zeros is Zeros.MIDDLE and not linear.spec.sym
        needs[linear.name] = (
            symmetric_bits(checkpoint.quant_tensor(linear.name)) if reads else linear.spec.bits
        )
    return needs


def _description(
    checkpoint: Checkpoint, rules: RuleSet, linears: Sequence[Linear], engine: Engine
) -> Description:
    packed = [linear.name for linear in linears if isinstance(linear.spec, QuantSpec)]
    plan = Plan(replace(rules.resolve_name(each.name), spec=each.spec) for each in linears)
    is_list_read = REACH[engine.name].scope is Scope.LAYERS
    return Description(
        checkpoint.model_config,
        rules,
        plan,
        facts={"converted_for": engine.title},
        fields={"modules_in_block_to_quantize": [packed]} if is_list_read else {},
    )


def _format(linears: Sequence[Linear]) -> Format:
    specs = [linear.spec for linear in linears if isinstance(linear.spec, QuantSpec)]
    if any(spec.bits in PLANAR_ONLY_BITS for spec in specs):
        return Format.GPTQ_P
    return Format.GPTQ if all(spec.sym for spec in specs) else Format.GPTQ_V2


def _promised(
    subject: Subject,
    linears: tuple[Linear, ...],
    description: Description,
    form: Format,
    engine: Engine,
) -> Prediction:
    """What the engine will make of the folder before it is written, whatever sorts its rules."""
    embedded = description.documents(form)["config.json"][EMBEDDED_KEY]
    after = replace(
        subject,
        linears=linears,
        embedded=embedded,
        separate=embedded,
        label=form,
        rules=description.rules,
        place=Place.TOP,
    )
    rules = dict(sorted(embedded.get("dynamic", {}).items()))
    sorted_after = replace(after, embedded={**embedded, "dynamic": rules})
    for each in (after, sorted_after):
        prediction = engine.predict(each)
        if prediction.outcome is not Outcome.LOADS:
            problems = [f"{_names(n)}: {f.reason}" for f, n in prediction.grouped()]
            raise _unsupported(engine, problems)
    return engine.predict(after)


def _write(
    checkpoint: Checkpoint, linears: Sequence[Linear], folds: Folds, writer: CheckpointWriter
) -> None:
    specs = {x.name: x.spec for x in linears if isinstance(x.spec, QuantSpec)}
    for name, spec in specs.items():
        original = _reordered(checkpoint.quant_tensor(name), name, folds)
        weight = recode(original, spec)
        assert torch.equal(dequantize(weight), dequantize(original)), f"{name} changed its value"
        writer.add_quantized(name, weight)
    replaced = {
        f"{n}.{suffix}" for n in specs for suffix in (*PACKED_SUFFIXES, GROUP_INDEX, WEIGHT)
    }
    for tensor in checkpoint.tensor_names:
        if tensor not in replaced:
            writer.add_tensor(tensor, _reordered_rows(checkpoint.tensor(tensor), tensor, folds))


def _reordered(weight: QuantTensor, name: Name, folds: Folds) -> QuantTensor:
    if name in folds.inputs:
        weight = with_inputs(weight, folds.inputs[name])
    return with_outputs(weight, folds.outputs[name]) if name in folds.outputs else weight


def _reordered_rows(tensor: Tensor, name: str, folds: Folds) -> Tensor:
    """A dense weight or a bias, whose rows are outputs."""
    module = name.rpartition(".")[0]
    return tensor[folds.outputs[module]] if module in folds.outputs else tensor


def _changes(
    subject: Subject, linears: Sequence[Linear], folds: Folds, config: Mapping[str, Any]
) -> Iterator[str]:
    for key in _CONFIG_FIELDS:
        if subject.embedded.get(key) != config[EMBEDDED_KEY].get(key):
            yield f"config.json: {key} is written anew"
    for old, new in zip(subject.linears, linears, strict=True):
        if old.spec != new.spec:
            yield f"{old.name}: {old.spec} -> {new.spec}"
        if old.word_type != new.word_type:
            yield f"{old.name}: words of {old.word_type} -> {new.word_type}"
        if old.zeros != new.zeros:
            yield f"{old.name}: zero points stored as the label says"
        if new.name in folds.inputs:
            yield f"{new.name}: its order of activation is folded into gate_proj and up_proj"


def _num_bytes(checkpoint: Checkpoint) -> int:
    return sum(checkpoint.num_bytes(tensor) for tensor in checkpoint.tensor_names)


def _names(names: Sequence[Name]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


def _unsupported(engine: Engine, problems: Sequence[str]) -> UnsupportedError:
    listed = "\n".join(f"  {problem}" for problem in problems)
    return UnsupportedError(
        f"this checkpoint cannot be written for {engine.title} without quantizing anew:\n{listed}\n"
        "Quantize the original model with rules that the engine can hold (`terrazzo quantize`), or "
        "run the checkpoint with Terrazzo"
    )
