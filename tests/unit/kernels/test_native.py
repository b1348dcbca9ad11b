"""Native kernels: each instruction set against float64 and against the portable one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers.quant_tensors import (
    assert_close_to_exact,
    exact_weight,
    random_dense_tensor,
    random_input,
    random_quant_tensor,
    uneven_quant_tensor,
)
from terrazzo.kernels.base import DenseTensor, GemmProblem, Kernel, Weight
from terrazzo.kernels.machine import native, why_not_native
from terrazzo.kernels.native import NativeDenseKernel, NativeKernel
from terrazzo.packing import QuantTensor, unpack
from terrazzo.spec import DENSE, PER_CHANNEL, QuantSpec


def test_native_kernels_are_there_where_a_compiler_is() -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    assert why_not_native() == ""


needs_native = pytest.mark.skipif(bool(why_not_native()), reason="no native kernels here")
INSTRUCTION_SETS = native().instruction_sets() if not why_not_native() else ["none"]
FLOAT, INT8 = NativeKernel(torch.float32), NativeKernel(torch.int8)
DENSE_FLOAT, DENSE_INT8 = NativeDenseKernel(torch.float32), NativeDenseKernel(torch.int8)

specs = st.builds(
    QuantSpec,
    bits=st.integers(2, 8),
    group_size=st.sampled_from([PER_CHANNEL, 1, 3, 8, 16, 32, 48, 64, 100, 128]),
    sym=st.booleans(),
    desc_act=st.booleans(),
)
sizes = st.integers(1, 150)
rows = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 9, 12, 13, 33])


@pytest.fixture(params=INSTRUCTION_SETS, scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[object]:
    """Two threads of each instruction set in turn, in place of the machine of this process."""
    if why_not_native():
        pytest.skip("no native kernels here")
    with use(request.param, 2) as machine:
        yield machine


class use:
    """As a context: native kernels run on a machine of their own."""

    def __init__(self, instruction_set: str, num_threads: int) -> None:
        self._machine = native().Machine(num_threads, instruction_set)
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> object:
        self._patch.setattr("terrazzo.kernels.native.machine", lambda: self._machine)
        return self._machine

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def product(kernel: Kernel, x_MK: Tensor, weight: Weight) -> Tensor:
    """Runs into the middle columns of a larger tensor full of NaN, and checks its borders."""
    columns = slice(3, 3 + weight.out_features)
    larger = torch.full((x_MK.shape[0], weight.out_features + 5), torch.nan)
    kernel.run(x_MK, kernel.prepare(weight), larger[:, columns])
    assert larger[:, :3].isnan().all()
    assert larger[:, columns.stop :].isnan().all()
    return larger[:, columns].clone()


def float32_rounding(x_MK: Tensor, weight: Weight) -> Tensor:
    """[M, N]. Codes and zero points are summed apart, so it is relative to the sizes of both."""
    assert isinstance(weight, QuantTensor)
    group_K = weight.g_idx.long()
    codes_KN = unpack(weight.qweight, weight.in_features, weight.spec.bits).double()
    sizes_KN = weight.scales.double()[group_K] * (codes_KN + weight.zeros.double()[group_K])
    epsilon = torch.finfo(torch.float32).eps
    return (x_MK.shape[1] + 8) * epsilon * (x_MK.double().abs() @ sizes_KN)


def assert_float32(y_MN: Tensor, x_MK: Tensor, weight: Weight) -> None:
    exact_MN = x_MK.double() @ exact_weight(weight).T
    assert bool(((y_MN.double() - exact_MN).abs() <= float32_rounding(x_MK, weight)).all())


def assert_within_rounding(y_MN: Tensor, x_MK: Tensor, weight: Weight) -> None:
    """Half a step of a row's coarsest scale is all that an activation may have moved."""
    weight_NK = exact_weight(weight)
    exact_MN = x_MK.double() @ weight_NK.T
    if x_MK.shape[0]:
        step_M1 = x_MK.double().abs().amax(dim=1, keepdim=True) / 127
        bound_MN = step_M1 * 0.501 * weight_NK.abs().sum(dim=1) + 1e-6
        assert bool(((y_MN.double() - exact_MN).abs() <= bound_MN).all())


