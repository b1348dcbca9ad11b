"""How the zero points of one module are stored: what its words say, against what the label says.

A label is often wrong, and two tools are known for zero points that cannot be read as labelled:
GPTQModel exchanged two constants of 3 bits for some releases, and AutoGPTQ subtracted one from a
zero point of zero without masking, which fills the rest of the word with ones. Words show the first
often and the second mostly; where they leave a doubt, it is said.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from terrazzo.packing import (
    BYTE_BITS,
    V1_WORD_INCREMENT,
    decode_legacy_3bit_zeros,
    decode_qweight,
    decode_zeros,
    is_planar,
    unpack,
)
from terrazzo.spec import WORD_BITS, Format, StreamFormat, WordFormat, words_for

_DOUBT = -6.0
"""log10 of the chance below which an innocent explanation is given up."""

_CLEARER = 2.0
"""How many times nearer to its codes one reading must be than the other to be believed."""

_SAMPLED_COLUMNS = 256
_SAMPLED_WORDS = 4096
_THREE_BIT_RUNS = (slice(0, 10), slice(11, 21), slice(22, 32))
"""Fields of 32 codes of 3 bits that are whole in one word."""


class ZeroReading(enum.Enum):
    """How the true zero points follow from `qzeros`."""

    AS_LABELLED = "as checkpoint_format says"
    MIDDLE = "the middle code, stored in another encoding than the label's"
    LEGACY_3BIT = "with the 3-bit constants that GPTQModel once exchanged"


@dataclass(frozen=True, slots=True)
class Overflow:
    """What v1 words hold after a field of ones, which is what a zero point of zero leaves.

    lost: fields behind it, up to the end of the word, that are ones too, as AutoGPTQ leaves them;
    an honest writer does so only for one value of the zero point. spared: fields behind it that are
    not, so their writer masked or borrowed. usual: among all other fields, those of that one value.
    """

    lost: int = 0
    spared: int = 0
    usual: int = 0
    others: int = 0

    def __add__(self, other: Overflow) -> Overflow:
        return Overflow(
            self.lost + other.lost,
            self.spared + other.spared,
            self.usual + other.usual,
            self.others + other.others,
        )

    @property
    def is_proven(self) -> bool:
        """Zero points are lost: that an honest writer left all these ones is beyond chance."""
        chance = (self.usual + 1) / (self.others + 2)
        return self.spared == 0 and self.lost * math.log10(chance) < _DOUBT

    @property
    def is_doubtful(self) -> bool:
        return self.spared == 0 and self.lost > 0 and not self.is_proven


NO_OVERFLOW = Overflow()


class Doubt(enum.Enum):
    """What the words could not decide."""

    NONE = "nothing"
    AGE = "whether a 3-bit module was written before or after GPTQModel exchanged its constants"
    NEIGHBOURS = "what stands beside a 3-bit zero point of zero that AutoRound packed"


@dataclass(frozen=True, slots=True)
class ZeroPoints:
    """layout: the format whose words the codes are in. sym: all zero points are the middle."""

    layout: WordFormat
    reading: ZeroReading
    sym: bool
    overflow: Overflow = NO_OVERFLOW
    doubt: Doubt = Doubt.NONE


@dataclass(frozen=True, slots=True)
class Coded:
    """The tensors and sizes that zero points are judged by. g_idx: int32 [K], normalized."""

    qweight: Tensor
    qzeros: Tensor
    g_idx: Tensor
    out_features: int
    bits: int


def judge_zero_points(coded: Coded, said_sym: bool, label: WordFormat) -> ZeroPoints:
    """A file that claims symmetry and stores the middle code in any known encoding is symmetric,
    even when its label belongs to another encoding. The constants of bit planes and of a stream
    differ, so they also tell the layout of mislabelled codes.
    """
    bits = coded.bits
    sample, columns = _sample(coded)
    if _is_middle(sample, columns, bits, label):
        return ZeroPoints(label, ZeroReading.AS_LABELLED, said_sym)
    if said_sym:
        formats: Iterable[WordFormat] = (*Format, *StreamFormat)
        planar = is_planar(bits, label)
        for other in sorted(formats, key=lambda each: is_planar(bits, each) != planar):
            if _is_middle(sample, columns, bits, other):
                mislaid = is_planar(bits, other) != planar
                return ZeroPoints(other if mislaid else label, ZeroReading.MIDDLE, True)
        if bits == 3 and _all_equal(decode_legacy_3bit_zeros(sample, columns), 4):
            return ZeroPoints(Format.GPTQ if planar else label, ZeroReading.MIDDLE, True)
    if bits == 3 and label is Format.GPTQ:
        return _aged(coded, label)
    if bits == 3 and label is StreamFormat.GPTQ:
        return ZeroPoints(label, ZeroReading.AS_LABELLED, False, doubt=_neighbours(coded, label))
    return ZeroPoints(label, ZeroReading.AS_LABELLED, False, _overflow(coded, label))


def _aged(coded: Coded, label: WordFormat) -> ZeroPoints:
    """3 bits, asymmetric, v1: two readings, of which the one nearer to the codes is believed.

    Weights lie around zero, so a zero point lies near the mean code of its group.
    """
    width = min(coded.out_features, _SAMPLED_COLUMNS) // WORD_BITS * WORD_BITS
    if width == 0:
        return ZeroPoints(label, ZeroReading.AS_LABELLED, False, doubt=Doubt.AGE)
    means = _mean_codes(coded, label, width)
    words = coded.qzeros[:, : words_for(width, 3)]
    today = _distance(decode_zeros(words, width, 3, label), means)
    before = _distance(decode_legacy_3bit_zeros(words, width), means)
    if before * _CLEARER < today:
        return ZeroPoints(label, ZeroReading.LEGACY_3BIT, False)
    doubt = Doubt.NONE if today * _CLEARER < before else Doubt.AGE
    return ZeroPoints(label, ZeroReading.AS_LABELLED, False, _overflow(coded, label), doubt)


def _neighbours(coded: Coded, label: WordFormat) -> Doubt:
    """AutoRound added up ten fields before it packed them, so a zero minus one went on to the next
    ones; since 0.16 it stores no zero point of zero in this format.
    """
    zeros = decode_zeros(coded.qzeros, coded.out_features, 3, label)
    return Doubt.NEIGHBOURS if bool((zeros == 0).any()) else Doubt.NONE


def _mean_codes(coded: Coded, label: WordFormat, width: int) -> Tensor:
    """float32 [G, width]: the mean code of each group in the first columns."""
    codes = decode_qweight(coded.qweight[:, :width], coded.g_idx.shape[0], 3, label)
    groups = coded.g_idx.to(torch.int64)
    sums = torch.zeros((coded.qzeros.shape[0], width)).index_add_(0, groups, codes.float())
    sizes = torch.bincount(groups, minlength=coded.qzeros.shape[0]).clamp(min=1)
    return sums / sizes.unsqueeze(1)


def _distance(zeros: Tensor, means: Tensor) -> float:
    return float((zeros.float() - means).square().mean())


def _overflow(coded: Coded, label: WordFormat) -> Overflow:
    """Only v1 of GPTQ has a tool that loses zero points, and it wrote no words but int32."""
    if label is not Format.GPTQ or coded.qzeros.dtype != torch.int32:
        return NO_OVERFLOW
    if coded.bits not in (*BYTE_BITS, 3):
        return NO_OVERFLOW
    bits, per_word = coded.bits, WORD_BITS // coded.bits
    if bits == 3:
        return _overflow_of_three(coded)
    words = coded.qzeros[:, : coded.out_features // per_word].flatten()
    hit = _has_ones(words, bits)
    if not bool(hit.any()):
        return NO_OVERFLOW
    lost, spared = _behind_ones(_fields(words[hit], bits), bits)
    # Read as labelled, a field of ones with a borrow from below is 1.
    others = _fields(words[~hit][:_SAMPLED_WORDS] + V1_WORD_INCREMENT[bits], bits)
    return Overflow(lost, spared, usual=int((others == 1).sum()), others=others.numel())


def _overflow_of_three(coded: Coded) -> Overflow:
    """Read as labelled, a field of ones is 0 here; the first of each word tells how usual that is.
    Fields that cross words are left out.
    """
    count = coded.out_features // WORD_BITS * WORD_BITS
    stored = unpack(coded.qzeros.T[: words_for(count, 3)], count, 3).T
    blocks = stored.reshape(stored.shape[0], -1, WORD_BITS)
    runs = torch.cat([blocks[:, :, run].flatten(0, 1) for run in _THREE_BIT_RUNS])
    hit = (runs == 7).any(dim=1)
    lost, spared = _behind_ones(runs[hit], 3)
    return Overflow(lost, spared, usual=int(hit.sum()), others=runs.numel() - lost - spared)


def _behind_ones(runs: Tensor, bits: int) -> tuple[int, int]:
    """[words, fields] -> how many fields behind a field of ones are ones too, and how many not."""
    ones = (runs == (1 << bits) - 1).int()
    behind = (ones.cumsum(dim=1) - ones) > 0
    return int((behind & (ones == 1)).sum()), int((behind & (ones == 0)).sum())


def _has_ones(words: Tensor, bits: int) -> Tensor:
    """bool, for each word of int32: whether all bits of some field are ones."""
    meet = words
    for shift in range(1, bits):
        meet = meet & (words >> shift)
    return (meet & V1_WORD_INCREMENT[bits]) != 0


def _fields(words: Tensor, bits: int) -> Tensor:
    """int32 [W] -> int32 [W, fields]."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32)
    return (words.unsqueeze(1) >> shifts) & ((1 << bits) - 1)


