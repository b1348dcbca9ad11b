"""Every two of the choices that make a checkpoint meet once, in both directions, with GPTQModel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.checkpoints import Affine, random_affine
from helpers.covering import all_pairs, pairs_of, pairwise
from helpers.witness import Witness, quantize_with_gptqmodel, write_tiny_model, write_tokenizer
from terrazzo import Checkpoint
from terrazzo.checkpoint.description import Description
from terrazzo.checkpoint.writer import CheckpointWriter
from terrazzo.packing import PLANAR_ONLY_BITS, QuantTensor, pack, sequential_groups
from terrazzo.rules import RuleSet, resolve
from terrazzo.spec import DENSE, Format, QuantSpec

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
"""Every group size of the grid divides the inputs of every linear."""


class Order(Enum):
    """In which order columns are quantized, and whether groups follow it (`g_idx` is shuffled) or
    stay in sequence (static groups).
    """

    NONE = "sequential"
    ACTIVATION = "desc_act"
    STATIC = "static"


class Rules(Enum):
    NONE = "no_rules"
    POSITIVE = "positive"
    NEGATIVE = "negative"


DYNAMIC: Mapping[Rules, Mapping[str, Mapping[str, Any]]] = {
    Rules.NONE: {},
    Rules.POSITIVE: {
        "+:.*v_proj": {"bits": 8, "group_size": 16},
        ".*layers\\.1\\.mlp\\.down_proj": {"bits": 2, "group_size": 64},
    },
    Rules.NEGATIVE: {"-:.*layers\\.0\\.self_attn\\.o_proj": {}, "-:.*layers\\.1\\.mlp": {}},
}
FACTORS: Mapping[str, tuple[Any, ...]] = {
    "bits": (2, 3, 4, 5, 6, 7, 8),
    "group_size": (16, 32, 64, 128, -1),
    "order": tuple(Order),
    "rules": tuple(Rules),
    "sym": (True, False),
    "lm_head": (False, True),
    "layout": (Format.GPTQ, Format.GPTQ_V2),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One checkpoint of the grid."""

    bits: int
    group_size: int
    order: Order
    rules: Rules
    sym: bool
    lm_head: bool
    layout: Format

    def __str__(self) -> str:
        zeros = "sym" if self.sym else "asym"
        head = "head" if self.lm_head else "dense_head"
        words = (self.order.value, self.rules.value, zeros, head, self.layout.value)
        return "-".join((f"w{self.bits}", f"g{self.group_size}", *words))

    @property
    def dynamic(self) -> dict[str, dict[str, Any]]:
        return {pattern: dict(change) for pattern, change in DYNAMIC[self.rules].items()}

    @property
    def base(self) -> QuantSpec:
        return QuantSpec(self.bits, self.group_size, self.sym, self.order is not Order.NONE)

    @property
    def writable(self) -> Format:
        """What GPTQModel loads from others: bit planes for widths that have only those, and no
        asymmetric v1.
        """
        if self.bits in PLANAR_ONLY_BITS:
            return Format.GPTQ_P
        return self.layout if self.sym else Format.GPTQ_V2


CELLS = [Cell(**row) for row in pairwise(FACTORS)]


def quantized_by_gptqmodel(cell: Cell, work: Path) -> Path:
    dense = write_tiny_model(work / "dense", **SIZES)
    return quantize_with_gptqmodel(
        dense,
        work / "quantized",
        bits=cell.bits,
        group_size=cell.group_size,
        sym=cell.sym,
        desc_act=cell.order is not Order.NONE,
        static_groups=cell.order is Order.STATIC,
        act_group_aware=False,
        lm_head=cell.lm_head,
        format=cell.layout.value,
        dynamic=cell.dynamic,
    )


def written_by_terrazzo(cell: Cell, work: Path) -> tuple[Path, dict[str, Tensor]]:
    """The folder, and every quantized weight as it should read, float32 [N, K]."""
    dense = Checkpoint(write_tiny_model(work / "dense", **SIZES))
    rules = RuleSet.parse(cell.dynamic, cell.base, lm_head=cell.lm_head)
    plan = resolve(rules, dense.plan)
    expected = {}
    out = work / "written"
    with CheckpointWriter(out, cell.writable) as writer:
        for seed, (name, spec) in enumerate(plan.quantized.items()):
            weight = _weight(spec, dense.shape(f"{name}.weight"), cell.order, seed)
            expected[name] = weight.dequantized
            words = pack(weight.codes, spec.bits)
            packed = QuantTensor(spec, words, weight.scales, weight.zeros, weight.g_idx)
            writer.add_quantized(name, packed)
        for tensor in dense.tensor_names:
            if tensor.removesuffix(".weight") not in plan.quantized:
                writer.add_tensor(tensor, dense.tensor(tensor))
        writer.commit(Description(dense.model_config, rules, plan))
    write_tokenizer(out, dense.model_config["vocab_size"])
    return out, expected


def _weight(spec: QuantSpec, shape: tuple[int, ...], order: Order, seed: int) -> Affine:
    weight = random_affine(spec, shape[0], shape[1], seed)
    if order is not Order.STATIC:
        return weight
    sequential = sequential_groups(shape[1], spec.group_of(shape[1]))
    return Affine(weight.codes, weight.scales, weight.zeros, sequential)


def test_every_two_choices_meet() -> None:
    met: set[frozenset[tuple[str, Any]]] = set()
    for row in pairwise(FACTORS):
        met |= pairs_of(row)
    assert met == all_pairs(FACTORS)
    assert pairwise(FACTORS) == pairwise(FACTORS)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_terrazzo_reads_what_gptqmodel_writes(cell: Cell, tmp_path: Path) -> None:
    folder = quantized_by_gptqmodel(cell, tmp_path)
    expected = Witness(folder).dequantized()
    checkpoint = Checkpoint(folder)
    assert checkpoint.conflicts == ()
    assert ("lm_head" in checkpoint.plan.quantized) == cell.lm_head
    assert set(checkpoint.plan.quantized) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(checkpoint.dequantize(name), weight), name


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gptqmodel_reads_what_terrazzo_writes(cell: Cell, tmp_path: Path) -> None:
    folder, expected = written_by_terrazzo(cell, tmp_path)
    weights = Witness(folder).dequantized()
    assert set(weights) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_each_cell_is_what_it_says(cell: Cell, tmp_path: Path) -> None:
    """The grid tests nothing if a rule or a choice is lost on the way."""
    folder, expected = written_by_terrazzo(cell, tmp_path)
    checkpoint = Checkpoint(folder)
    assert checkpoint.conflicts == ()
    assert all(torch.equal(checkpoint.dequantize(n), weight) for n, weight in expected.items())
    spec = checkpoint.plan["model.layers.0.mlp.up_proj"].spec
    assert spec != DENSE
    assert isinstance(spec, QuantSpec)
    assert (spec.bits, spec.sym) == (cell.bits, cell.sym)
    widths = {spec.bits for spec in checkpoint.plan.quantized.values()}
    assert widths == ({cell.bits, 2, 8} if cell.rules is Rules.POSITIVE else {cell.bits})