@given(spec=specs, out_features=sizes, in_features=sizes, rows=rows, seed=st.integers(0, 99))
def test_float32_activations(
    machine: object, spec: QuantSpec, out_features: int, in_features: int, rows: int, seed: int
) -> None:
    weight = random_quant_tensor(spec, out_features, in_features, seed)
    x_MK = random_input(rows, in_features)
    assert_float32(product(FLOAT, x_MK, weight), x_MK, weight)


@given(spec=specs, out_features=sizes, in_features=sizes, rows=rows, seed=st.integers(0, 99))
def test_int8_activations(
    machine: object, spec: QuantSpec, out_features: int, in_features: int, rows: int, seed: int
) -> None:
    weight = random_quant_tensor(spec, out_features, in_features, seed)
    x_MK = random_input(rows, in_features)
    assert_within_rounding(product(INT8, x_MK, weight), x_MK, weight)


@given(bits=st.integers(2, 8), rows=st.sampled_from([1, 2, 4, 9]), seed=st.integers(0, 99))
def test_whole_activations_lose_nothing(machine: object, bits: int, rows: int, seed: int) -> None:
    """Integers up to 127, with one 127 in each quantum, are their own 8-bit codes."""
    weight = random_quant_tensor(QuantSpec(bits, 64, sym=False), 40, 192, seed)
    x_MK = torch.randint(-127, 128, (rows, 192)).float()
    x_MK[:, ::16] = 127.0
    assert_float32(product(INT8, x_MK, weight), x_MK, weight)


