"""What a kernel is: it says which problems it rejects, prepares a weight once, then multiplies.

Shape suffixes: M rows of activations, K input features, N output features, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from terrazzo.packing import QuantTensor
from terrazzo.spec import DENSE, Dense, QuantSpec


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """The weight of a module that is not quantized. weight_NK: [N, K] in the dtype of the file."""

    weight_NK: Tensor

    @property
    def spec(self) -> Dense:
        return DENSE

    @property
    def in_features(self) -> int:
        return self.weight_NK.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight_NK.shape[0]


Weight: TypeAlias = QuantTensor | DenseTensor


@dataclass(frozen=True, slots=True)
class GemmProblem:
    """Everything a kernel may look at before it accepts a weight; no data, so plans can ask too.

    device_type: as torch spells it, `cpu` for example. Activations and outputs are float32.
    """

    spec: QuantSpec | Dense
    out_features: int
    in_features: int
    device_type: str = "cpu"

    @classmethod
    def of(cls, weight: Weight) -> GemmProblem:
        if isinstance(weight, DenseTensor):
            data, spec = weight.weight_NK, weight.spec
            return cls(spec, weight.out_features, weight.in_features, data.device.type)
        device_type = weight.qweight.device.type
        return cls(weight.spec, weight.out_features, weight.in_features, device_type)

    def __str__(self) -> str:
        return f"{self.spec}, {self.out_features} x {self.in_features} on {self.device_type}"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A weight in the layout of the kernel that prepared it, and of no meaning to any other.

    tensors: in an order that only that kernel knows.
    """

    problem: GemmProblem
    tensors: tuple[Tensor, ...]

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Kernel(Protocol):
    """One way to compute `out = x @ W.T`."""

    @property
    def name(self) -> str: ...

    def rejects(self, problem: GemmProblem) -> str | None:
        """Why this kernel cannot run `problem`; None when it can."""

    def prepared_bytes(self, problem: GemmProblem) -> int:
        """Memory that a prepared weight stays in; exact, and known before any data is read."""

    def prepare(self, weight: Weight) -> Prepared:
        """Once per weight, at load. The result may share memory with `weight`."""

    def run(self, x_MK: Tensor, weight: Prepared, out_MN: Tensor) -> None:
        """Overwrites all of `out_MN`, whatever it holds.

        x_MK: float32 [M, K]. out_MN: float32 [M, N]; its rows may be strided, as the columns of a
        larger tensor are.
        """
