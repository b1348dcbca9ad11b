"""The twin of every kernel for quantized weights: rebuild the weight at each call and multiply.

It is the definition the others are tested against, and it runs every spec on every device that
torch knows, at the price of all the weights per call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.kernels.base import GemmProblem, Prepared, Weight
from terrazzo.packing import QuantTensor, dequantize
from terrazzo.spec import QuantSpec, packed_shapes


class ReferenceKernel:
    """Keeps the tensors of a weight as they came, codes packed."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return "torch_reference"

    def rejects(self, problem: GemmProblem) -> str | None:
        return None if isinstance(problem.spec, QuantSpec) else "runs quantized weights"

    def prepared_bytes(self, problem: GemmProblem) -> int:
        assert isinstance(problem.spec, QuantSpec)
        shapes = packed_shapes(problem.spec, problem.out_features, problem.in_features)
        words, columns = shapes.qweight
        groups = shapes.scales[0]
        return (4 * words + 3 * groups) * columns + 4 * problem.in_features

    def prepare(self, weight: Weight) -> Prepared:
        assert isinstance(weight, QuantTensor)
        tensors = (weight.qweight, weight.scales, weight.zeros, weight.g_idx)
        return Prepared(GemmProblem.of(weight), tensors)

    def run(self, x_MK: Tensor, weight: Prepared, out_MN: Tensor) -> None:
        spec = weight.problem.spec
        assert isinstance(spec, QuantSpec)
        weight_NK = dequantize(QuantTensor(spec, *weight.tensors))
        torch.mm(x_MK, weight_NK.T, out=out_MN)
