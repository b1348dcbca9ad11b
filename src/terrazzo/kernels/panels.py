"""Codes stay one byte each; at every call a panel of rows becomes float32 and is multiplied.

A panel stays in the cache between the two, so a call reads one byte per weight from memory where
float32 weights cost four. In exchange every call converts every weight: with one row the arithmetic
costs more than the saved traffic, with many rows both vanish beside the multiplication.

Layout: the inputs of a group stand together in blocks of C codes, codes_NBC, with one scale and
one zero point per row and block. A group whose size is no multiple of C (the last one, mostly) ends
with codes equal to its zero point: weights of exactly zero. With act-order the input of each place
is looked up, and a place without an input of its own repeats input 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.kernels.base import GemmProblem, Prepared, Weight
from terrazzo.kernels.blocks import Blocks
from terrazzo.kernels.product import multiply
from terrazzo.packing import QuantTensor, unpack
from terrazzo.spec import QuantSpec

PANEL_WEIGHTS = 1 << 19
"""Weights converted at once: 2 MiB of float32. Measured against 0.5, 1 and 4 MiB with one row: the
smallest is up to twice as slow, the largest no faster.
"""


class PanelsKernel:
    """1 byte per weight. The same float32 weights as the reference, bit for bit."""

    __slots__ = ()

    @property
    def name(self) -> str:
        return "torch_panels"

    def rejects(self, problem: GemmProblem) -> str | None:
        return None if isinstance(problem.spec, QuantSpec) else "runs quantized weights"

    def prepared_bytes(self, problem: GemmProblem) -> int:
        """Exact where no act-order group is larger than `group_size`; at most twice that else."""
        spec = problem.spec
        assert isinstance(spec, QuantSpec)
        blocks = spec.num_groups(problem.in_features)
        places = blocks * _block_size(spec, problem.in_features)
        lookup = 8 * places if spec.desc_act else 0
        return problem.out_features * (places + 8 * blocks) + lookup

    def prepare(self, weight: Weight) -> Prepared:
        assert isinstance(weight, QuantTensor)
        blocks = Blocks.of(weight, _block_size(weight.spec, weight.in_features))
        codes_KN = unpack(weight.qweight, weight.in_features, weight.spec.bits)
        zeros_BN = weight.zeros[blocks.group_B]
        codes_SN = zeros_BN.repeat_interleave(blocks.size, dim=0)
        codes_SN[blocks.place_K] = codes_KN[blocks.input_K]
        rows = (weight.out_features, blocks.group_B.shape[0])
        tensors = (
            codes_SN.T.contiguous().view(*rows, blocks.size),
            weight.scales[blocks.group_B].T.to(torch.float32).contiguous().view(*rows, 1),
            zeros_BN.T.to(torch.float32).contiguous().view(*rows, 1),
            blocks.lookup(absent=0) if weight.spec.desc_act else blocks.input_K.new_empty(0),
        )
        return Prepared(GemmProblem.of(weight), tensors)

    def run(self, x_MK: Tensor, weight: Prepared, out_MN: Tensor) -> None:
        codes_NBC, scales_NB1, zeros_NB1, lookup_S = weight.tensors
        x_MS = x_MK.index_select(1, lookup_S) if lookup_S.numel() else x_MK
        step = max(1, PANEL_WEIGHTS // codes_NBC[0].numel())
        scratch = torch.empty_like(codes_NBC[:step], dtype=torch.float32)
        for start in range(0, codes_NBC.shape[0], step):
            rows = slice(start, start + step)
            panel = scratch[: codes_NBC[rows].shape[0]].copy_(codes_NBC[rows])
            panel.sub_(zeros_NB1[rows]).mul_(scales_NB1[rows])
            multiply(x_MS, panel.flatten(1)[:, : x_MS.shape[1]], out_MN[:, rows])


def _block_size(spec: QuantSpec, in_features: int) -> int:
    return min(spec.group_of(in_features), in_features)
