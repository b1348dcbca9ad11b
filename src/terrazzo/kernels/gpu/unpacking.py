"""Records back to the weights they hold: the twin of every kernel that reads records."""

from __future__ import annotations

import torch
from torch import Tensor

from terrazzo.kernels.gpu.records import (
    DENSE_BITS,
    INPUTS,
    NO_INPUT,
    OUTPUTS,
    PLANES,
    Records,
)


def dequantized(records: Records, dtype: torch.dtype) -> Tensor:
    """float32 [N, K]. dtype: of weights that are not quantized, bfloat16 or float16."""
    places_SN = _dense(records, dtype) if records.kind.bits == DENSE_BITS else _quantized(records)
    places_SN = places_SN[:, : records.out_features]
    if not records.lookup.numel():
        return places_SN[: records.in_features].T
    weight_KN = places_SN.new_zeros((records.in_features, records.out_features))
    is_input_S = records.lookup != NO_INPUT
    weight_KN[records.lookup[is_input_S].long()] = places_SN[is_input_S]
    return weight_KN.T


def _dense(records: Records, dtype: torch.dtype) -> Tensor:
    tiles, units = records.data.shape[:2]
    # [tiles, units, slice, lane, pair, e] -> [tiles, units, lane, slice, e, pair]
    halves = records.data.view(dtype).view(tiles, units, 8, 32, 4, 2)
    return _by_place(halves.permute(0, 1, 3, 2, 5, 4)).float()


def _quantized(records: Records) -> Tensor:
    kind, data = records.kind, records.data
    codes, start, low = data.new_zeros(1), 0, 0
    for width in PLANES[kind.bits]:
        end = start + OUTPUTS * INPUTS * width // 8
        codes = codes | _fields(data[..., start:end], width) << low
        start, low = end, low + width
    scale_bytes = 2 * OUTPUTS * (INPUTS // kind.block)
    scales_SN = _per_place(data[..., start : start + scale_bytes].view(torch.float16), kind.block)
    if kind.sym:
        return (_by_place(codes) - (1 << (kind.bits - 1))) * scales_SN.float()
    zeros_SN = _per_place(data[..., start + scale_bytes :], kind.block)
    return (_by_place(codes) - zeros_SN.int()) * scales_SN.float()


def _fields(data: Tensor, width: int) -> Tensor:
    """Bytes [tiles, units, ...] of a plane -> int32 [tiles, units, lane, slice, e, pair]."""
    tiles, units = data.shape[:2]
    words = data.contiguous().view(torch.int32)
    if width == 4:
        words = words.view(tiles, units, 2, 32, 4).transpose(2, 3)
    shared = 4 // width
    apart = words.reshape(tiles, units, 32, 8 // shared, 1, 1)
    parts = torch.arange(shared, dtype=torch.int32, device=data.device).view(-1, 1)
    nibbles = torch.arange(8, dtype=torch.int32, device=data.device)
    fields = (apart >> (4 * nibbles + width * parts)) & ((1 << width) - 1)
    return fields.reshape(tiles, units, 32, 8, 2, 4)


def _by_place(owned: Tensor) -> Tensor:
    """[tiles, units, lane, slice, e, pair], as `records` draws it -> [places, outputs]."""
    tiles, units = owned.shape[:2]
    split = owned.reshape(tiles, units, 8, 4, 8, 2, 2, 2)  # tile, unit, g, t, slice, e, h, r
    return split.permute(1, 4, 6, 3, 5, 0, 7, 2).reshape(units * INPUTS, tiles * OUTPUTS)


def _per_place(values: Tensor, block: int) -> Tensor:
    """[tiles, units, blocks of (g, r)] -> [places, outputs]."""
    tiles, units = values.shape[:2]
    split = values.reshape(tiles, units, INPUTS // block, 8, 2)
    blocks = split.permute(1, 2, 0, 4, 3).reshape(units * (INPUTS // block), tiles * OUTPUTS)
    return blocks.repeat_interleave(block, dim=0)
