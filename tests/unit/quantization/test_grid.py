"""Grids: what is stored, and that a search never loses to the plain range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from terrazzo.quantization.grid import Grid, fit_grid, round_to_codes
from terrazzo.quantization.options import ScaleSearch
from terrazzo.spec import PER_CHANNEL, QuantSpec


def weighted_error(weight_KN: Tensor, importance_K: Tensor, spec: QuantSpec, grid: Grid) -> Tensor:
    """[G, N]: the metric of the search, computed from what the grid stores."""
    errors = []
    rows = weight_KN.split(spec.group_of(weight_KN.shape[0]))
    weights = importance_K.split(spec.group_of(weight_KN.shape[0]))
    for w, h, scale, zero in zip(
        rows, weights, grid.scales_GN.double(), grid.zeros_GN.double(), strict=True
    ):
        rounded = (round_to_codes(w, scale, zero, spec) - zero) * scale
        errors.append(h @ (rounded - w).square())
    return torch.stack(errors)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("group_size", [16, 25, PER_CHANNEL])
def test_search_never_loses_to_the_range(bits: int, sym: bool, group_size: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight_KN = torch.randn(64, 40, generator=generator, dtype=torch.float64)
    importance_K = torch.rand(64, generator=generator, dtype=torch.float64).square()
    spec = QuantSpec(bits, group_size, sym)
    found, plain = (
        weighted_error(weight_KN, importance_K, spec, fit_grid(weight_KN, importance_K, spec, how))
        for how in (ScaleSearch.HESSIAN, ScaleSearch.MIN_MAX)
    )
    assert bool((found <= plain * (1 + 1e-12)).all())
    assert float(found.sum()) < float(plain.sum())


def test_the_range_of_a_symmetric_group_is_its_widest_weight() -> None:
    weight_KN = torch.tensor([[-3.0, 1.5], [0.5, -0.75]])
    grid = fit_grid(weight_KN, torch.ones(2), QuantSpec(4, PER_CHANNEL), ScaleSearch.MIN_MAX)
    assert grid.scales_GN.tolist() == [[pytest.approx(0.4, rel=1e-3), pytest.approx(0.2, rel=1e-3)]]
    assert grid.zeros_GN.tolist() == [[8, 8]]


def test_the_range_of_an_asymmetric_group_holds_zero() -> None:
    weight_KN = torch.tensor([[1.0, -15.0, -4.0], [15.0, -1.0, 11.0]])
    spec = QuantSpec(4, PER_CHANNEL, sym=False)
    grid = fit_grid(weight_KN, torch.ones(2), spec, ScaleSearch.MIN_MAX)
    assert grid.scales_GN.tolist() == [[1.0, 1.0, 1.0]]
    assert grid.zeros_GN.tolist() == [[0, 15, 4]]


def test_a_heavy_positive_side_takes_a_negative_scale() -> None:
    weight_KN = torch.tensor([[8.0], [-7.0], [3.0], [-1.0]])
    grid = fit_grid(weight_KN, torch.ones(4), QuantSpec(4, PER_CHANNEL), ScaleSearch.HESSIAN)
    assert float(grid.scales_GN) < 0
    error = weighted_error(weight_KN.double(), torch.ones(4).double(), QuantSpec(4, -1), grid)
    assert float(error) < 0.05


@pytest.mark.parametrize("sym", [True, False])
@pytest.mark.parametrize("magnitude", [1e-12, 1e-6, 1e6])
def test_scales_are_never_zero_or_infinite(sym: bool, magnitude: float) -> None:
    weight_KN = torch.linspace(-magnitude, magnitude, 32).unsqueeze(1)
    for search in ScaleSearch:
        grid = fit_grid(weight_KN, torch.ones(32), QuantSpec(4, 16, sym), search)
        assert bool(torch.isfinite(grid.scales_GN).all())
        assert bool((grid.scales_GN != 0).all())


def test_chunks_of_outputs_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    weight_KN = torch.randn(32, 50, generator=torch.Generator().manual_seed(5))
    spec = QuantSpec(4, 16)
    whole = fit_grid(weight_KN, torch.ones(32), spec, ScaleSearch.HESSIAN)
    monkeypatch.setattr("terrazzo.quantization.grid.CHUNK_WEIGHTS", 16 * 7)
    parts = fit_grid(weight_KN, torch.ones(32), spec, ScaleSearch.HESSIAN)
    assert torch.equal(whole.scales_GN, parts.scales_GN)
