"""Scales and zero points of the groups of one weight, chosen before the sweep.

The search narrows the min-max range step by step and keeps, per group and output channel, the grid
with the least `sum_k h_k (w_k - q_k)**2`, where `h` is the diagonal of the Hessian: an input that
carries more energy counts for more. A symmetric grid has one level more below zero than above, so
the search also tries negative scales, which put that level on the other side; `(code - zero) *
scale` needs nothing new for them. Scales are rounded to float16 here, so that everything later sees
the values that are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.quantization.options import ScaleSearch
from terrazzo.spec import QuantSpec

SEARCH_STEPS = 36
CHUNK_WEIGHTS = 1 << 17
"""Weights the search looks at together; small enough to stay in the cache over all candidates."""

SMALLEST_SCALE = 2.0**-24
LARGEST_SCALE = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class Grid:
    """scales: float16 [G, N], never zero, negative where that is better. zeros: uint8 [G, N]."""

    scales_GN: Tensor
    zeros_GN: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Candidate:
    """One scale (float16 values) and zero point (whole numbers) per group and output, in compute
    dtype.
    """

    scale_G1N: Tensor
    zero_G1N: Tensor

    def error(self, w_GKN: Tensor, importance_G1K: Tensor, spec: QuantSpec) -> Tensor:
        """[G, 1, N]: the squared error of rounding to nearest, weighted by importance."""
        levels_GKN = (w_GKN / self.scale_G1N).round_()
        levels_GKN = torch.clamp(levels_GKN, -self.zero_G1N, spec.max_code - self.zero_G1N)
        return importance_G1K @ levels_GKN.mul_(self.scale_G1N).sub_(w_GKN).square_()


def fit_grid(weight_KN: Tensor, importance_K: Tensor, spec: QuantSpec, search: ScaleSearch) -> Grid:
    """Rows `[i * group, (i + 1) * group)` of `weight_KN` form group `i`; the last may be short.

    weight_KN: float32 or float64, finite. importance_K: same dtype, not negative.
    """
    in_features, out_features = weight_KN.shape
    shape = (spec.num_groups(in_features), out_features)
    scales_GN = torch.empty(shape, dtype=torch.float16, device=weight_KN.device)
    zeros_GN = torch.empty(shape, dtype=torch.uint8, device=weight_KN.device)
    for first, group, rows in _spans(in_features, spec.group_of(in_features)):
        w_GKN = weight_KN[rows].reshape(-1, group, out_features)
        importance_G1K = importance_K[rows].reshape(-1, 1, group)
        for groups, columns in _chunks(w_GKN.shape):
            best = _fit(w_GKN[groups, :, columns], importance_G1K[groups], spec, search)
            places = slice(first + groups.start, first + groups.stop)
            scales_GN[places, columns] = best.scale_G1N.squeeze(1).to(torch.float16)
            zeros_GN[places, columns] = best.zero_G1N.squeeze(1).to(torch.uint8)
    return Grid(scales_GN, zeros_GN)


def _spans(in_features: int, group: int) -> Iterator[tuple[int, int, slice]]:
    """(first group, its length, rows): the whole groups, then the short one where there is one."""
    whole = in_features // group
    rest = in_features % group
    if whole:
        yield 0, group, slice(0, in_features - rest)
    if rest:
        yield whole, rest, slice(in_features - rest, in_features)


def _chunks(shape: torch.Size) -> Iterator[tuple[slice, slice]]:
    """Groups and outputs to look at together."""
    num_groups, group, out_features = shape
    columns = min(out_features, max(1, CHUNK_WEIGHTS // group))
    groups = max(1, CHUNK_WEIGHTS // (group * columns))
    for start in range(0, num_groups, groups):
        for column in range(0, out_features, columns):
            stop = min(start + groups, num_groups)
            yield slice(start, stop), slice(column, column + columns)


def round_to_codes(w: Tensor, scale: Tensor, zero: Tensor, spec: QuantSpec) -> Tensor:
    """The nearest codes, as whole numbers in the dtype of `w`."""
    return (w / scale).round_().add_(zero).clamp_(0, spec.max_code)


def _fit(w_GKN: Tensor, importance_G1K: Tensor, spec: QuantSpec, search: ScaleSearch) -> _Candidate:
    candidates = (_symmetric if spec.sym else _asymmetric)(w_GKN, spec)
    best = next(candidates)
    if search is ScaleSearch.MIN_MAX:
        return best
    best_error_G1N = best.error(w_GKN, importance_G1K, spec)
    for candidate in candidates:
        error_G1N = candidate.error(w_GKN, importance_G1K, spec)
        better_G1N = error_G1N < best_error_G1N
        best_error_G1N = torch.minimum(error_G1N, best_error_G1N)
        best = _Candidate(
            torch.where(better_G1N, candidate.scale_G1N, best.scale_G1N),
            torch.where(better_G1N, candidate.zero_G1N, best.zero_G1N),
        )
    return best


def _symmetric(w_GKN: Tensor, spec: QuantSpec) -> Iterator[_Candidate]:
    """The min-max grid first, then narrower and mirrored ones.

    The min-max grid clips the widest weight by half a step where it is positive; the widest one
    tried clips nothing.
    """
    widest_G1N = w_GKN.abs().amax(dim=1, keepdim=True) * (2 / spec.max_code)
    zero_G1N = torch.full_like(widest_G1N, spec.mid_code)
    yield _Candidate(_storable(widest_G1N), zero_G1N)
    for factor in _factors(spec.max_code / (spec.max_code - 1), spec):
        for sign in (1, -1):
            yield _Candidate(sign * _storable(widest_G1N * factor), zero_G1N)


def _asymmetric(w_GKN: Tensor, spec: QuantSpec) -> Iterator[_Candidate]:
    """The min-max grid first, then narrower ones; zero is always exactly representable."""
    low_G1N = w_GKN.amin(dim=1, keepdim=True).clamp_(max=0)
    high_G1N = w_GKN.amax(dim=1, keepdim=True).clamp_(min=0)
    for factor in _factors(1.0, spec):
        scale_G1N = _storable((high_G1N - low_G1N) * (factor / spec.max_code))
        zero_G1N = (low_G1N * -factor / scale_G1N).round_().clamp_(0, spec.max_code)
        yield _Candidate(scale_G1N, zero_G1N)


def _factors(widest: float, spec: QuantSpec) -> list[float]:
    """What the range is multiplied by, falling; the more levels, the less there is to clip."""
    narrowest = 1 - 1.4 / 2 ** (spec.bits / 2)
    step = (widest - narrowest) / (SEARCH_STEPS - 1)
    return [widest - index * step for index in range(SEARCH_STEPS)]


def _storable(scale: Tensor) -> Tensor:
    """Positive scales -> the nearest float16 values that are neither zero nor infinite."""
    bounded = scale.clamp(SMALLEST_SCALE, LARGEST_SCALE)
    return bounded.to(torch.float16).to(scale.dtype)
