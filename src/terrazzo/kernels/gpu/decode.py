"""Products for up to 16 rows: the launches of cuda/decode.cu."""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from terrazzo.kernels.gpu.card import Card, Source
from terrazzo.kernels.gpu.records import OUTPUTS, RecordKind, Records

MAX_ROWS = 16
WARPS = 8
SHARED_BYTES = 227 * 1024
"""Of one block on Hopper."""

SHARED_BYTES_OF_SM = 228 * 1024
RESERVED_BYTES = 1024
"""Of an SM on Hopper, and what each of its blocks takes beside its own."""

MOST_SLICES = 32
MOST_BLOCKS = 1024

FLOATS = {torch.bfloat16: "BFloat16", torch.float16: "Float16"}


class Epilogue(enum.Enum):
    """What becomes of the sums: written as they are, or gate and up multiplied."""

    PLAIN = "PLAIN"
    SILU = "SILU"
    GELU = "GELU"


class Arguments(ctypes.Structure):
    """As in cuda/decode.cu; addresses of device memory, then counts."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("tiles", "x", "lookup", "bias")),
        *((name, ctypes.c_uint64) for name in ("y", "partial", "arrivals")),
        *((name, ctypes.c_int32) for name in ("num_tiles", "rows", "inputs", "units")),
        *((name, ctypes.c_int32) for name in ("x_stride", "y_stride", "depth", "slot_bytes")),
    )


TILE = np.dtype(
    [
        ("records", np.uint64),
        ("column", np.int32),
        ("record_bytes", np.uint16),
        ("kind", np.uint8),
        ("outputs", np.uint8),
    ]
)
"""16 outputs of a weight, as in cuda/record.cuh."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the plan of a launch follows from. slot_bytes: of the largest record."""

    num_tiles: int
    units: int
    rows: int
    slot_bytes: int
    tiles_together: int


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """blocks x slices thread blocks, each with rings of `depth` records."""

    blocks: int
    slices: int
    depth: int
    shared_bytes: int


