"""float32 weights and the matrix product of torch: for dense modules, and for dequantized ones."""

from __future__ import annotations

from torch import Tensor

from terrazzo.kernels.base import DenseTensor, GemmProblem, Prepared, Weight
from terrazzo.kernels.product import multiply
from terrazzo.packing import QuantTensor, dequantize
from terrazzo.spec import Dense


class DenseKernel:
    """Modules that are not quantized. 4 bytes per weight, converted at load."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return "torch_dense"

    def rejects(self, problem: GemmProblem) -> str | None:
        return None if isinstance(problem.spec, Dense) else "runs weights that are not quantized"

    def prepared_bytes(self, problem: GemmProblem) -> int:
        return _float32_bytes(problem)

    def prepare(self, weight: Weight) -> Prepared:
        assert isinstance(weight, DenseTensor)
        return Prepared(GemmProblem.of(weight), (weight.weight_NK.float(),))

    def run(self, x_MK: Tensor, weight: Prepared, out_MN: Tensor) -> None:
        multiply(x_MK, weight.tensors[0], out_MN)


class DequantizedKernel:
    """Quantized modules, dequantized once at load: the speed and the memory of a float32 model."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return "torch_dequantized"

    def rejects(self, problem: GemmProblem) -> str | None:
        return "runs quantized weights" if isinstance(problem.spec, Dense) else None

    def prepared_bytes(self, problem: GemmProblem) -> int:
        return _float32_bytes(problem)

    def prepare(self, weight: Weight) -> Prepared:
        assert isinstance(weight, QuantTensor)
        return Prepared(GemmProblem.of(weight), (dequantize(weight),))

    def run(self, x_MK: Tensor, weight: Prepared, out_MN: Tensor) -> None:
        multiply(x_MK, weight.tensors[0], out_MN)


def _float32_bytes(problem: GemmProblem) -> int:
    return 4 * problem.out_features * problem.in_features
