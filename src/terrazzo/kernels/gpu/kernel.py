"""Weights as records among the kernels, for whatever runs layer by layer in torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.kernels.base import DenseTensor, GemmProblem, Prepared, Weight
from terrazzo.kernels.gpu.records import (
    DENSE_BITS,
    INPUTS,
    OUTPUTS,
    RecordKind,
    Records,
    block_size,
    dense_records,
    kind_of,
    quantized_records,
)
from terrazzo.kernels.gpu.unpacking import dequantized
from terrazzo.spec import Dense, QuantSpec


@dataclass(frozen=True, slots=True)
class RecordsPrepared(Prepared):
    records: Records

    @property
    def num_bytes(self) -> int:
        return self.records.data.nbytes + self.records.lookup.nbytes


@dataclass(frozen=True, slots=True)
class RecordsKernel:
    """Every weight there is, on any device; a decoder that is one program for a card multiplies by
    its records with kernels of the card. dtype: bfloat16 or float16, of activations and of weights
    that are not quantized.
    """

    dtype: torch.dtype

    @property
    def name(self) -> str:
        return f"records_{str(self.dtype).removeprefix('torch.')}"

    def rejects(self, problem: GemmProblem) -> str | None:
        return None

    def prepared_bytes(self, problem: GemmProblem) -> int:
        """Exact where no act-order group is larger than `group_size`."""
        tiles = -(-problem.out_features // OUTPUTS)
        if isinstance(problem.spec, Dense):
            dense = RecordKind(DENSE_BITS, INPUTS, True)
            return tiles * -(-problem.in_features // INPUTS) * dense.num_bytes
        units = -(-_num_places(problem.spec, problem.in_features) // INPUTS)
        kind = kind_of(problem.spec, problem.in_features)
        lookup = 4 * units * INPUTS if _needs_lookup(problem.spec, problem.in_features) else 0
        return tiles * units * kind.num_bytes + lookup

    def prepare(self, weight: Weight) -> Prepared:
        problem = GemmProblem.of(weight)
        if isinstance(weight, DenseTensor):
            values = weight.weight_NK
            return RecordsPrepared(problem, (), dense_records(values, self.dtype, values.device))
        return RecordsPrepared(problem, (), quantized_records(weight, weight.qweight.device))

    def run(self, x_MK: Tensor, weight: Prepared, out_MN: Tensor) -> None:
        """The twin: rebuilds the weight at each call."""
        assert isinstance(weight, RecordsPrepared)
        rounded_MK = x_MK.to(self.dtype).float()
        torch.mm(rounded_MK, dequantized(weight.records, self.dtype).T, out=out_MN)


def _num_places(spec: QuantSpec, in_features: int) -> int:
    group = spec.group_of(in_features)
    size = block_size(group, in_features)
    full, rest = divmod(in_features, group)
    return (full * -(-group // size) + -(-rest // size)) * size


def _needs_lookup(spec: QuantSpec, in_features: int) -> bool:
    """Whether place k is not input k: in act-order, or where groups are padded."""
    size = block_size(spec.group_of(in_features), in_features)
    padded = spec.group_of(in_features) % size != 0 and spec.num_groups(in_features) > 1
    return spec.desc_act or padded
