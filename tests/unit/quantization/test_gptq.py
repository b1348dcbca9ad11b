"""The sweep against the paper's own column-by-column update, and what must hold on any input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from terrazzo.errors import ConfigError, QuantizationError
from terrazzo.packing import dequantize, sequential_groups
from terrazzo.quantization.curvature import measure_curvature
from terrazzo.quantization.gptq import Quantized, gptq, round_to_nearest
from terrazzo.quantization.options import GptqOptions, ScaleSearch
from terrazzo.spec import PER_CHANNEL, QuantSpec

SPECS = [
    QuantSpec(bits=4, group_size=16),
    QuantSpec(bits=3, group_size=16, sym=False),
    QuantSpec(bits=2, group_size=24),
    QuantSpec(bits=8, group_size=PER_CHANNEL),
    QuantSpec(bits=4, group_size=16, desc_act=True),
    QuantSpec(bits=5, group_size=24, sym=False, desc_act=True),
    QuantSpec(bits=6, group_size=7),
    QuantSpec(bits=7, group_size=100, sym=False),
]


def problem(
    out_features: int = 12, in_features: int = 80, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """A weight and the Hessian of inputs that lie near a plane of a few dimensions."""
    generator = torch.Generator().manual_seed(7)
    weight_NK = torch.randn(out_features, in_features, generator=generator, dtype=dtype)
    mixing = torch.randn(in_features // 4, in_features, generator=generator, dtype=dtype)
    hidden = torch.randn(400, in_features // 4, generator=generator, dtype=dtype)
    noise = torch.randn(400, in_features, generator=generator, dtype=dtype)
    x_TK = hidden @ mixing + 0.3 * noise
    return weight_NK, 2 / 400 * x_TK.T @ x_TK


def dequantized(result: Quantized) -> Tensor:
    """[N, K], by the definition of the format."""
    return dequantize(result.packed())


def paper_codes(weight_NK: Tensor, hessian_KK: Tensor, damp: float, result: Quantized) -> Tensor:
    """GPTQ as the paper's algorithm states it, one column at a time, with the inverse formed.

    Takes the grid of `result` and gives its own codes, uint8 [K, N].
    """
    order = torch.argsort(hessian_KK.diagonal(), descending=True, stable=True)
    damped = hessian_KK + damp * hessian_KK.diagonal().mean() * torch.eye(len(order)).double()
    inverse = torch.linalg.inv(damped[order][:, order])
    upper = torch.linalg.cholesky(inverse, upper=True)
    weight = weight_NK[:, order].clone()
    codes = torch.empty(weight.shape[::-1], dtype=torch.uint8)
    for column, natural in enumerate(order.tolist()):
        group = int(result.g_idx_K[natural])
        scale, zero = result.scales_GN[group].double(), result.zeros_GN[group].double()
        code = (torch.round(weight[:, column] / scale) + zero).clamp(0, result.spec.max_code)
        error = (weight[:, column] - (code - zero) * scale) / upper[column, column]
        weight[:, column:] -= error.unsqueeze(1) * upper[column, column:]
        codes[natural] = code.to(torch.uint8)
    return codes


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("block_size", [1, 16, 33, 128])
def test_sweep_gives_the_codes_of_the_paper(spec: QuantSpec, block_size: int) -> None:
    weight_NK, hessian_KK = problem()
    options = GptqOptions(block_size=block_size)
    result = gptq(weight_NK, hessian_KK, spec, options)
    assert torch.equal(result.codes_KN, paper_codes(weight_NK, hessian_KK, options.damp, result))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_sweep_beats_rounding_on_correlated_inputs(spec: QuantSpec) -> None:
    weight_NK, hessian_KK = problem()
    swept = gptq(weight_NK, hessian_KK, spec)
    rounded = round_to_nearest(weight_NK, hessian_KK, spec)
    assert swept.loss < 0.8 * rounded.loss


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_loss_is_the_relative_error_of_the_outputs(spec: QuantSpec) -> None:
    weight_NK, hessian_KK = problem()
    result = gptq(weight_NK, hessian_KK, spec)
    error_NK = weight_NK - dequantized(result)
    expected = (error_NK @ hessian_KK @ error_NK.T).trace()
    expected /= (weight_NK @ hessian_KK @ weight_NK.T).trace()
    assert result.loss == pytest.approx(expected.item(), rel=1e-9)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_results_have_the_shapes_of_the_format(spec: QuantSpec) -> None:
    weight_NK, hessian_KK = problem(dtype=torch.float32)
    result = gptq(weight_NK, hessian_KK, spec)
    groups = spec.num_groups(80)
    assert (result.codes_KN.shape, result.codes_KN.dtype) == ((80, 12), torch.uint8)
    assert (result.scales_GN.shape, result.scales_GN.dtype) == ((groups, 12), torch.float16)
    assert (result.zeros_GN.shape, result.zeros_GN.dtype) == ((groups, 12), torch.uint8)
    assert (result.g_idx_K.shape, result.g_idx_K.dtype) == ((80,), torch.int32)
    assert int(result.codes_KN.max()) <= spec.max_code
    assert not spec.sym or bool((result.zeros_GN == spec.mid_code).all())


def test_static_act_order_leaves_no_trace() -> None:
    weight_NK, hessian_KK = problem()
    result = gptq(weight_NK, hessian_KK, QuantSpec(group_size=16))
    assert torch.equal(result.g_idx_K, sequential_groups(80, 16))
    assert not result.spec.desc_act


def test_act_order_groups_inputs_by_descending_diagonal() -> None:
    weight_NK, hessian_KK = problem()
    result = gptq(weight_NK, hessian_KK, QuantSpec(group_size=16, desc_act=True))
    order = torch.argsort(hessian_KK.diagonal(), descending=True, stable=True)
    rank = torch.argsort(order)
    assert torch.equal(result.g_idx_K, (rank // 16).to(torch.int32))
    assert result.spec.desc_act


def test_act_order_of_one_group_is_no_act_order() -> None:
    weight_NK, hessian_KK = problem()
    result = gptq(weight_NK, hessian_KK, QuantSpec(group_size=PER_CHANNEL, desc_act=True))
    assert not result.spec.desc_act


def test_inputs_never_seen_are_rounded_and_disturb_nobody() -> None:
    weight_NK, hessian_KK = problem()
    dead = torch.tensor([3, 4, 5, 40])
    hessian_KK[dead] = 0
    hessian_KK[:, dead] = 0
    spec = QuantSpec(group_size=16)
    result = gptq(weight_NK, hessian_KK, spec)
    rounded = round_to_nearest(weight_NK, hessian_KK, spec)
    assert torch.equal(result.codes_KN[dead], rounded.codes_KN[dead])
    assert bool((result.codes_KN[dead] != spec.mid_code).any())
    assert result.log == ()


def test_inputs_never_seen_at_all_are_rounded() -> None:
    weight_NK, hessian_KK = problem()
    spec = QuantSpec(group_size=16)
    nothing_KK = torch.zeros_like(hessian_KK)
    result = gptq(weight_NK, nothing_KK, spec)
    assert torch.equal(result.codes_KN, round_to_nearest(weight_NK, nothing_KK, spec).codes_KN)
    assert result.loss == 0


def test_fewer_samples_than_inputs_need_no_more_damping() -> None:
    weight_NK, _ = problem()
    x_TK = torch.randn(5, 80, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = gptq(weight_NK, x_TK.T @ x_TK, QuantSpec(group_size=16))
    assert result.log == ()
    assert result.loss < 1e-4


def test_damping_grows_until_the_hessian_is_definite() -> None:
    weight_NK, hessian_KK = problem()
    lowest = torch.linalg.eigvalsh(hessian_KK)[0]
    shift = lowest + 0.05 * hessian_KK.diagonal().mean()
    indefinite_KK = hessian_KK - shift * torch.eye(80)
    result = gptq(weight_NK, indefinite_KK, QuantSpec(group_size=16))
    assert result.log == ("damping by 0.01 of the mean diagonal left the Hessian indefinite",)


def test_a_hopeless_hessian_still_rounds_to_nearest_and_says_so() -> None:
    weight_NK, hessian_KK = problem()
    skew_KK = hessian_KK.clone()
    skew_KK[0, 1] = skew_KK[1, 0] = 1e6
    spec = QuantSpec(group_size=16)
    result = gptq(weight_NK, skew_KK, spec)
    assert len(result.log) == 5
    assert "rounded to nearest" in result.log[-1]
    assert torch.equal(result.codes_KN, round_to_nearest(weight_NK, skew_KK, spec).codes_KN)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_not_finite_inputs_are_refused_with_a_count(value: float) -> None:
    weight_NK, hessian_KK = problem()
    hessian_KK[2, 3] = value
    with pytest.raises(QuantizationError, match="Hessian holds 1 of 6400 values"):
        gptq(weight_NK, hessian_KK, QuantSpec())
    with pytest.raises(QuantizationError, match="weight holds 960 of 960 values"):
        gptq(weight_NK * value, problem()[1], QuantSpec())


@pytest.mark.parametrize("search", list(ScaleSearch))
def test_zero_weights_stay_zero(search: ScaleSearch) -> None:
    _, hessian_KK = problem()
    for spec in (QuantSpec(group_size=16), QuantSpec(group_size=16, sym=False)):
        result = gptq(torch.zeros(4, 80).double(), hessian_KK, spec, GptqOptions(search=search))
        assert torch.equal(dequantized(result), torch.zeros(4, 80))
        assert bool((result.scales_GN != 0).all())


def test_siblings_share_one_factorization() -> None:
    weight_NK, hessian_KK = problem()
    shared = measure_curvature(hessian_KK, 0.01)
    lower_KK = shared.lower_KK
    ordered_KK = hessian_KK[shared.order_K][:, shared.order_K]
    damped_KK = ordered_KK + 0.01 * hessian_KK.diagonal().mean() * torch.eye(80)
    assert torch.equal(lower_KK, lower_KK.tril())
    torch.testing.assert_close(lower_KK.T @ lower_KK, damped_KK)
    assert shared.energy(weight_NK.T) == pytest.approx(
        float((weight_NK @ hessian_KK @ weight_NK.T).trace())
    )


def test_illegal_options_name_the_legal_ones() -> None:
    with pytest.raises(ConfigError, match="damp is 0; legal is a number between 0 and 1"):
        GptqOptions(damp=0)
    with pytest.raises(ConfigError, match="block_size is 0; legal is a positive number"):
        replace(GptqOptions(), block_size=0)


def test_portions_of_outputs_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_NK, hessian_KK = problem()
    spec = QuantSpec(3, 16, sym=False, desc_act=True)
    whole = gptq(weight_NK, hessian_KK, spec)
    monkeypatch.setattr("terrazzo.quantization.gptq.OUTPUTS_AT_ONCE", 5)
    portions = gptq(weight_NK, hessian_KK, spec)
    assert torch.equal(whole.codes_KN, portions.codes_KN)
    assert torch.equal(whole.zeros_GN, portions.zeros_GN)
    assert whole.loss == pytest.approx(portions.loss)
