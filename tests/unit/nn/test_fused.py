"""A fused linear is the concatenation of its linears, in as few launches as their kinds allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers.quant_tensors import random_dense_tensor, random_input, random_quant_tensor
from terrazzo.errors import NoKernelError
from terrazzo.kernels import choose as chooser
from terrazzo.kernels.base import Weight
from terrazzo.kernels.choose import KernelPolicy
from terrazzo.kernels.dense import DenseKernel
from terrazzo.nn.fused import FusedLinear
from terrazzo.nn.linear import Linear
from terrazzo.nn.weights import NO_BIAS, Bias, LinearWeight
from terrazzo.packing import QuantTensor
from terrazzo.spec import QuantSpec

IN_FEATURES = 40
FOUR_BITS = QuantSpec(4, 16)


def quantized(spec: QuantSpec, width: int, seed: int = 0) -> QuantTensor:
    return random_quant_tensor(spec, width, IN_FEATURES, seed)


def same_order(left: QuantTensor, right: QuantTensor) -> QuantTensor:
    """`right` with the act-order of `left`."""
    return replace(right, g_idx=left.g_idx)


def named(weights: Sequence[Weight]) -> list[LinearWeight]:
    return [LinearWeight(f"shard{index}", weight) for index, weight in enumerate(weights)]


def alone(shard: LinearWeight, x_MK: torch.Tensor) -> torch.Tensor:
    return Linear.of([shard])(x_MK)


def widths(fused: FusedLinear) -> list[tuple[str, ...]]:
    return [segment.names for segment in fused.segments]


kinds = st.sampled_from(
    [
        FOUR_BITS,
        QuantSpec(3, 16, sym=False),
        QuantSpec(4, 8),
        QuantSpec(8, -1),
        QuantSpec(4, 16, desc_act=True),
        torch.float32,
        torch.bfloat16,
    ]
)


exact_policies = st.sampled_from([KernelPolicy.SPEED, KernelPolicy.MEMORY])


@st.composite
def shards(draw: st.DrawFn) -> LinearWeight:
    kind, width = draw(kinds), draw(st.integers(1, 9))
    seed = draw(st.integers(0, 9))
    weight: Weight
    if isinstance(kind, QuantSpec):
        weight = quantized(kind, width, seed)
    else:
        weight = random_dense_tensor(width, IN_FEATURES, kind, seed)
    bias = draw(st.sampled_from([NO_BIAS, Bias(torch.linspace(-1, 1, width))]))
    return LinearWeight(f"shard{seed}", weight, bias)


@given(st.lists(shards(), min_size=1, max_size=4), exact_policies, st.integers(1, 9))
def test_is_the_concatenation_of_its_linears(
    parts: list[LinearWeight], policy: KernelPolicy, rows: int
) -> None:
    x_MK = random_input(rows, IN_FEATURES)
    fused = FusedLinear(parts, policy)
    y_MN = fused(x_MK)
    assert fused.names == tuple(part.name for part in parts)
    assert y_MN.shape == (rows, fused.out_features)
    for part, columns_MN in zip(parts, fused.split(y_MN), strict=True):
        torch.testing.assert_close(columns_MN, alone(part, x_MK), rtol=1e-5, atol=1e-5)


def test_equal_specs_are_one_launch() -> None:
    fused = FusedLinear(named([quantized(FOUR_BITS, width) for width in (6, 2, 3)]))
    assert widths(fused) == [("shard0", "shard1", "shard2")]
    assert fused.columns == (slice(0, 6), slice(6, 8), slice(8, 11))


def test_only_neighbours_are_merged() -> None:
    eight = quantized(QuantSpec(8, 16), 2)
    fused = FusedLinear(named([quantized(FOUR_BITS, 2), eight, quantized(FOUR_BITS, 2)]))
    assert widths(fused) == [("shard0",), ("shard1",), ("shard2",)]


def test_dense_neighbours_of_any_dtype_are_merged() -> None:
    dense = [random_dense_tensor(3, IN_FEATURES, dtype) for dtype in (torch.float16, torch.float32)]
    fused = FusedLinear(named([quantized(FOUR_BITS, 2), *dense]))
    assert widths(fused) == [("shard0",), ("shard1", "shard2")]


def test_one_act_order_is_one_launch_and_two_are_two() -> None:
    act_order = replace(FOUR_BITS, desc_act=True)
    first, second = quantized(act_order, 3, seed=1), quantized(act_order, 4, seed=2)
    assert widths(FusedLinear(named([first, second]))) == [("shard0",), ("shard1",)]
    shared = named([first, same_order(first, second)])
    assert widths(FusedLinear(shared)) == [("shard0", "shard1")]
    x_MK = random_input(2, IN_FEATURES)
    expected = torch.cat([alone(shard, x_MK) for shard in shared], dim=1)
    torch.testing.assert_close(FusedLinear(shared)(x_MK), expected)


def test_a_shard_without_bias_beside_one_with() -> None:
    plain = LinearWeight("k", quantized(FOUR_BITS, 2))
    biased = LinearWeight("q", quantized(FOUR_BITS, 3), Bias(torch.tensor([1.0, 2.0, 3.0])))
    fused = FusedLinear([plain, biased])
    assert len(fused.segments) == 1
    zero = torch.zeros((1, IN_FEATURES))
    assert fused(zero).tolist() == [[0.0, 0.0, 1.0, 2.0, 3.0]]


def test_memory_is_what_the_segments_hold() -> None:
    fused = FusedLinear(named([quantized(FOUR_BITS, 2), random_dense_tensor(3, IN_FEATURES)]))
    assert len(fused.segments) == 2
    assert fused.num_bytes == sum(each.weight.num_bytes for each in fused.segments) > 0


def test_a_weight_that_no_kernel_runs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "KERNELS", {KernelPolicy.SPEED: (DenseKernel(),)})
    with pytest.raises(NoKernelError, match=r"^shard0, shard1: no kernel runs 4-bit g16 sym"):
        FusedLinear(named([quantized(FOUR_BITS, 2), quantized(FOUR_BITS, 3)]))
