"""The bit law: codes to words and back, zero points, and the affine meaning of both.

Words are int32 with the bit pattern of uint32. Two layouts exist on disk:

* continuous (formats `gptq`, `gptq_v2`, those of AutoRound): along the packed axis, code `i`
  occupies bits `[i * bits, (i + 1) * bits)` of one LSB-first bit stream. Where a code never crosses
  a byte, words of 8, 16 and 64 bits exist too (`pack_dtype`): the same stream in other pieces.
* planar (format `gptq_p`): 32 codes become `bits` words, one bit plane of width 4, 2 or 1 after the
  other from low to high; equal to continuous for 2, 4 and 8 bits.

In memory every `QuantTensor` is continuous with true zero points, whatever the disk held.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from terrazzo.spec import WORD_BITS, Format, QuantSpec, StreamFormat, WordFormat, words_for

PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Widths of the bit planes of a planar code, low to high (GPTQModel, format gptq_p)."""

PLANAR_ONLY_BITS = frozenset({5, 6, 7})
"""No format of GPTQModel stores these continuously: they are planar whatever its label says."""

WORD_DTYPES = (torch.int32, torch.int8, torch.int16, torch.int64)
"""`pack_dtype`: the types of words on disk. In memory, and in what we write, words are int32."""

BYTE_BITS = (2, 4, 8)
"""Widths that words of any type hold, because no code crosses a byte; the others are int32 only."""

V1_WORD_INCREMENT = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}
"""v1 stores `zero - 1` by subtracting this from the whole word, with borrow between fields; words
of another type have as many bytes of it as they are long.
"""

_STORE_MINUS_ONE = (Format.GPTQ, StreamFormat.GPTQ)

LEGACY_3BIT_INCREMENTS = (0x24924924, 0x92492492, 0x49249249)
"""Per-word constants of GPTQModel before its int3 fix: the first and third are exchanged."""


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """One affine weight: `W[n, k] = scales[g_idx[k], n] * (code[k, n] - zeros[g_idx[k], n])`.

    qweight: int32 [ceil(K * bits / 32), N], continuous along K.
    scales: float16 [G, N]. zeros: uint8 [G, N], true zero points. g_idx: int32 [K], group of each
    input.
    `spec.desc_act` is a fact here: True if and only if g_idx is not `k // group_size`.
    """

    spec: QuantSpec
    qweight: Tensor
    scales: Tensor
    zeros: Tensor
    g_idx: Tensor

    @property
    def in_features(self) -> int:
        return self.g_idx.shape[0]

    @property
    def out_features(self) -> int:
        return self.scales.shape[1]

    @property
    def num_groups(self) -> int:
        return self.scales.shape[0]