def _sample(coded: Coded) -> tuple[Tensor, int]:
    """(words, columns) that stand for all zero points: one block of 32 where all blocks are equal,
    as they are in a symmetric weight, or else everything.
    """
    qzeros = coded.qzeros
    width = words_for(WORD_BITS, coded.bits, 8 * qzeros.dtype.itemsize)
    block = qzeros[:1, :width]
    filled = 8 * qzeros.dtype.itemsize * width == WORD_BITS * coded.bits
    if filled and coded.out_features % WORD_BITS == 0:
        blocks = qzeros.reshape(qzeros.shape[0], -1, width)
        if bool((blocks == block).all()):
            return block, WORD_BITS
    return qzeros, coded.out_features


def _is_middle(words: Tensor, columns: int, bits: int, layout: WordFormat) -> bool:
    if is_planar(bits, layout) and columns % WORD_BITS != 0:
        return False
    if columns == WORD_BITS and words.shape[0] == 1:
        return _block_is_middle(tuple(words.flatten().tolist()), words.dtype, bits, layout)
    return _all_equal(decode_zeros(words, columns, bits, layout), 1 << (bits - 1))


@lru_cache(maxsize=256)
def _block_is_middle(
    words: tuple[int, ...], dtype: torch.dtype, bits: int, layout: WordFormat
) -> bool:
    """Hundreds of modules share a handful of blocks, and unpacking one costs many small steps."""
    block = torch.tensor([words], dtype=dtype)
    return _all_equal(decode_zeros(block, WORD_BITS, bits, layout), 1 << (bits - 1))


def _all_equal(zeros: Tensor, value: int) -> bool:
    return bool((zeros == value).all())
