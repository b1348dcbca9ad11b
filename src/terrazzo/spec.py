"""What a quantized weight is: bits, grouping, symmetry, order. Pure values, no tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from terrazzo.errors import ConfigError

Name: TypeAlias = str
"""An un-fused on-disk module name, for example `model.layers.3.self_attn.q_proj`."""

LEGAL_BITS = range(2, 9)
PER_CHANNEL = -1
"""`group_size` of a weight with one scale per output channel."""

WORD_BITS = 32


class Format(enum.Enum):
    """`checkpoint_format`: how codes are laid out in words and how zero points are stored.

    GPTQ (v1) stores `zero - 1`, GPTQ_V2 and GPTQ_P the true zero point; GPTQ_P splits codes into
    bit planes, which changes the words of 3, 5, 6 and 7 bits only.
    """

    GPTQ = "gptq"
    GPTQ_V2 = "gptq_v2"
    GPTQ_P = "gptq_p"


class StreamFormat(enum.Enum):
    """`packing_format` of AutoRound, as far as it is a GPTQ layout: codes of every width, 5 to 7
    bits too, are one bit stream. GPTQ stores `zero - 1`, GPTQ_V2 the true zero point.
    """

    GPTQ = "auto_round:auto_gptq"
    GPTQ_V2 = "auto_round:gptqmodel"


WordFormat: TypeAlias = Format | StreamFormat
"""How words on disk are read; only a Format is written."""


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """The knobs that decide the bytes of one quantized weight.

    bits: 2..8. group_size: inputs per scale, or -1 for one scale per output channel.
    sym: every zero point is the middle code `2**(bits - 1)`.
    desc_act: groups were formed in activation order, so `g_idx` is not sequential.
    """

    bits: int = 4
    group_size: int = 128
    sym: bool = True
    desc_act: bool = False

    def __post_init__(self) -> None:
        if self.bits not in LEGAL_BITS:
            raise ConfigError(f"bits is {self.bits}; legal values are 2, 3, 4, 5, 6, 7 and 8")
        if self.group_size != PER_CHANNEL and self.group_size < 1:
            raise ConfigError(
                f"group_size is {self.group_size}; legal values are -1 (one group per output "
                "channel) and every positive number"
            )

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def mid_code(self) -> int:
        """The zero point of a symmetric weight."""
        return 1 << (self.bits - 1)

    def group_of(self, in_features: int) -> int:
        """Inputs per scale for a weight of `in_features` inputs, `-1` resolved."""
        return in_features if self.group_size == PER_CHANNEL else self.group_size

    def num_groups(self, in_features: int) -> int:
        return -(-in_features // self.group_of(in_features))

    def __str__(self) -> str:
        group = "channel" if self.group_size == PER_CHANNEL else f"g{self.group_size}"
        return (
            f"{self.bits}-bit {group} {'sym' if self.sym else 'asym'}"
            f"{' act-order' if self.desc_act else ''}"
        )


DEFAULT_SPEC = QuantSpec()
"""GPTQModel's default: 4 bits, group size 128, symmetric."""


@dataclass(frozen=True, slots=True)
class Dense:
    """The module is not quantized: it keeps a floating-point `.weight`."""

    def __str__(self) -> str:
        return "dense"


DENSE = Dense()


@dataclass(frozen=True, slots=True)
class PackedShapes:
    """Shapes of the tensors of one quantized weight on disk (GPTQ format, 32-bit words)."""

    qweight: tuple[int, int]
    qzeros: tuple[int, int]
    scales: tuple[int, int]
    g_idx: tuple[int]

    @property
    def num_bytes(self) -> int:
        words = self.qweight[0] * self.qweight[1] + self.qzeros[0] * self.qzeros[1]
        return 4 * (words + self.g_idx[0]) + 2 * self.scales[0] * self.scales[1]


def words_for(count: int, bits: int, word_bits: int = WORD_BITS) -> int:
    """Words that hold `count` codes of `bits` bits."""
    return -(-count * bits // word_bits)


def packed_shapes(spec: QuantSpec, out_features: int, in_features: int) -> PackedShapes:
    groups = spec.num_groups(in_features)
    return PackedShapes(
        qweight=(words_for(in_features, spec.bits), out_features),
        qzeros=(groups, words_for(out_features, spec.bits)),
        scales=(groups, out_features),
        g_idx=(in_features,),
    )
