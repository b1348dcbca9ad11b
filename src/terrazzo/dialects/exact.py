"""The same numbers in another spec: nothing is rounded, so nothing is lost.

A code minus its zero point is an integer; wider codes hold it around the middle code. A group can
be cut into groups that repeat its scale. Inputs can be put in another order where whatever makes
them can be, too. The price is size, never precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from terrazzo.packing import QuantTensor, pack, sequential_groups, unpack
from terrazzo.spec import LEGAL_BITS, QuantSpec


def symmetric_bits(weight: QuantTensor) -> int:
    """Bits that hold every code around the middle code; 9 when that is more than eight."""
    centered = _centered(weight)
    low, high = int(centered.min()), int(centered.max())
    fitting = (bits for bits in LEGAL_BITS if -(1 << (bits - 1)) <= low and high < 1 << (bits - 1))
    return max(next(fitting, LEGAL_BITS.stop), weight.spec.bits if weight.spec.sym else 0)


def recode(weight: QuantTensor, target: QuantSpec) -> QuantTensor:
    """`weight` with the bits, groups and symmetry of `target`.

    target: must have room for it, and its groups must lie inside those of `weight`.
    """
    codes, zeros = unpack(weight.qweight, weight.in_features, weight.spec.bits), weight.zeros
    if target.sym and not weight_is_middle(weight, target):
        codes = (_centered(weight) + target.mid_code).to(torch.uint8)
        zeros = torch.full_like(zeros, target.mid_code)
    if target.desc_act:
        assert target.group_size == weight.spec.group_size, "groups in act-order stay as they are"
        source, g_idx = torch.arange(weight.num_groups), weight.g_idx
    else:
        size = target.group_of(weight.in_features)
        source = weight.g_idx[::size].long()
        g_idx = sequential_groups(weight.in_features, size)
    return QuantTensor(
        target, pack(codes, target.bits), weight.scales[source], zeros[source], g_idx
    )


def weight_is_middle(weight: QuantTensor, target: QuantSpec) -> bool:
    """Whether the zero points are already the middle code of `target`."""
    return weight.spec.bits == target.bits and bool((weight.zeros == target.mid_code).all())


def input_order(weight: QuantTensor) -> Tensor:
    """int64 [K]: the inputs, sorted by group and otherwise as they are."""
    return torch.argsort(weight.g_idx, stable=True)


def with_inputs(weight: QuantTensor, order: Tensor) -> QuantTensor:
    """The weight for inputs in another order; act-order ends where that makes groups regular."""
    codes = unpack(weight.qweight, weight.in_features, weight.spec.bits)[order]
    g_idx = weight.g_idx[order]
    regular = sequential_groups(weight.in_features, weight.spec.group_of(weight.in_features))
    spec = replace(weight.spec, desc_act=not torch.equal(g_idx, regular))
    return replace(weight, spec=spec, qweight=pack(codes, spec.bits), g_idx=g_idx)


def with_outputs(weight: QuantTensor, order: Tensor | slice) -> QuantTensor:
    """The weight with its outputs in another order, or some of them."""
    return replace(
        weight,
        qweight=weight.qweight[:, order],
        scales=weight.scales[:, order],
        zeros=weight.zeros[:, order],
    )


def side_by_side(weights: Sequence[QuantTensor]) -> QuantTensor:
    """One weight with the outputs of all; specs and orders of inputs must be equal."""
    first = weights[0]
    assert all(each.spec == first.spec for each in weights), "parts of one module must be alike"
    assert all(torch.equal(each.g_idx, first.g_idx) for each in weights), "orders differ"
    return replace(
        first,
        qweight=torch.cat([each.qweight for each in weights], dim=1),
        scales=torch.cat([each.scales for each in weights], dim=1),
        zeros=torch.cat([each.zeros for each in weights], dim=1),
    )


def _centered(weight: QuantTensor) -> Tensor:
    """int16 [K, N]: codes minus zero points."""
    codes = unpack(weight.qweight, weight.in_features, weight.spec.bits).to(torch.int16)
    return codes - weight.zeros.to(torch.int16)[weight.g_idx.long()]
