"""C++ kernels that multiply by packed weights without ever unpacking them to memory.

A weight stays in bit planes: as many bytes as on disk, read once per call. With float32 activations
a product is what the reference computes, up to the order of its sums. With int8 activations every
16 or 32 neighbours share one scale and sums of codes are exact; that is several times faster.

Outputs do not depend on how many rows are multiplied at once, nor on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from terrazzo.kernels.base import DenseTensor, GemmProblem, Prepared, Weight
from terrazzo.kernels.blocks import Blocks
from terrazzo.kernels.machine import machine, native, why_not_native
from terrazzo.packing import QuantTensor
from terrazzo.spec import Dense, QuantSpec

if TYPE_CHECKING:
    from terrazzo import _native

TILE = 32
"""Inputs that are unpacked at once; packed weights hold whole tiles."""

QUANTA = (32, 16)
"""How many activations may share one scale; the larger unless it pads groups more."""

PARTS = (1, 2, 4)
"""Into how many blocks a group may be cut."""

SCALE_BITS, ZERO_BITS = 16, 8
"""Of a block and output."""

NO_INPUT = -1


@dataclass(frozen=True, slots=True)
class NativePrepared(Prepared):
    """packed: the weight in the memory and the layout of the native kernels."""

    packed: _native.Weight

    @property
    def num_bytes(self) -> int:
        return int(self.packed.num_bytes)


class NativeKernel:
    """Quantized weights of 2 to 8 bits. activations: `torch.float32` or `torch.int8`."""

    __slots__ = ("activations",)

    def __init__(self, activations: torch.dtype) -> None:
        assert activations in (torch.float32, torch.int8)
        self.activations = activations

    @property
    def name(self) -> str:
        return "native_int8" if self.activations == torch.int8 else "native_float32"

    def rejects(self, problem: GemmProblem) -> str | None:
        if isinstance(problem.spec, Dense):
            return "runs quantized weights"
        return _rejects(problem)

    def prepared_bytes(self, problem: GemmProblem) -> int:
        """Exact where no act-order group is larger than `group_size`."""
        spec = problem.spec
        assert isinstance(spec, QuantSpec)
        size, _ = block_shape(spec, problem.in_features)
        blocks = _num_blocks(spec, problem.in_features, size)
        lookup = 4 * blocks * size if _needs_lookup(spec, problem.in_features, size) else 0
        packed = native().quantized_bytes(
            machine(), spec.bits, problem.out_features, blocks * size, blocks, 2, not spec.sym
        )
        return int(packed) + lookup

    def prepare(self, weight: Weight) -> Prepared:
        assert isinstance(weight, QuantTensor)
        spec = weight.spec
        size, quantum = block_shape(spec, weight.in_features)
        blocks = Blocks.of(weight, size)
        groups = blocks.group_B.tolist()
        if len(groups) * size % TILE:
            groups.append(groups[-1])
        lookup: list[int] = []
        if _needs_lookup(spec, weight.in_features, size):
            lookup = blocks.lookup(absent=NO_INPUT).tolist()
            lookup += [NO_INPUT] * (len(groups) * size - len(lookup))
        packed = native().quantized(
            machine(),
            weight.qweight.contiguous(),
            spec.bits,
            weight.in_features,
            size,
            quantum,
            lookup,
            groups,
            weight.scales.contiguous(),
            None if spec.sym else weight.zeros.contiguous(),
            float(spec.mid_code),
        )
        return NativePrepared(GemmProblem.of(weight), (), packed)

    def run(self, x_MK: Tensor, weight: Prepared, out_MN: Tensor) -> None:
        _multiply(x_MK, weight, out_MN, self.activations)


class NativeDenseKernel:
    """Weights that are not quantized. activations: `torch.float32` multiplies by them in the dtype
    of their file, `torch.int8` rounds them to 8 bits too, with a scale for every 32 inputs of an
    output: as the error of such weights is that of such activations, halving it would buy nothing.
    """

    __slots__ = ("activations",)

    def __init__(self, activations: torch.dtype) -> None:
        assert activations in (torch.float32, torch.int8)
        self.activations = activations

    @property
    def name(self) -> str:
        return "native_dense_int8" if self.activations == torch.int8 else "native_dense"

    def rejects(self, problem: GemmProblem) -> str | None:
        if isinstance(problem.spec, QuantSpec):
            return "runs weights that are not quantized"
        return _rejects(problem)

    def prepared_bytes(self, problem: GemmProblem) -> int:
        """With float32 activations of 2-byte weights, the usual ones; others take twice that."""
        places = -(-problem.in_features // TILE) * TILE
        if self.activations == torch.int8:
            blocks = places // TILE
            return int(
                native().quantized_bytes(
                    machine(), 8, problem.out_features, places, blocks, 2, False
                )
            )
        return int(native().dense_bytes(machine(), problem.out_features, places, 2))

    def prepare(self, weight: Weight) -> Prepared:
        assert isinstance(weight, DenseTensor)
        values = weight.weight_NK
        if values.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            values = values.to(torch.float32)
        pack = native().rounded if self.activations == torch.int8 else native().dense
        return NativePrepared(GemmProblem.of(weight), (), pack(machine(), values.contiguous()))

    def run(self, x_MK: Tensor, weight: Prepared, out_MN: Tensor) -> None:
        _multiply(x_MK, weight, out_MN, self.activations)


def block_shape(spec: QuantSpec, in_features: int) -> tuple[int, int]:
    """Places of a block, and how many of them share an activation scale: what takes least memory.

    A block is a group, or an even part of one where that leaves less of the last group empty.
    """
    group = spec.group_of(in_features)
    shapes = [
        (-(-group // (parts * quantum)) * quantum, quantum)
        for quantum in QUANTA
        for parts in PARTS
        if parts == 1 or group % (parts * quantum) == 0
    ]
    block_bits = SCALE_BITS if spec.sym else SCALE_BITS + ZERO_BITS

    def bits(shape: tuple[int, int]) -> int:
        return _num_blocks(spec, in_features, shape[0]) * (shape[0] * spec.bits + block_bits)

    return min(shapes, key=bits)


def arithmetic(activations: torch.dtype) -> _native.Arithmetic:
    modes: type[_native.Arithmetic] = native().Arithmetic
    return modes.INT8 if activations == torch.int8 else modes.FLOAT


def _num_blocks(spec: QuantSpec, in_features: int, size: int) -> int:
    """Blocks of `size` places, with the one that fills the last tile where half would be left."""
    full, rest = divmod(in_features, spec.group_of(in_features))
    blocks = full * -(-spec.group_of(in_features) // size) + -(-rest // size)
    return blocks if blocks * size % TILE == 0 else blocks + 1


def _needs_lookup(spec: QuantSpec, in_features: int, size: int) -> bool:
    """Whether place k is not input k: in act-order, or where groups are padded."""
    padded = spec.group_of(in_features) % size != 0 and spec.num_groups(in_features) > 1
    return spec.desc_act or padded


def _rejects(problem: GemmProblem) -> str | None:
    if why_not_native():
        return why_not_native()
    return None if problem.device_type == "cpu" else "runs on CPUs"


def _multiply(x_MK: Tensor, weight: Prepared, out_MN: Tensor, activations: torch.dtype) -> None:
    assert isinstance(weight, NativePrepared)
    if x_MK.shape[0]:
        native().multiply(machine(), weight.packed, arithmetic(activations), x_MK, out_MN)
