"""Scales and zero points of the groups of one weight, chosen before the sweep.

The search narrows the min-max range step by step and keeps, per group and output channel, the grid
with the least `sum_k h_k (w_k - q_k)**2`, where `h` is the diagonal of the Hessian: an input that
carries more energy counts for more. A symmetric grid has one level more below zero than above, so
the search also tries negative scales, which put that level on the other side; `(code - zero) *
scale` needs nothing new for them. Scales are rounded to float16 here, so that everything later sees
the values that are stored.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.spec import QuantSpec

SEARCH_STEPS = 36
CHUNK_WEIGHTS = 1 << 17
"""Weights the search looks at together; small enough to stay in the cache over all candidates."""

SMALLEST_SCALE = 2.0**-24
LARGEST_SCALE = 65504.0


class ScaleSearch(enum.Enum):
    """How a grid is chosen: MIN_MAX takes the range of the weights, HESSIAN searches below it."""

    MIN_MAX = "min_max"
    HESSIAN = "hessian"


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """scales: float16 [G, N], never zero, negative where that is better. zeros: uint8 [G, N]."""

    scales_GN: Tensor
    zeros_GN: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """One scale (float16 values) and zero point (whole numbers) per output, in compute dtype."""

    scale_N: Tensor
    zero_N: Tensor

    def error(self, w_KN: Tensor, importance_K: Tensor, spec: QuantSpec) -> Tensor:
        """[N]: the squared error of rounding to nearest, weighted by the importance of inputs."""
        levels_KN = (w_KN / self.scale_N).round_()
        levels_KN = torch.clamp(levels_KN, -self.zero_N, spec.max_code - self.zero_N)
        return importance_K @ levels_KN.mul_(self.scale_N).sub_(w_KN).square_()


def fit_grid(weight_KN: Tensor, importance_K: Tensor, spec: QuantSpec, search: ScaleSearch) -> Grid:
    """Rows `[i * group, (i + 1) * group)` of `weight_KN` form group `i`; the last may be short.

    weight_KN: float32 or float64, finite. importance_K: same dtype, not negative.
    """
    in_features, out_features = weight_KN.shape
    groups, group = spec.num_groups(in_features), spec.group_of(in_features)
    grid = Grid(
        torch.empty((groups, out_features), dtype=torch.float16, device=weight_KN.device),
        torch.empty((groups, out_features), dtype=torch.uint8, device=weight_KN.device),
    )
    step = max(1, CHUNK_WEIGHTS // group)
    for index in range(groups):
        rows = slice(index * group, (index + 1) * group)
        for start in range(0, out_features, step):
            columns = slice(start, start + step)
            best = _fit_group(weight_KN[rows, columns], importance_K[rows], spec, search)
            grid.scales_GN[index, columns] = best.scale_N
            grid.zeros_GN[index, columns] = best.zero_N
    return grid


def round_to_codes(w: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec) -> Tensor:
    """The nearest codes, as whole numbers in the dtype of `w`."""
    return (w / scale).round_().add_(zero).clamp_(0, spec.max_code)


def _fit_group(
    w_KN: Tensor, importance_K: Tensor, spec: QuantSpec, search: ScaleSearch
) -> _Candidate:
    candidates = (_symmetric if spec.sym else _asymmetric)(w_KN, spec)
    best = next(candidates)
    if search is ScaleSearch.MIN_MAX:
        return best
    best_error_N = best.error(w_KN, importance_K, spec)
    for candidate in candidates:
        error_N = candidate.error(w_KN, importance_K, spec)
        better_N = error_N < best_error_N
        best_error_N = torch.minimum(error_N, best_error_N)
        best = _Candidate(
            torch.where(better_N, candidate.scale_N, best.scale_N),
            torch.where(better_N, candidate.zero_N, best.zero_N),
        )
    return best


def _symmetric(w_KN: Tensor, spec: QuantSpec) -> Iterator[_Candidate]:
    """The min-max grid first, then narrower and mirrored ones.

    The min-max grid clips the widest weight by half a step where it is positive; the widest one
    tried clips nothing.
    """
    widest_N = w_KN.abs().amax(dim=0) * (2 / spec.max_code)
    zero_N = torch.full_like(widest_N, spec.mid_code)
    yield _Candidate(_storable(widest_N), zero_N)
    for factor in _factors(spec.max_code / (spec.max_code - 1), spec):
        for sign in (1, -1):
            yield _Candidate(sign * _storable(widest_N * factor), zero_N)


def _asymmetric(w_KN: Tensor, spec: QuantSpec) -> Iterator[_Candidate]:
    """The min-max grid first, then narrower ones; zero is always exactly representable."""
    low_N = w_KN.amin(dim=0).clamp_(max=0)
    high_N = w_KN.amax(dim=0).clamp_(min=0)
    for factor in _factors(1.0, spec):
        scale_N = _storable((high_N - low_N) * (factor / spec.max_code))
        zero_N = (low_N * -factor / scale_N).round_().clamp_(0, spec.max_code)
        yield _Candidate(scale_N, zero_N)


def _factors(widest: float, spec: QuantSpec) -> list[float]:
    """What the range is multiplied by, falling; the more levels, the less there is to clip."""
    narrowest = 1 - 1.4 / 2 ** (spec.bits / 2)
    step = (widest - narrowest) / (SEARCH_STEPS - 1)
    return [widest - index * step for index in range(SEARCH_STEPS)]


def _storable(scale_N: Tensor) -> Tensor:
    """Positive scales -> the nearest float16 values that are neither zero nor infinite."""
    bounded_N = scale_N.clamp(SMALLEST_SCALE, LARGEST_SCALE)
    return bounded_N.to(torch.float16).to(scale_N.dtype)