def sequential_groups(in_features: int, group: int) -> Tensor:
    """int32 [K]: the `g_idx` of a weight without act-order, `k // group`."""
    return torch.arange(in_features, dtype=torch.int32) // group


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [K, N] below `2**bits` -> int32 [ceil(K * bits / 32), N], continuous along dim 0."""
    count, columns = codes.shape
    period, period_words = _period(bits)
    blocks = -(-count // period)
    padded = codes.new_zeros((blocks * period, columns))
    padded[:count] = codes
    fields = padded.view(blocks, period, columns)
    words = torch.zeros((blocks, period_words, columns), dtype=torch.int64, device=codes.device)
    for index in range(period):
        word, shift = divmod(index * bits, WORD_BITS)
        field = fields[:, index].to(torch.int64)
        words[:, word] |= field << shift
        if shift + bits > WORD_BITS:
            words[:, word + 1] |= field >> (WORD_BITS - shift)
    return _to_int32(words).reshape(-1, columns)[: words_for(count, bits)].contiguous()


def unpack(words: Tensor, count: int, bits: int) -> Tensor:
    """int32 [W, N], continuous along dim 0 -> uint8 [count, N]; the inverse of `pack`."""
    columns = words.shape[1]
    period, period_words = _period(bits)
    blocks = -(-count // period)
    words = _pad_rows(words, blocks * period_words).view(blocks, period_words, columns)
    codes = torch.empty((blocks, period, columns), dtype=torch.uint8, device=words.device)
    for index in range(period):
        word, shift = divmod(index * bits, WORD_BITS)
        low_bits = min(bits, WORD_BITS - shift)
        field = (words[:, word] >> shift) & ((1 << low_bits) - 1)
        if low_bits < bits:
            high = words[:, word + 1] & ((1 << (bits - low_bits)) - 1)
            field = field | (high << low_bits)
        codes[:, index] = field
    return codes.view(-1, columns)[:count]


def pack_planar(codes: Tensor, bits: int) -> Tensor:
    """uint8 [K, N] -> int32 [K * bits / 32, N] in bit planes; K must be a multiple of 32."""
    count, columns = codes.shape
    assert count % WORD_BITS == 0, "planar packing works on blocks of 32 codes"
    blocks = codes.view(-1, WORD_BITS, columns).to(torch.int64)
    planes = []
    offset = 0
    for width in PLANES[bits]:
        plane = (blocks >> offset) & ((1 << width) - 1)
        fields = plane.view(-1, width, WORD_BITS // width, columns)
        shifts = torch.arange(0, WORD_BITS, width, device=codes.device).view(1, 1, -1, 1)
        planes.append((fields << shifts).sum(dim=2))
        offset += width
    return _to_int32(torch.cat(planes, dim=1)).reshape(-1, columns)


def unpack_planar(words: Tensor, count: int, bits: int) -> Tensor:
    """int32 [W, N] in bit planes along dim 0 -> uint8 [count, N]; the inverse of `pack_planar`."""
    columns = words.shape[1]
    blocks = -(-count // WORD_BITS)
    words = _pad_rows(words, blocks * bits).view(blocks, bits, columns)
    codes = torch.zeros((blocks, WORD_BITS, columns), dtype=torch.int32, device=words.device)
    offset = 0
    for width in PLANES[bits]:
        plane = words[:, offset : offset + width].unsqueeze(2)
        shifts = torch.arange(0, WORD_BITS, width, dtype=torch.int32, device=words.device)
        fields = (plane >> shifts.view(1, 1, -1, 1)) & ((1 << width) - 1)
        codes |= fields.reshape(blocks, WORD_BITS, columns) << offset
        offset += width
    return codes.to(torch.uint8).view(-1, columns)[:count]


def is_planar(bits: int, word_format: WordFormat) -> bool:
    """Whether the words of a `bits`-bit weight differ from the continuous layout."""
    if isinstance(word_format, StreamFormat):
        return False
    return bits in PLANAR_ONLY_BITS or (bits == 3 and word_format is Format.GPTQ_P)


def join_words(words: Tensor, count: int) -> Tensor:
    """Words of any type [W, N] -> int32 [count, N]: the same stream along dim 0, in 32-bit pieces.

    `words` itself where it is that already.
    """
    if words.dtype == torch.int32:
        return words
    columns = words.T.reshape(-1).view(torch.uint8).view(words.shape[1], -1)
    stream = columns[:, : 4 * count]
    joined = stream.new_zeros((stream.shape[0], 4 * count))
    joined[:, : stream.shape[1]] = stream
    return joined.view(torch.int32).T.contiguous()


def encode_qweight(codes: Tensor, bits: int, checkpoint_format: Format) -> Tensor:
    """uint8 [K, N] -> the `qweight` words of `checkpoint_format`."""
    return (pack_planar if is_planar(bits, checkpoint_format) else pack)(codes, bits)


def decode_qweight(qweight: Tensor, in_features: int, bits: int, word_format: WordFormat) -> Tensor:
    """`qweight` words of `word_format`, of any type -> uint8 [K, N]."""
    decode = unpack_planar if is_planar(bits, word_format) else unpack
    return decode(join_words(qweight, words_for(in_features, bits)), in_features, bits)


def encode_zeros(zeros: Tensor, bits: int, checkpoint_format: Format) -> Tensor:
    """True zero points uint8 [G, N] -> int32 [G, ceil(N * bits / 32)]; inverts `decode_zeros`."""
    columns = zeros.T.contiguous()
    if is_planar(bits, checkpoint_format):
        return pack_planar(columns, bits).T.contiguous()
    if checkpoint_format is not Format.GPTQ:
        return pack(columns, bits).T.contiguous()
    if bits in V1_WORD_INCREMENT:
        return (pack(columns, bits) - _v1_increment(bits, torch.int32)).T.contiguous()
    return pack((columns - 1) & ((1 << bits) - 1), bits).T.contiguous()


def decode_zeros(qzeros: Tensor, out_features: int, bits: int, word_format: WordFormat) -> Tensor:
    """Words of any type [G, ceil(N * bits / word)] -> true zero points uint8 [G, N].

    Where `zero - 1` is stored: for 2, 4 and 8 bits the increment is added to the *word*, because
    the writer subtracted it with borrow; for other widths to each field, modulo `2**bits`.
    """
    words = qzeros.T
    if is_planar(bits, word_format):
        return unpack_planar(words, out_features, bits).T.contiguous()
    minus_one = word_format in _STORE_MINUS_ONE
    if minus_one and bits in V1_WORD_INCREMENT:
        words = words + _v1_increment(bits, words.dtype)
    stored = unpack(join_words(words, words_for(out_features, bits)), out_features, bits)
    if minus_one and bits not in V1_WORD_INCREMENT:
        stored = (stored + 1) & ((1 << bits) - 1)
    return stored.T.contiguous()


def decode_legacy_3bit_zeros(qzeros: Tensor, out_features: int) -> Tensor:
    """3-bit v1 zero points of GPTQModel releases before its int3 fix -> uint8 [G, N]."""
    words = qzeros.T
    constants = torch.tensor(LEGACY_3BIT_INCREMENTS, dtype=torch.int64)
    increments = constants.repeat(-(-words.shape[0] // 3))[: words.shape[0]]
    restored = _to_int32(words.to(torch.int64) + increments.to(words.device).unsqueeze(1))
    return unpack(restored, out_features, 3).T.contiguous()


def dequantize(weight: QuantTensor) -> Tensor:
    """-> float32 [N, K]: the definition every kernel is checked against.

    float32 is exact: a float16 scale times an integer below 2**9 needs 20 bits of mantissa.
    """
    codes_KN = unpack(weight.qweight, weight.in_features, weight.spec.bits).to(torch.int16)
    group_K = weight.g_idx.to(torch.int64)
    centered_KN = codes_KN - weight.zeros.to(torch.int16)[group_K]
    return (weight.scales.to(torch.float32)[group_K] * centered_KN).T.contiguous()


def _period(bits: int) -> tuple[int, int]:
    """The shortest run of codes that ends on a word border: (codes, words)."""
    codes = WORD_BITS // gcd(WORD_BITS, bits)
    return codes, codes * bits // WORD_BITS


def _pad_rows(words: Tensor, rows: int) -> Tensor:
    missing = rows - words.shape[0]
    if missing <= 0:
        return words[:rows].contiguous()
    return torch.cat([words, words.new_zeros((missing, words.shape[1]))])


def _v1_increment(bits: int, dtype: torch.dtype) -> int:
    """What v1 subtracts from a word of this type; sums and differences of words wrap around."""
    return int.from_bytes(bytes([V1_WORD_INCREMENT[bits] & 0xFF]) * dtype.itemsize, "little")


def _to_int32(words: Tensor) -> Tensor:
    """int64 -> int32 with the low 32 bits kept, as uint32 arithmetic would."""
    low = words & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