@pytest.mark.parametrize("kernel", [FLOAT, INT8], ids=lambda kernel: kernel.name)
@given(spec=specs, in_features=sizes, seed=st.integers(0, 99))
def test_groups_of_any_size(
    machine: object, kernel: Kernel, spec: QuantSpec, in_features: int, seed: int
) -> None:
    weight = uneven_quant_tensor(spec, 7, in_features, seed)
    x_MK = random_input(3, in_features)
    check = assert_float32 if kernel is FLOAT else assert_within_rounding
    check(product(kernel, x_MK, weight), x_MK, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(out_features=sizes, in_features=sizes, rows=rows)
def test_dense(
    machine: object, dtype: torch.dtype, out_features: int, in_features: int, rows: int
) -> None:
    weight = random_dense_tensor(out_features, in_features, dtype)
    x_MK = random_input(rows, in_features)
    assert_close_to_exact(product(DENSE_FLOAT, x_MK, weight), x_MK, weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@given(out_features=sizes, in_features=sizes, rows=rows)
def test_dense_in_8_bits(
    machine: object, dtype: torch.dtype, out_features: int, in_features: int, rows: int
) -> None:
    weight = random_dense_tensor(out_features, in_features, dtype)
    x_MK = random_input(rows, in_features)
    y_MN = product(DENSE_INT8, x_MK, weight)
    rounded = DenseTensor(rounded_in_blocks(weight.weight_NK.float()))
    assert_within_rounding(y_MN, x_MK, rounded)


def rounded_in_blocks(weight_NK: Tensor) -> Tensor:
    """Codes of -127 to 127 times a bfloat16 scale, at least the largest / 127, per 32 inputs."""
    result_NK = torch.empty_like(weight_NK)
    for start in range(0, weight_NK.shape[1], 32):
        block = weight_NK[:, start : start + 32]
        scale = block.abs().amax(dim=1, keepdim=True) / 127
        near = scale.bfloat16().float()
        above = torch.nextafter(scale.bfloat16(), torch.tensor(torch.inf).bfloat16()).float()
        scale = torch.where(near >= scale, near, above)
        codes = (block * (1 / scale)).round()
        result_NK[:, start : start + 32] = torch.where(scale > 0, codes * scale, 0.0)
    return result_NK


def test_dense_zeros_and_tiny_and_huge_weights_stay(machine: object) -> None:
    weight = DenseTensor(torch.tensor([[0.0] * 40, [1e-30] * 40, [3e30] * 40]))
    y_MN = product(DENSE_INT8, torch.ones(1, 40), weight)
    assert torch.allclose(y_MN, torch.tensor([[0.0, 4e-29, 1.2e32]]), rtol=1e-2, atol=0)


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS[:-1])
@pytest.mark.parametrize("kernel", [FLOAT, INT8], ids=lambda kernel: kernel.name)
@given(spec=specs, out_features=sizes, in_features=sizes, seed=st.integers(0, 99))
def test_instruction_sets_agree_with_the_portable_kernels(
    instruction_set: str,
    kernel: Kernel,
    spec: QuantSpec,
    out_features: int,
    in_features: int,
    seed: int,
) -> None:
    weight = random_quant_tensor(spec, out_features, in_features, seed)
    x_MK = random_input(3, in_features, seed)
    with use(instruction_set, 1):
        fast_MN = product(kernel, x_MK, weight)
    with use("portable", 1):
        plain_MN = product(kernel, x_MK, weight)
    # A rounding of an activation between two codes may fall either way.
    tolerance = 1 if kernel is FLOAT else 100
    bound_MN = tolerance * float32_rounding(x_MK, weight)
    assert bool(((fast_MN - plain_MN).abs() <= bound_MN).all())


@pytest.mark.parametrize("kernel", [FLOAT, INT8], ids=lambda kernel: kernel.name)
@given(spec=specs, in_features=sizes, rows=st.integers(2, 30), seed=st.integers(0, 99))
def test_a_row_does_not_depend_on_its_neighbours(
    machine: object, kernel: Kernel, spec: QuantSpec, in_features: int, rows: int, seed: int
) -> None:
    weight = random_quant_tensor(spec, 50, in_features, seed)
    x_MK = random_input(rows, in_features, seed)
    together_MN = product(kernel, x_MK, weight)
    alone_MN = torch.cat([product(kernel, row_1K, weight) for row_1K in x_MK.split(1)])
    assert torch.equal(together_MN, alone_MN)


@needs_native
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kernel", [FLOAT, INT8], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("rows", [1, 6])
def test_the_number_of_threads_changes_nothing(
    instruction_set: str, kernel: Kernel, rows: int
) -> None:
    weight = random_quant_tensor(QuantSpec(3, 32, sym=False, desc_act=True), 90, 160)
    x_MK = random_input(rows, 160)
    results = []
    for num_threads in (1, 2, 3):
        with use(instruction_set, num_threads):
            results.append(product(kernel, x_MK, weight))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@needs_native
@given(spec=specs, out_features=sizes, in_features=sizes)
def test_bytes_are_known_before_they_are_taken(
    spec: QuantSpec, out_features: int, in_features: int
) -> None:
    weight = random_quant_tensor(spec, out_features, in_features)
    assert FLOAT.prepare(weight).num_bytes == FLOAT.prepared_bytes(GemmProblem.of(weight))


@needs_native
def test_weights_of_another_instruction_set_are_refused() -> None:
    weight = random_quant_tensor(QuantSpec(4, 32), 32, 64)
    x_MK, y_MN = random_input(1, 64), torch.empty(1, 32)
    with use("portable", 1):
        prepared = FLOAT.prepare(weight)
    if len(INSTRUCTION_SETS) > 1:
        with use(INSTRUCTION_SETS[0], 1), pytest.raises(ValueError, match="another instruction"):
            FLOAT.run(x_MK, prepared, y_MN)


@needs_native
def test_an_unknown_instruction_set_names_those_there() -> None:
    with pytest.raises(ValueError, match=r"abacus is not there; this machine has .*portable"):
        native().Machine(1, "abacus")


@needs_native
def test_each_kernel_says_what_it_does_not_run() -> None:
    quantized, dense = GemmProblem(QuantSpec(4, 32), 8, 64), GemmProblem(DENSE, 8, 64)
    elsewhere = GemmProblem(QuantSpec(4, 32), 8, 64, "cuda")
    assert FLOAT.rejects(dense) == "runs quantized weights"
    assert DENSE_FLOAT.rejects(quantized) == "runs weights that are not quantized"
    assert INT8.rejects(elsewhere) == "runs on CPUs"
    assert INT8.rejects(quantized) is None
