"""What one quantized module is, read off its tensors.

Shapes decide bits, groups and sizes; `g_idx` decides act-order; the zero points decide symmetry.
The config serves as a tie-break where shapes leave a choice, and for the two things that no shape
shows: whether zero points are stored minus one (v1), and whether 3-bit codes are in bit planes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from terrazzo.checkpoint.files import TensorFiles
from terrazzo.errors import TensorError
from terrazzo.packing import (
    PLANAR_ONLY_BITS,
    QuantTensor,
    decode_legacy_3bit_zeros,
    decode_qweight,
    decode_zeros,
    is_planar,
    pack,
    sequential_groups,
)
from terrazzo.spec import LEGAL_BITS, PER_CHANNEL, WORD_BITS, Format, Name, QuantSpec, words_for

_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INDEX_DTYPES = (torch.int32, torch.int64)


class ZeroReading(enum.Enum):
    """How the true zero points follow from `qzeros`."""

    AS_LABELLED = "as checkpoint_format says"
    MIDDLE = "the middle code, stored in another encoding than the label's"


@dataclass(frozen=True, slots=True)
class PackedFiles:
    """The tensors of one quantized module in the files of a folder."""

    files: TensorFiles
    module: Name

    def tensor(self, suffix: str) -> Tensor:
        return self.files.tensor(f"{self.module}.{suffix}")

    def has(self, suffix: str) -> bool:
        return f"{self.module}.{suffix}" in self.files.headers

    def shape(self, suffix: str, *dtypes: torch.dtype) -> tuple[int, ...]:
        """The shape of a tensor that must exist with one of `dtypes`."""
        if not self.has(suffix):
            raise TensorError(
                f"{self.module}: has .qweight but no .{suffix}; a GPTQ module needs qweight, "
                "qzeros and scales. Fetch or write the checkpoint again"
            )
        header = self.files.headers[f"{self.module}.{suffix}"]
        if header.dtype not in dtypes or len(header.shape) != (1 if suffix == "g_idx" else 2):
            legal = ", ".join(str(dtype) for dtype in dtypes)
            raise TensorError(
                f"{self.module}.{suffix} in {header.file}: {header.dtype} {list(header.shape)}; "
                f"legal is {'1-D' if suffix == 'g_idx' else '2-D'} of {legal}"
            )
        return header.shape

    def contradiction(self, sentence: str) -> TensorError:
        held = ", ".join(
            f"{suffix} {list(self.files.headers[f'{self.module}.{suffix}'].shape)}"
            for suffix in ("qweight", "qzeros", "scales", "g_idx")
            if self.has(suffix)
        )
        return TensorError(
            f"{self.module}: {sentence} ({held}); the checkpoint is damaged or of a format that "
            "Terrazzo does not know. Fetch or write it again"
        )


@dataclass(frozen=True, slots=True)
class Facts:
    """spec: as the tensors have it. checkpoint_format: with the words and zeros it was read by."""

    spec: QuantSpec
    in_features: int
    out_features: int
    checkpoint_format: Format
    zero_reading: ZeroReading


def read_facts(packed: PackedFiles, said: QuantSpec, checkpoint_format: Format) -> Facts:
    """said: the spec that config and rules give the module.

    Reads `g_idx` and `qzeros`, never `qweight`. Raises TensorError when the tensors contradict each
    other.
    """
    rows, out_features = packed.shape("qweight", torch.int32)
    groups, scale_columns = packed.shape("scales", *_SCALE_DTYPES)
    zero_rows, zero_columns = packed.shape("qzeros", torch.int32)
    if scale_columns != out_features or zero_rows != groups or groups == 0:
        raise packed.contradiction("qweight, qzeros and scales disagree on outputs or groups")
    in_features = _in_features(packed, said, rows)
    bits = _bits(packed, said, (rows, in_features), (zero_columns, out_features))
    group_size, sequential = _grouping(packed, said, in_features, groups)
    _check_planar(packed, bits, in_features, out_features, checkpoint_format)
    reading, sym = _zero_reading(packed, bits, said.sym, out_features, checkpoint_format)
    spec = QuantSpec(bits, group_size, sym, desc_act=not sequential)
    return Facts(spec, in_features, out_features, checkpoint_format, reading)


def read_quant_tensor(packed: PackedFiles, facts: Facts) -> QuantTensor:
    """The module in canonical form; its words stay mapped from the file unless they are planar."""
    spec, checkpoint_format = facts.spec, facts.checkpoint_format
    qweight = packed.tensor("qweight")
    if is_planar(spec.bits, checkpoint_format):
        codes = decode_qweight(qweight, facts.in_features, spec.bits, checkpoint_format)
        qweight = pack(codes, spec.bits)
    scales = packed.tensor("scales")
    if facts.zero_reading is ZeroReading.MIDDLE:
        zeros = torch.full(scales.shape, spec.mid_code, dtype=torch.uint8)
    else:
        zeros = decode_zeros(
            packed.tensor("qzeros"), facts.out_features, spec.bits, checkpoint_format
        )
    return QuantTensor(spec, qweight, scales, zeros, _g_idx(packed, facts))


def _in_features(packed: PackedFiles, said: QuantSpec, rows: int) -> int:
    """Without `g_idx` only the words tell, and they fill up to a whole word."""
    if packed.has("g_idx"):
        return packed.shape("g_idx", *_INDEX_DTYPES)[0]
    return rows * WORD_BITS // said.bits


def _bits(
    packed: PackedFiles, said: QuantSpec, inputs: tuple[int, int], outputs: tuple[int, int]
) -> int:
    """inputs, outputs: (words, codes) along K of qweight and along N of qzeros."""
    fitting = [
        bits
        for bits in LEGAL_BITS
        if words_for(inputs[1], bits) == inputs[0] and words_for(outputs[1], bits) == outputs[0]
    ]
    if said.bits in fitting:
        return said.bits
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise packed.contradiction(f"no bit width fits {inputs[1]} inputs, {outputs[1]} outputs")
    raise packed.contradiction(f"the shapes fit {fitting} bits, and the config says {said.bits}")


def _grouping(
    packed: PackedFiles, said: QuantSpec, in_features: int, groups: int
) -> tuple[int, bool]:
    """(group size, whether the groups are in the order of the inputs)."""
    if not packed.has("g_idx"):
        group = _uniform_group(packed, said, in_features, groups)
        return group, True
    g_idx = _normalized(packed.tensor("g_idx"), groups)
    if in_features == 0 or int(g_idx.min()) < 0 or int(g_idx.max()) != groups - 1:
        raise packed.contradiction(f"g_idx does not number the {groups} groups of scales")
    if said.num_groups(in_features) == groups and torch.equal(
        g_idx, sequential_groups(in_features, said.group_of(in_features))
    ):
        return said.group_size, True
    largest = int(torch.bincount(g_idx).max())
    sequential = torch.equal(g_idx, sequential_groups(in_features, largest))
    if not sequential and said.num_groups(in_features) == groups:
        return said.group_size, False
    return PER_CHANNEL if groups == 1 else largest, sequential


def _uniform_group(packed: PackedFiles, said: QuantSpec, in_features: int, groups: int) -> int:
    if said.num_groups(in_features) == groups:
        return said.group_size
    if groups == 1:
        return PER_CHANNEL
    group = -(-in_features // groups)
    if -(-in_features // group) != groups:
        raise packed.contradiction(f"{in_features} inputs cannot be cut into {groups} groups")
    return group


def _check_planar(
    packed: PackedFiles, bits: int, in_features: int, out_features: int, label: Format
) -> None:
    blocks = in_features % WORD_BITS == 0 and out_features % WORD_BITS == 0
    if is_planar(bits, label) and not blocks:
        reason = "is always planar" if bits in PLANAR_ONLY_BITS else "is planar in gptq_p"
        raise packed.contradiction(
            f"{bits} bits {reason}, so inputs and outputs must be multiples of 32, not "
            f"{in_features} and {out_features}"
        )


def _zero_reading(
    packed: PackedFiles, bits: int, said_sym: bool, out_features: int, label: Format
) -> tuple[ZeroReading, bool]:
    """How to read the zero points, and whether all are the middle code.

    A file that claims symmetry and stores the middle code in any known encoding is symmetric, even
    when its label belongs to another encoding.
    """
    qzeros = packed.tensor("qzeros")
    middle = 1 << (bits - 1)

    def is_middle(zeros: Tensor) -> bool:
        return bool((zeros == middle).all())

    if is_middle(decode_zeros(qzeros, out_features, bits, label)):
        return ZeroReading.AS_LABELLED, said_sym
    if not said_sym:
        return ZeroReading.AS_LABELLED, False
    others = [other for other in Format if is_planar(bits, other) == is_planar(bits, label)]
    if any(is_middle(decode_zeros(qzeros, out_features, bits, other)) for other in others):
        return ZeroReading.MIDDLE, True
    if bits == 3 and is_middle(decode_legacy_3bit_zeros(qzeros, out_features)):
        return ZeroReading.MIDDLE, True
    return ZeroReading.AS_LABELLED, False


def _g_idx(packed: PackedFiles, facts: Facts) -> Tensor:
    if not packed.has("g_idx"):
        return sequential_groups(facts.in_features, facts.spec.group_of(facts.in_features))
    groups = packed.shape("scales", *_SCALE_DTYPES)[0]
    return _normalized(packed.tensor("g_idx"), groups)


def _normalized(g_idx: Tensor, groups: int) -> Tensor:
    """int32; packers of GPTQModel accept negative entries, which count from the last group."""
    g_idx = g_idx.to(torch.int32)
    return torch.where(g_idx < 0, g_idx + groups, g_idx)
