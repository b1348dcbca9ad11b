"""Packers that share nothing with those of the package: Python integers, one stream at a time."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from helpers.checkpoints import MODULE, Affine
from terrazzo.packing import sequential_groups
from terrazzo.spec import Name, QuantSpec


class Stored(enum.Enum):
    """What writers do to a zero point before they pack it."""

    TRUE = "gptq_v2, and AutoRound by default"
    MINUS_ONE = "gptq of GPTQModel, and AutoRound before 0.16: borrows from the next field"
    CLAMPED = "auto_round:auto_gptq since AutoRound 0.16: minus one, but never below zero"
    UNMASKED = "AutoGPTQ: minus one as uint32, packed with OR"
    EXCHANGED = "gptq of early GPTQModel: 3 bits minus constants whose ends are exchanged"


def cut(stream: int, num_words: int, word_bits: int) -> list[int]:
    """Signed words of one unsigned stream, the low bits first."""
    words = [(stream >> (word_bits * i)) & ((1 << word_bits) - 1) for i in range(num_words)]
    return [word - (1 << word_bits) if word >> (word_bits - 1) else word for word in words]


def stream_of(codes: Iterable[int], bits: int) -> int:
    return sum(code << (bits * index) for index, code in enumerate(codes))


def zero_words(zeros: Sequence[int], bits: int, word_bits: int, stored: Stored) -> list[int]:
    """The words of one group."""
    count = -(-len(zeros) * bits // word_bits)
    words = cut(stream_of(zeros, bits), count, word_bits)
    if stored is Stored.TRUE:
        return words
    if stored is Stored.CLAMPED:
        return cut(stream_of([max(zero - 1, 0) for zero in zeros], bits), count, word_bits)
    if stored is Stored.EXCHANGED:
        constants = [0x24924924, 0x92492492, 0x49249249]
        lowered = [word - constants[i % 3] for i, word in enumerate(words)]
        return [cut(word % (1 << 32), 1, 32)[0] for word in lowered]
    if stored is Stored.MINUS_ONE and bits in (2, 4, 8):
        ones = sum(1 << shift for shift in range(0, word_bits, bits))
        return [cut((word - ones) % (1 << word_bits), 1, word_bits)[0] for word in words]
    if stored is Stored.MINUS_ONE:
        lowered = [(zero - 1) % (1 << bits) for zero in zeros]
        return cut(stream_of(lowered, bits), count, word_bits)
    return _unmasked(zeros, bits)


def _unmasked(zeros: Sequence[int], bits: int) -> list[int]:
    """int32 words; a zero point of zero becomes 0xFFFFFFFF before it is shifted into its place."""
    lowered = [(zero - 1) % (1 << 32) for zero in zeros]
    if bits == 3:
        return [word for i in range(0, len(lowered), 32) for word in _three(lowered[i : i + 32])]
    per_word = 32 // bits
    words = []
    for start in range(0, len(lowered), per_word):
        word = 0
        for index, zero in enumerate(lowered[start : start + per_word]):
            word |= zero << (bits * index)
        words += cut(word % (1 << 32), 1, 32)
    return words


def _three(lowered: Sequence[int]) -> list[int]:
    """32 fields in three words: ten, one on the border, ten, one on the border, ten."""
    words = [0, lowered[10] >> 2 & 1, lowered[21] >> 1 & 3]
    for word, first, offset in ((0, 0, 0), (1, 11, 1), (2, 22, 2)):
        for index in range(10):
            words[word] |= lowered[first + index] << (3 * index + offset)
    words[0] |= lowered[10] << 30
    words[1] |= lowered[21] << 31
    return [cut(word % (1 << 32), 1, 32)[0] for word in words]


def rounded_weight(spec: QuantSpec, out_features: int, in_features: int, seed: int = 0) -> Affine:
    """Normal weights, each group rounded between its extremes, as quantizers do."""
    generator = torch.Generator().manual_seed(seed)
    weight_KN = torch.randn((in_features, out_features), generator=generator)
    g_idx = sequential_groups(in_features, spec.group_of(in_features))
    groups = [weight_KN[g_idx == group] for group in range(spec.num_groups(in_features))]
    low = torch.stack([group.min(dim=0).values.clamp(max=0) for group in groups])
    high = torch.stack([group.max(dim=0).values.clamp(min=0) for group in groups])
    scales = ((high - low) / spec.max_code).half()
    zeros = (-low / scales).round().clamp(0, spec.max_code)
    each = g_idx.long()
    codes = (weight_KN / scales[each] + zeros[each]).round().clamp(0, spec.max_code)
    return Affine(codes.to(torch.uint8), scales, zeros.to(torch.uint8), g_idx)


def brute_module(
    weight: Affine,
    bits: int,
    dtype: torch.dtype = torch.int32,
    stored: Stored = Stored.MINUS_ONE,
    module: Name = MODULE,
) -> dict[str, Tensor]:
    """The tensors of one module, codes in one stream whatever their width."""
    word_bits = 8 * dtype.itemsize
    rows = -(-weight.codes.shape[0] * bits // word_bits)
    columns = [cut(stream_of(codes, bits), rows, word_bits) for codes in weight.codes.T.tolist()]
    zeros = [zero_words(group, bits, word_bits, stored) for group in weight.zeros.tolist()]
    return {
        f"{module}.qweight": torch.tensor(columns, dtype=dtype).T.contiguous(),
        f"{module}.qzeros": torch.tensor(zeros, dtype=dtype),
        f"{module}.scales": weight.scales,
        f"{module}.g_idx": weight.g_idx,
    }
