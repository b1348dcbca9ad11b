"""Every kernel against float64 arithmetic, on every kind of weight it accepts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.quant_tensors import (
    assert_close_to_exact,
    random_dense_tensor,
    random_input,
    random_quant_tensor,
    uneven_quant_tensor,
)
from terrazzo.kernels import panels
from terrazzo.kernels.base import GemmProblem, Kernel, Weight
from terrazzo.kernels.choose import KERNELS, KernelPolicy
from terrazzo.packing import dequantize
from terrazzo.spec import DENSE, PER_CHANNEL, QuantSpec

KERNEL_NAMES = ["torch_dense", "torch_dequantized", "torch_panels", "torch_reference"]
QUANTIZED_KERNELS = KERNEL_NAMES[1:]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def kernel_named(name: str) -> Kernel:
    (kernel,) = [each for each in KERNELS[KernelPolicy.SPEED] if each.name == name]
    return kernel


def product(kernel: Kernel, x_MK: torch.Tensor, weight: Weight) -> torch.Tensor:
    """Runs into the middle columns of a larger tensor full of NaN, and checks its borders."""
    columns = slice(3, 3 + weight.out_features)
    larger = torch.full((x_MK.shape[0], weight.out_features + 5), torch.nan)
    kernel.run(x_MK, kernel.prepare(weight), larger[:, columns])
    assert larger[:, :3].isnan().all()
    assert larger[:, columns.stop :].isnan().all()
    return larger[:, columns]


specs = st.builds(
    QuantSpec,
    bits=st.integers(2, 8),
    group_size=st.sampled_from([PER_CHANNEL, 1, 3, 8, 16, 32, 100]),
    sym=st.booleans(),
    desc_act=st.booleans(),
)
sizes = st.integers(1, 80)
rows = st.sampled_from([0, 1, 2, 5, 32, 33])


@pytest.mark.parametrize("name", QUANTIZED_KERNELS)
@given(spec=specs, out_features=sizes, in_features=sizes, rows=rows, seed=st.integers(0, 99))
def test_quantized(
    name: str, spec: QuantSpec, out_features: int, in_features: int, rows: int, seed: int
) -> None:
    weight = random_quant_tensor(spec, out_features, in_features, seed)
    x_MK = random_input(rows, in_features)
    assert_close_to_exact(product(kernel_named(name), x_MK, weight), x_MK, weight)


@pytest.mark.parametrize("name", QUANTIZED_KERNELS)
@given(spec=specs, in_features=sizes, seed=st.integers(0, 99))
def test_groups_of_any_size(name: str, spec: QuantSpec, in_features: int, seed: int) -> None:
    weight = uneven_quant_tensor(spec, 7, in_features, seed)
    x_MK = random_input(3, in_features)
    assert_close_to_exact(product(kernel_named(name), x_MK, weight), x_MK, weight)


@pytest.mark.parametrize("dtype", FLOATS)
@given(out_features=sizes, in_features=sizes, rows=rows)
def test_dense(dtype: torch.dtype, out_features: int, in_features: int, rows: int) -> None:
    weight = random_dense_tensor(out_features, in_features, dtype)
    x_MK = random_input(rows, in_features)
    assert_close_to_exact(product(kernel_named("torch_dense"), x_MK, weight), x_MK, weight)


@pytest.mark.parametrize("name", QUANTIZED_KERNELS)
@pytest.mark.parametrize("desc_act", [False, True])
def test_the_weights_are_those_of_the_definition(name: str, desc_act: bool) -> None:
    """Rows of the identity read the weights out: equal to the last bit."""
    weight = random_quant_tensor(QuantSpec(5, 16, sym=False, desc_act=desc_act), 12, 40)
    assert torch.equal(product(kernel_named(name), torch.eye(40), weight), dequantize(weight).T)


@pytest.mark.parametrize("desc_act", [False, True])
def test_many_panels_with_a_last_partial_one(
    monkeypatch: pytest.MonkeyPatch, desc_act: bool
) -> None:
    monkeypatch.setattr(panels, "PANEL_WEIGHTS", 3 * 40)
    weight = random_quant_tensor(QuantSpec(4, 16, sym=False, desc_act=desc_act), 11, 40)
    x_MK = random_input(2, 40)
    assert_close_to_exact(product(kernel_named("torch_panels"), x_MK, weight), x_MK, weight)


@pytest.mark.parametrize("name", QUANTIZED_KERNELS)
@given(spec=specs, out_features=sizes, in_features=sizes)
def test_memory_is_known_before_any_data(
    name: str, spec: QuantSpec, out_features: int, in_features: int
) -> None:
    weight = random_quant_tensor(spec, out_features, in_features)
    kernel, problem = kernel_named(name), GemmProblem.of(weight)
    assert problem == GemmProblem(weight.spec, out_features, in_features)
    assert kernel.prepared_bytes(problem) == kernel.prepare(weight).num_bytes


@pytest.mark.parametrize("dtype", FLOATS)
def test_memory_of_dense_weights(dtype: torch.dtype) -> None:
    weight, kernel = random_dense_tensor(6, 10, dtype), kernel_named("torch_dense")
    assert kernel.prepared_bytes(GemmProblem.of(weight)) == kernel.prepare(weight).num_bytes == 240


@given(spec=specs, in_features=sizes, seed=st.integers(0, 99))
def test_panels_at_most_double_for_uneven_groups(
    spec: QuantSpec, in_features: int, seed: int
) -> None:
    weight, kernel = uneven_quant_tensor(spec, 7, in_features, seed), kernel_named("torch_panels")
    promised = kernel.prepared_bytes(GemmProblem.of(weight))
    assert kernel.prepare(weight).num_bytes <= 2 * promised


@pytest.mark.parametrize("name", QUANTIZED_KERNELS)
def test_quantized_kernels_reject_dense_weights(name: str) -> None:
    problem = GemmProblem(DENSE, 8, 8)
    assert kernel_named(name).rejects(problem) == "runs quantized weights"
    assert kernel_named(name).rejects(replace(problem, spec=QuantSpec())) is None


def test_the_dense_kernel_rejects_quantized_weights() -> None:
    kernel, problem = kernel_named("torch_dense"), GemmProblem(QuantSpec(), 8, 8)
    assert kernel.rejects(problem) == "runs weights that are not quantized"
    assert kernel.rejects(replace(problem, spec=DENSE)) is None
