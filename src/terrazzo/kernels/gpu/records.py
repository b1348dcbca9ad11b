"""Weights as records: what one warp of a card multiplies at a time, side by side in its order.

A record holds 16 outputs x 128 inputs; cuda/record.cuh draws it. Every width from 2 to 8 bits,
every group size, zero points, act-order and weights without quantization have one, so a kernel that
reads records reads them all, and a launch may mix them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terrazzo.kernels.blocks import Blocks
from terrazzo.packing import QuantTensor, unpack
from terrazzo.spec import QuantSpec

OUTPUTS = 16
INPUTS = 128
BLOCK_SIZES = (128, 64, 32, 16)
"""Inputs that share a scale within a record."""

DENSE_BITS = 16
PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (4, 4)}
"""Widths of the planes that codes are split into, low bits first."""

NO_INPUT = -1
"""In `lookup`: a place that pads a group."""


@dataclass(frozen=True, slots=True)
class RecordKind:
    """What a kernel has to know to read a record. bits: 16 for weights without quantization."""

    bits: int
    block: int
    sym: bool

    @property
    def num_bytes(self) -> int:
        if self.bits == DENSE_BITS:
            return 2 * OUTPUTS * INPUTS
        blocks = INPUTS // self.block
        return OUTPUTS * INPUTS * self.bits // 8 + blocks * (32 if self.sym else 48)


@dataclass(frozen=True, slots=True)
class Records:
    """One weight, or several side by side.

    data: uint8 [tiles of 16 outputs, units of 128 places, kind.num_bytes]. lookup: int32 [places],
    the input of each place or NO_INPUT; empty where place k is input k.
    """

    kind: RecordKind
    data: Tensor
    lookup: Tensor
    out_features: int
    in_features: int

    @property
    def num_units(self) -> int:
        return self.data.shape[1]

    def halves(self) -> tuple[Records, Records]:
        """The first outputs and the others; half of them must be whole tiles."""
        tiles, outputs = self.data.shape[0] // 2, self.out_features // 2
        assert outputs % OUTPUTS == 0
        first, second = self.data[:tiles], self.data[tiles:]
        return (
            replace(self, data=first, out_features=outputs),
            replace(self, data=second, out_features=outputs),
        )


def kind_of(spec: QuantSpec, in_features: int) -> RecordKind:
    return RecordKind(spec.bits, block_size(spec.group_of(in_features), in_features), spec.sym)


def block_size(group: int, in_features: int) -> int:
    """The largest that divides a group; a single group, and one that none divides, is padded."""
    if group >= in_features:
        return BLOCK_SIZES[0]
    return next((size for size in BLOCK_SIZES if group % size == 0), BLOCK_SIZES[-1])


def quantized_records(weight: QuantTensor, device: torch.device) -> Records:
    """Packed on `device`."""
    kind = kind_of(weight.spec, weight.in_features)
    blocks = Blocks.of(weight, kind.block)
    units = -(-blocks.num_places // INPUTS)
    lookup_S = torch.full((units * INPUTS,), NO_INPUT, dtype=torch.int64, device=device)
    lookup_S[: blocks.num_places] = blocks.lookup(NO_INPUT)
    codes_KN = unpack(weight.qweight.to(device), weight.in_features, kind.bits)
    group_B = blocks.group_B.to(device)
    missing = units * INPUTS // kind.block - group_B.shape[0]
    parts = _planes(_at_places(codes_KN, lookup_S), kind.bits)
    parts.append(_by_unit(weight.scales.to(device)[group_B], missing, units))
    if not kind.sym:
        parts.append(_by_unit(weight.zeros.to(device)[group_B], missing, units))
    data = torch.cat([part.flatten(2).view(torch.uint8) for part in parts], dim=2)
    lookup = _lookup(lookup_S, weight.in_features)
    return Records(kind, data, lookup, weight.out_features, weight.in_features)


def dense_records(weight_NK: Tensor, dtype: torch.dtype, device: torch.device) -> Records:
    """Weights rounded to `dtype`, bfloat16 or float16."""
    outputs, inputs = weight_NK.shape
    units = -(-inputs // INPUTS)
    words_NK = weight_NK.to(device, dtype).view(torch.int16)
    words_SN = torch.nn.functional.pad(words_NK, (0, units * INPUTS - inputs)).T
    words = _by_lane(words_SN).to(torch.int32) & 0xFFFF
    # [tiles, units, lane, slice, e, pair] -> [tiles, units, slice, lane, pair]
    data = (words[..., 0, :] | words[..., 1, :] << 16).transpose(2, 3).contiguous()
    kind = RecordKind(DENSE_BITS, BLOCK_SIZES[0], True)
    bytes_ = data.flatten(2).view(torch.uint8)
    return Records(kind, bytes_, torch.empty(0, dtype=torch.int32, device=device), outputs, inputs)


def _lookup(lookup_S: Tensor, in_features: int) -> Tensor:
    plain = torch.arange(lookup_S.shape[0], device=lookup_S.device)
    plain[in_features:] = NO_INPUT
    return lookup_S[:0].int() if torch.equal(lookup_S, plain) else lookup_S.int()


def _at_places(codes_KN: Tensor, lookup_S: Tensor) -> Tensor:
    """Codes in the order of places; zero where there is no input."""
    codes_SN = codes_KN[lookup_S.clamp(min=0)]
    codes_SN[lookup_S == NO_INPUT] = 0
    return codes_SN


def _by_lane(codes_SN: Tensor) -> Tensor:
    """[S, N] -> [tiles, units, lane, slice, e, pair]: what each lane owns of the A fragments.

    Output 16 tile + 8 r + g, input 16 slice + 8 h + 2 t + e: of lane 4 g + t, in pair 2 h + r.
    """
    places, outputs = codes_SN.shape
    tiles, units = -(-outputs // OUTPUTS), places // INPUTS
    padded = torch.nn.functional.pad(codes_SN, (0, tiles * OUTPUTS - outputs))
    split = padded.reshape(units, 8, 2, 4, 2, tiles, 2, 8)  # unit, slice, h, t, e, tile, r, g
    return split.permute(5, 0, 7, 3, 1, 4, 2, 6).reshape(tiles, units, 32, 8, 2, 4)


def _planes(codes_SN: Tensor, bits: int) -> list[Tensor]:
    """int32 words [tiles, units, ...] of each plane."""
    owned = _by_lane(codes_SN)
    words = []
    low = 0
    for width in PLANES[bits]:
        words.append(_plane((owned >> low) & ((1 << width) - 1), width))
        low += width
    return words


def _plane(fields: Tensor, width: int) -> Tensor:
    """uint8 [tiles, units, lane, slice, e, pair] -> int32, the words of each lane side by side.

    A word holds the nibbles of 4 / width slices, those of slice i moved up by i * width bits.
    """
    nibbles = fields.flatten(4)  # nibble 4 e + pair
    shared = 4 // width
    tiles, units = nibbles.shape[:2]
    apart = nibbles.reshape(tiles, units, 32, 8 // shared, shared, 8).to(torch.int32)
    words = torch.zeros(apart.shape[:4], dtype=torch.int32, device=fields.device)
    for part in range(shared):
        for nibble in range(8):
            words |= apart[..., part, nibble] << (4 * nibble + width * part)
    if width < 4:
        return words
    # 16 bytes a load: the first four slices of all lanes, then the others.
    return words.view(tiles, units, 32, 2, 4).transpose(2, 3).contiguous()


def _by_unit(values_BN: Tensor, missing: int, units: int) -> Tensor:
    """[blocks, N] -> [tiles, units, blocks of a unit, g, r]; the last unit has `missing` ones."""
    outputs = values_BN.shape[1]
    tiles = -(-outputs // OUTPUTS)
    padding = (0, tiles * OUTPUTS - outputs, 0, missing)
    padded = torch.nn.functional.pad(values_BN, padding)
    return padded.reshape(units, -1, tiles, 2, 8).permute(2, 0, 1, 4, 3).contiguous()
