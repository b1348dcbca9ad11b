"""What GPTQ promises for every weight, input and spec."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrazzo.packing import dequantize, unpack
from terrazzo.quantization.gptq import gptq, round_to_nearest
from terrazzo.spec import PER_CHANNEL, QuantSpec

specs = st.builds(
    QuantSpec,
    bits=st.integers(2, 8),
    group_size=st.sampled_from([PER_CHANNEL, 1, 3, 8, 32]),
    sym=st.booleans(),
    desc_act=st.booleans(),
)


def draw_problem(seed: int, out_features: int, in_features: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight_NK = torch.randn(out_features, in_features, generator=generator)
    x_TK = torch.randn(64, in_features, generator=generator)
    x_TK += 2 * torch.randn(64, 1, generator=generator)
    return weight_NK, x_TK.T @ x_TK / 32


@settings(max_examples=30)
@given(spec=specs, seed=st.integers(0, 999), rows=st.integers(1, 9), inputs=st.integers(1, 40))
def test_what_is_packed_is_what_was_quantized(
    spec: QuantSpec, seed: int, rows: int, inputs: int
) -> None:
    weight_NK, hessian_KK = draw_problem(seed, rows, inputs)
    result = gptq(weight_NK, hessian_KK, spec)
    packed = result.packed()
    assert torch.equal(unpack(packed.qweight, inputs, spec.bits), result.codes_KN)
    group_K = result.g_idx_K.long()
    centered_KN = result.codes_KN.float() - result.zeros_GN.float()[group_K]
    assert torch.equal(dequantize(packed), (result.scales_GN.float()[group_K] * centered_KN).T)
    counts = torch.bincount(group_K, minlength=spec.num_groups(inputs))
    assert int(counts.max()) <= spec.group_of(inputs)
    assert int(counts.min()) >= 1


@settings(max_examples=30)
@given(spec=specs, seed=st.integers(0, 999), rows=st.integers(1, 9), inputs=st.integers(1, 40))
def test_output_channels_do_not_know_each_other(
    spec: QuantSpec, seed: int, rows: int, inputs: int
) -> None:
    """Float64: matrix products of another height may round their last bit otherwise."""
    weight_NK, hessian_KK = (tensor.double() for tensor in draw_problem(seed, rows, inputs))
    whole = gptq(weight_NK, hessian_KK, spec)
    alone = gptq(weight_NK[-1:], hessian_KK, spec)
    assert torch.equal(whole.codes_KN[:, -1:], alone.codes_KN)
    assert torch.equal(whole.scales_GN[:, -1:], alone.scales_GN)


@settings(max_examples=30)
@given(spec=specs, seed=st.integers(0, 999), inputs=st.integers(1, 40))
def test_independent_inputs_make_gptq_round_to_nearest(
    spec: QuantSpec, seed: int, inputs: int
) -> None:
    weight_NK, hessian_KK = draw_problem(seed, 5, inputs)
    diagonal_KK = torch.diag(hessian_KK.diagonal())
    swept = gptq(weight_NK, diagonal_KK, spec)
    assert torch.equal(swept.codes_KN, round_to_nearest(weight_NK, diagonal_KK, spec).codes_KN)