def shared_bytes(shape: Shape, blocks: int, slices: int, depth: int) -> int:
    """Of one thread block: rings with their barriers, sums, tiles and rows of x."""
    tiles = (-(-(shape.num_tiles // shape.tiles_together) // blocks) + 1) * shape.tiles_together
    units = -(-shape.units // slices)
    rings = WARPS * depth * (shape.slot_bytes + 8)
    sums = 2 * WARPS * OUTPUTS * padded_rows(shape.rows) * 4
    return rings + sums + 16 * (tiles + 1) + shape.rows * (256 * units + 16) + 16


def padded_rows(rows: int) -> int:
    return 8 if rows <= 8 else 16


def plan(shape: Shape, num_sms: int, per_sm: int = 2, most: int = 6) -> LaunchPlan:
    """As few slices as the rows of x fit in with rings of at least two records."""
    together = shape.num_tiles // shape.tiles_together
    for resident in range(per_sm, 0, -1):
        budget = SHARED_BYTES_OF_SM // resident - RESERVED_BYTES
        slices = 1
        while slices <= (MOST_SLICES if resident == 1 else 1):
            blocks = max(1, min(together, resident * num_sms // slices))
            for depth in range(most, 1, -1):
                needed = shared_bytes(shape, blocks, slices, depth)
                if needed <= budget and (depth >= 4 or resident == 1):
                    return LaunchPlan(blocks, slices, depth, needed)
            slices *= 2
    raise AssertionError(shape)


class DecodeProduct:
    """Weights that share their inputs, side by side as the columns of y.

    bias_N: float32 [N], or empty. With an epilogue that multiplies gate and up, these are the two
    halves of the shards, and y has the columns of one.
    """

    def __init__(
        self,
        card: Card,
        shards: Sequence[Records],
        dtype: torch.dtype,
        bias_N: Tensor,
        epilogue: Epilogue = Epilogue.PLAIN,
    ) -> None:
        self.shards = tuple(shards)
        self.kinds = tuple(dict.fromkeys(shard.kind for shard in shards))
        self._card, self._dtype, self._epilogue = card, dtype, epilogue
        self._together = 1 if epilogue is Epilogue.PLAIN else 2
        self._tiles = _tile_table(self.shards, self.kinds, self._together)
        self._bias_N = bias_N
        self._partial = torch.empty(0, device=card.device)
        self._arrivals = torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=card.device)
        self._slot_bytes = max(kind.num_bytes for kind in self.kinds)

    def shape(self, rows: int) -> Shape:
        units = self.shards[0].num_units
        return Shape(self._tiles.shape[0], units, rows, self._slot_bytes, self._together)

    def __call__(self, x_MK: Tensor, y_MN: Tensor) -> None:
        """x_MK: [M, K] in the dtype of the product, M up to 16. Overwrites y_MN, of that dtype or
        float32. Rows of both may be strided.
        """
        self.run(x_MK, y_MN, plan(self.shape(x_MK.shape[0]), self._card.num_sms))

    def run(self, x_MK: Tensor, y_MN: Tensor, launch: LaunchPlan) -> None:
        rows = x_MK.shape[0]
        if launch.slices > 1:
            size = launch.slices * self._tiles.shape[0] * OUTPUTS * padded_rows(rows)
            if self._partial.numel() < size:
                self._partial = torch.empty(size, device=x_MK.device)
        arguments = Arguments(
            self._tiles.data_ptr(),
            x_MK.data_ptr(),
            self.shards[0].lookup.data_ptr(),
            self._bias_N.data_ptr(),
            y_MN.data_ptr(),
            self._partial.data_ptr(),
            self._arrivals.data_ptr(),
            self._tiles.shape[0],
            rows,
            self.shards[0].in_features,
            self.shards[0].num_units,
            x_MK.stride(0),
            y_MN.stride(0),
            launch.depth,
            self._slot_bytes,
        )
        is_float32 = y_MN.dtype == torch.float32
        source = decode_source(
            self.kinds, self._dtype, padded_rows(rows), self._epilogue, is_float32
        )
        kernel = self._card.function(source, 32 * WARPS)
        kernel.launch((launch.blocks, launch.slices), launch.shared_bytes, arguments)


def decode_source(
    kinds: Sequence[RecordKind],
    dtype: torch.dtype,
    rows: int,
    epilogue: Epilogue,
    out_float32: bool,
) -> Source:
    """rows: 8 or 16."""
    return Source(
        "decode",
        (
            f"FLOAT={FLOATS[dtype]}",
            f"ROWS={rows}",
            f"WARPS={WARPS}",
            f"EPILOGUE={epilogue.value}",
            f"OUT_FLOAT32={int(out_float32)}",
            f"KINDS(F)={kind_list(kinds)}",
        ),
    )


def kind_list(kinds: Sequence[RecordKind]) -> str:
    """As the macro of cuda/decode.cu wants it."""
    return " ".join(
        f"F({number}, {kind.bits}, {kind.block}, {str(kind.sym).lower()})"
        for number, kind in enumerate(kinds)
    )


def _tile_table(shards: Sequence[Records], kinds: Sequence[RecordKind], together: int) -> Tensor:
    """uint8 [tiles, 16] as struct Tile; of two halves that belong together tiles alternate."""
    fields = []
    column = 0
    for shard in shards:
        count = shard.data.shape[0]
        table = np.zeros(count, dtype=TILE)
        starts = np.arange(count, dtype=np.int64)
        table["records"] = shard.data.data_ptr() + starts * shard.data.stride(0)
        table["column"] = column + OUTPUTS * starts
        table["record_bytes"] = shard.kind.num_bytes
        table["kind"] = kinds.index(shard.kind)
        table["outputs"] = np.minimum(OUTPUTS, shard.out_features - OUTPUTS * starts)
        fields.append(table)
        column += shard.out_features
    tiles = np.concatenate(fields)
    tiles = tiles.reshape(together, -1).T.flatten()
    words = torch.from_numpy(tiles.view(np.uint8).reshape(-1, TILE.itemsize).copy())
    return words.to(shards[0].data.device)
