"""Random quantized and dense weights, and the float64 arithmetic they are checked with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from terrazzo.kernels.base import DenseTensor, Weight
from terrazzo.packing import QuantTensor, pack, sequential_groups, unpack
from terrazzo.spec import QuantSpec


def random_quant_tensor(
    spec: QuantSpec, out_features: int, in_features: int, seed: int = 0
) -> QuantTensor:
    """Any spec and size. Scales are positive and around 0.01; with `desc_act` the groups are of
    their regular sizes, over inputs in random order; `desc_act` of the result is the fact.
    """
    generator = torch.Generator().manual_seed(seed)
    regular = sequential_groups(in_features, spec.group_of(in_features))
    order = torch.randperm(in_features, generator=generator)
    g_idx = regular[order] if spec.desc_act else regular
    return _with_groups(spec, g_idx, spec.num_groups(in_features), out_features, generator)


def uneven_quant_tensor(
    spec: QuantSpec, out_features: int, in_features: int, seed: int = 0
) -> QuantTensor:
    """Act-order whose groups have random sizes, none at all among them."""
    generator = torch.Generator().manual_seed(seed)
    groups = spec.num_groups(in_features)
    g_idx = torch.randint(groups, (in_features,), dtype=torch.int32, generator=generator)
    return _with_groups(spec, g_idx, groups, out_features, generator)


def _with_groups(
    spec: QuantSpec, g_idx: Tensor, groups: int, out_features: int, generator: torch.Generator
) -> QuantTensor:
    in_features, legal = g_idx.shape[0], spec.max_code + 1
    codes = torch.randint(
        legal, (in_features, out_features), dtype=torch.uint8, generator=generator
    )
    zeros = torch.randint(legal, (groups, out_features), dtype=torch.uint8, generator=generator)
    scales = 0.01 * (torch.rand((groups, out_features), generator=generator) + 0.5)
    regular = sequential_groups(in_features, spec.group_of(in_features))
    return QuantTensor(
        replace(spec, desc_act=not torch.equal(g_idx, regular)),
        pack(codes, spec.bits),
        scales.to(torch.float16),
        torch.full_like(zeros, spec.mid_code) if spec.sym else zeros,
        g_idx,
    )


def random_dense_tensor(
    out_features: int, in_features: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> DenseTensor:
    generator = torch.Generator().manual_seed(seed)
    weight_NK = 0.1 * torch.randn((out_features, in_features), generator=generator)
    return DenseTensor(weight_NK.to(dtype))


def exact_weight(weight: Weight) -> Tensor:
    """float64 [N, K], one formula per code, independent of `packing.dequantize`."""
    if isinstance(weight, DenseTensor):
        return weight.weight_NK.double()
    codes_KN = unpack(weight.qweight, weight.in_features, weight.spec.bits).double()
    group_K = weight.g_idx.long()
    return (weight.scales.double()[group_K] * (codes_KN - weight.zeros.double()[group_K])).T


def random_input(rows: int, in_features: int, seed: int = 1) -> Tensor:
    """float32 [M, K]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, in_features), generator=generator)


def assert_close_to_exact(y_MN: Tensor, x_MK: Tensor, weight: Weight) -> None:
    """float32 rounding is all that `y_MN` may differ from `x @ W.T` by."""
    weight_NK = exact_weight(weight)
    exact_MN = x_MK.double() @ weight_NK.T
    magnitude_MN = x_MK.double().abs() @ weight_NK.abs().T
    epsilon = torch.finfo(torch.float32).eps
    bound_MN = (x_MK.shape[1] + 2) * epsilon * magnitude_MN
    assert bool(((y_MN.double() - exact_MN).abs() <= bound_MN).all())
