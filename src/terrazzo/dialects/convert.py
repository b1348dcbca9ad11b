"""Writes a checkpoint anew so that an engine loads it, with the same numbers.

First everything is planned: specs, rules, and what the engine will make of the result. Only if that
is good is anything written, and each module is compared with its original on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.companions import companion_files
from terrazzo.checkpoint.config import EMBEDDED_KEY
from terrazzo.checkpoint.description import Description
from terrazzo.checkpoint.experts import Naming, in_older_spelling
from terrazzo.checkpoint.names import GROUP_INDEX, PACKED_SUFFIXES, WEIGHT
from terrazzo.checkpoint.writer import CheckpointWriter
from terrazzo.checkpoint.zero_points import ZeroReading
from terrazzo.dialects.emit import rules_for
from terrazzo.dialects.engines import Engine
from terrazzo.dialects.exact import recode, side_by_side, symmetric_bits
from terrazzo.dialects.folds import Folds
from terrazzo.dialects.layouts import MIXTRAL, Layout, has_older_names
from terrazzo.dialects.prediction import Outcome, Prediction, Refusal
from terrazzo.dialects.reach import REACH, Order, Scope, Zeros
from terrazzo.dialects.subject import WORD_TYPE, Linear, Place, Subject
from terrazzo.errors import UnsupportedError
from terrazzo.packing import PLANAR_ONLY_BITS, QuantTensor, dequantize
from terrazzo.rules import Plan, RuleSet
from terrazzo.spec import Format, Name, QuantSpec

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


def convert(folder: Path, out: Path, engine: Engine) -> Conversion:
    """Write `out` so that `engine` loads it; every weight keeps its value to the bit.

    Bits may grow and groups be cut finer. Where the order of activation is folded into gate and up,
    features between them and down_proj change places, which changes no result. Raises
    UnsupportedError with every module that cannot be written so, and why; then nothing is written.
    """
    stored = Subject.of(Checkpoint(folder))
    is_mixtral = stored.architecture == MIXTRAL
    checkpoint = Checkpoint(folder, Naming.TODAY if is_mixtral else Naming.STORED)
    subject = Subject.of(checkpoint)
    layout = Layout.of(subject.linears, engine.name, subject.architecture)
    older = has_older_names(engine.name, subject.architecture)
    rename = in_older_spelling if older else str
    source = _Source(checkpoint, layout, layout.cut(subject.linears), rename)
    folds = _folds(source, engine)
    linears = tuple(_planned(source, engine, folds))
    written = tuple(replace(x, name=rename(x.name)) for x in layout.joined(linears))
    rules = rules_for(written)
    description = _description(checkpoint, rules, written, engine)
    form = _format(written)
    after = _promised(subject, written, description, form, engine)
    companions = companion_files(checkpoint.folder)
    with CheckpointWriter(out, form) as writer:
        _write_quantized(source, linears, folds, writer)
        _write_others(source, linears, folds, writer)
        for file in companions:
            writer.copy_file(file)
        writer.commit(description)
    config = description.documents(form)["config.json"]
    return Conversion(
        engine.predict(stored),
        after,
        (*_config_changes(subject, config), *layout.changes(), *_changes(source, linears, folds)),
        source_bytes=_num_bytes(checkpoint),
        num_bytes=_num_bytes(Checkpoint(out)),
    )


@dataclass(frozen=True, slots=True)
class _Source:
    """A checkpoint by the parts of its linears. linears: those parts. rename: from the names here
    to those that will be written.
    """

    checkpoint: Checkpoint
    layout: Layout
    linears: tuple[Linear, ...]
    rename: Callable[[str], str]

    def quant_tensor(self, name: Name) -> QuantTensor:
        return self.layout.quant_tensor(self.checkpoint, name)


def _folds(source: _Source, engine: Engine) -> Folds:
    """Where the engine has no act-order."""
    if REACH[engine.name].order is Order.ANY:
        return Folds()
    return Folds.of(source.linears, source.quant_tensor)


def _planned(source: _Source, engine: Engine, folds: Folds) -> Iterator[Linear]:
    """Every linear as it will be. UnsupportedError lists those that cannot be."""
    reach, layout = REACH[engine.name], source.layout
    folded = [folds.planned(linear) for linear in source.linears]
    problems = list(layout.faults(folded, source.checkpoint))
    specs: dict[Name, QuantSpec] = {}
    for tied in layout.tied(reach.ties(folded)):
        packed = [linear for linear in tied if isinstance(linear.spec, QuantSpec)]
        needs = _needs(source, packed, reach.zeros)
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


def _needs(source: _Source, packed: Sequence[Linear], zeros: Zeros) -> dict[Name, int]:
    """Bits around the middle code; the codes are read only where zero points are elsewhere."""
    needs = {}
    for linear in packed:
        assert isinstance(linear.spec, QuantSpec)
        reads = zeros is Zeros.MIDDLE and not linear.spec.sym
        needs[linear.name] = (
            symmetric_bits(source.quant_tensor(linear.name)) if reads else linear.spec.bits
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


def _write_quantized(
    source: _Source, linears: Sequence[Linear], folds: Folds, writer: CheckpointWriter
) -> None:
    specs = {x.name: x.spec for x in linears if isinstance(x.spec, QuantSpec)}
    owners, joins = source.layout.owners, source.layout.joins
    for name in dict.fromkeys(owners.get(part, part) for part in specs):
        weights = []
        for part in joins.get(name, (name,)):
            original = folds.weight(source.quant_tensor(part), part)
            weights.append(recode(original, specs[part]))
            assert torch.equal(dequantize(weights[-1]), dequantize(original)), f"{part} changed"
        writer.add_quantized(source.rename(name), side_by_side(weights))


def _write_others(
    source: _Source, linears: Sequence[Linear], folds: Folds, writer: CheckpointWriter
) -> None:
    """Dense weights and biases wherever their modules go, and all that belongs to no linear."""
    layout, owners = source.layout, source.layout.owners
    packed = {layout.stored(x.name) for x in linears if isinstance(x.spec, QuantSpec)}
    replaced = {f"{n}.{end}" for n in packed for end in (*PACKED_SUFFIXES, GROUP_INDEX, WEIGHT)}
    waiting: dict[str, dict[Name, Tensor]] = {}
    for tensor in source.checkpoint.tensor_names:
        if tensor in replaced:
            continue
        for name, value in layout.pieces(tensor, source.checkpoint.tensor(tensor)):
            module, _, suffix = name.rpartition(".")
            rows = folds.rows(value, name)
            if module not in owners:
                writer.add_tensor(source.rename(name), rows)
                continue
            joined = f"{owners[module]}.{suffix}"
            parts = waiting.setdefault(joined, {})
            parts[module] = rows
            order = layout.joins[owners[module]]
            if len(parts) == len(order):
                writer.add_tensor(joined, torch.cat([waiting[joined][part] for part in order]))
                del waiting[joined]
    assert not waiting, f"{list(waiting)} are not whole"


def _config_changes(subject: Subject, config: Mapping[str, Any]) -> Iterator[str]:
    for key in _CONFIG_FIELDS:
        if subject.embedded.get(key) != config[EMBEDDED_KEY].get(key):
            yield f"config.json: {key} is written anew"


def _changes(source: _Source, linears: Sequence[Linear], folds: Folds) -> Iterator[str]:
    for old, new in zip(source.linears, linears, strict=True):
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
