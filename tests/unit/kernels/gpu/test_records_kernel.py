"""Records hold the weights they were made of, for every spec and shape."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.quant_tensors import (
    random_dense_tensor,
    random_input,
    random_quant_tensor,
    uneven_quant_tensor,
)
from terrazzo.kernels.base import GemmProblem
from terrazzo.kernels.gpu.kernel import RecordsKernel, RecordsPrepared
from terrazzo.kernels.gpu.records import quantized_records
from terrazzo.kernels.gpu.unpacking import dequantized
from terrazzo.packing import QuantTensor, dequantize
from terrazzo.spec import PER_CHANNEL, QuantSpec

CPU = torch.device("cpu")
KERNEL = RecordsKernel(torch.bfloat16)

specs = st.builds(
    QuantSpec,
    bits=st.integers(2, 8),
    group_size=st.sampled_from([PER_CHANNEL, 1, 8, 16, 24, 32, 40, 128]),
    sym=st.booleans(),
    desc_act=st.booleans(),
)
sizes = st.integers(1, 300)


def assert_same_weights(weight: QuantTensor) -> None:
    unpacked = dequantized(quantized_records(weight, CPU), torch.bfloat16)
    assert torch.equal(unpacked, dequantize(weight))


@given(spec=specs, out_features=st.integers(1, 40), in_features=sizes, seed=st.integers(0, 99))
def test_what_went_in_comes_out(
    spec: QuantSpec, out_features: int, in_features: int, seed: int
) -> None:
    assert_same_weights(random_quant_tensor(spec, out_features, in_features, seed))
    assert_same_weights(uneven_quant_tensor(spec, out_features, in_features, seed))


@given(spec=specs, out_features=st.integers(1, 40), in_features=sizes)
def test_memory_is_known_before_any_data_is(
    spec: QuantSpec, out_features: int, in_features: int
) -> None:
    weight = random_quant_tensor(spec, out_features, in_features, 0)
    prepared = KERNEL.prepare(weight)
    expected = KERNEL.prepared_bytes(GemmProblem.of(weight))
    # A permutation that happens to be the identity needs no lookup.
    assert prepared.num_bytes <= expected
    if not spec.desc_act:
        assert prepared.num_bytes == expected


@pytest.mark.parametrize("shape", [(16, 128), (20, 300)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dense_weights_round_once(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    kernel = RecordsKernel(dtype)
    weight = random_dense_tensor(*shape, torch.float32)
    prepared = kernel.prepare(weight)
    assert isinstance(prepared, RecordsPrepared)
    assert prepared.num_bytes == kernel.prepared_bytes(GemmProblem.of(weight))
    rounded_NK = weight.weight_NK.to(dtype).float()
    assert torch.equal(dequantized(prepared.records, dtype), rounded_NK)
    x_MK = random_input(3, shape[1])
    out_MN = torch.full((3, shape[0]), torch.nan)
    kernel.run(x_MK, prepared, out_MN)
    assert torch.allclose(out_MN, x_MK.to(dtype).float() @ rounded_NK.T, atol=1e-5)


def test_halves() -> None:
    weight = random_quant_tensor(QuantSpec(4, 64), 96, 256, 0)
    records = quantized_records(weight, CPU)
    halves = [dequantized(half, torch.bfloat16) for half in records.halves()]
    assert torch.equal(torch.cat(halves), dequantize(weight))
