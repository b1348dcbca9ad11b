"""What one quantized module is, read off its tensors.

Shapes decide bits, groups and sizes; `g_idx` decides act-order; the zero points decide symmetry.
The config serves as a tie-break where shapes leave a choice, and for the two things that no shape
shows: whether zero points are stored minus one (v1), and whether 3-bit codes are in bit planes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from terrazzo.checkpoint.files import TensorFiles
from terrazzo.errors import TensorError, UnsupportedError
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
    """spec: as the tensors have it. label: the checkpoint_format of the config. layout: the one
    whose words the codes are in, which differs from the label only in mislabelled 3-bit files.
    """

    spec: QuantSpec
    in_features: int
    out_features: int
    label: Format
    layout: Format
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
    in_features = _in_features(packed, said, rows, (zero_columns, out_features))
    bits = _bits(packed, said, (rows, in_features), (zero_columns, out_features))
    group_size, sequential = _grouping(packed, said, in_features, groups)
    qzeros = packed.tensor("qzeros")
    layout, reading, sym = _zero_points(qzeros, out_features, bits, said.sym, checkpoint_format)
    _check_planar(packed, bits, in_features, out_features, layout)
    spec = QuantSpec(bits, group_size, sym, desc_act=not sequential)
    return Facts(spec, in_features, out_features, checkpoint_format, layout, reading)


def read_quant_tensor(packed: PackedFiles, facts: Facts) -> QuantTensor:
    """The module in canonical form; its words stay mapped from the file unless they are planar."""
    spec, layout = facts.spec, facts.layout
    qweight = packed.tensor("qweight")
    if is_planar(spec.bits, layout):
        qweight = pack(decode_qweight(qweight, facts.in_features, spec.bits, layout), spec.bits)
    scales = _half(packed)
    if facts.zero_reading is ZeroReading.MIDDLE:
        zeros = torch.full(scales.shape, spec.mid_code, dtype=torch.uint8)
    else:
        zeros = decode_zeros(packed.tensor("qzeros"), facts.out_features, spec.bits, layout)
    return QuantTensor(spec, qweight, scales, zeros, _g_idx(packed, facts))


def _half(packed: PackedFiles) -> Tensor:
    """The scales in float16. TensorError when one is inf or nan, UnsupportedError when that would
    round.
    """
    scales = packed.tensor("scales")
    faults = scales.numel() - int(scales.isfinite().sum())
    if faults:
        raise TensorError(
            f"{packed.module}.scales: {faults} of {scales.numel()} values are inf or nan; every "
            "scale must be a finite number. Quantize the model again"
        )
    half = scales.to(torch.float16)
    if not torch.equal(half.to(scales.dtype), scales):
        raise UnsupportedError(
            f"{packed.module}.scales: {scales.dtype} values that float16 cannot hold; Terrazzo "
            "keeps scales in float16. Export the checkpoint with float16 scales"
        )
    return half


def _in_features(packed: PackedFiles, said: QuantSpec, rows: int, outputs: tuple[int, int]) -> int:
    """Without `g_idx` the words tell: their number, with the bit width that qzeros have, and where
    the last word may be part empty, the groups.
    """
    if packed.has("g_idx"):
        return packed.shape("g_idx", *_INDEX_DTYPES)[0]
    fitting = [bits for bits in LEGAL_BITS if words_for(outputs[1], bits) == outputs[0]]
    bits = said.bits if said.bits in fitting or len(fitting) != 1 else fitting[0]
    full = rows * WORD_BITS // bits
    grouped = packed.shape("scales", *_SCALE_DTYPES)[0] * said.group_of(full)
    return grouped if grouped < full and words_for(grouped, bits) == rows else full


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
    if sequential:
        return PER_CHANNEL if groups == 1 else largest, True
    return _uniform_group(packed, said, in_features, groups), False


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


def _zero_points(
    qzeros: Tensor, out_features: int, bits: int, said_sym: bool, label: Format
) -> tuple[Format, ZeroReading, bool]:
    """The layout of the words, how to read the zero points, and whether all are the middle code.

    A file that claims symmetry and stores the middle code in any known encoding is symmetric, even
    when its label belongs to another encoding. The constants of bit planes and of a stream differ,
    so they also tell the layout of mislabelled 3-bit codes.
    """
    sample, columns = _sample(qzeros, out_features, bits)
    if _is_middle(sample, columns, bits, label):
        return label, ZeroReading.AS_LABELLED, said_sym
    if said_sym:
        others = sorted(Format, key=lambda other: is_planar(bits, other) != is_planar(bits, label))
        for other in others:
            if _is_middle(sample, columns, bits, other):
                mislaid = is_planar(bits, other) != is_planar(bits, label)
                return other if mislaid else label, ZeroReading.MIDDLE, True
        if bits == 3 and _all_equal(decode_legacy_3bit_zeros(sample, columns), 4):
            layout = Format.GPTQ if is_planar(bits, label) else label
            return layout, ZeroReading.MIDDLE, True
    return label, ZeroReading.AS_LABELLED, False


def _sample(qzeros: Tensor, out_features: int, bits: int) -> tuple[Tensor, int]:
    """(words, columns) that stand for all zero points: one block of 32 where all blocks are equal,
    as they are in a symmetric weight, or else everything.
    """
    block = qzeros[:1, :bits]
    whole = out_features % WORD_BITS == 0
    if whole and bool((qzeros.reshape(qzeros.shape[0], -1, bits) == block).all()):
        return block, WORD_BITS
    return qzeros, out_features


def _is_middle(words: Tensor, columns: int, bits: int, layout: Format) -> bool:
    if is_planar(bits, layout) and columns % WORD_BITS != 0:
        return False
    if words.numel() == bits:
        return _block_is_middle(tuple(words.flatten().tolist()), columns, bits, layout)
    return _all_equal(decode_zeros(words, columns, bits, layout), 1 << (bits - 1))


@lru_cache(maxsize=256)
def _block_is_middle(words: tuple[int, ...], columns: int, bits: int, layout: Format) -> bool:
    """Hundreds of modules share a handful of blocks, and unpacking one costs many small steps."""
    block = torch.tensor([words], dtype=torch.int32)
    return _all_equal(decode_zeros(block, columns, bits, layout), 1 << (bits - 1))


def _all_equal(zeros: Tensor, value: int) -> bool:
    return bool((zeros == value).all())


def _g_idx(packed: PackedFiles, facts: Facts) -> Tensor:
    if not packed.has("g_idx"):
        return sequential_groups(facts.in_features, facts.spec.group_of(facts.in_features))
    groups = packed.shape("scales", *_SCALE_DTYPES)[0]
    return _normalized(packed.tensor("g_idx"), groups)


def _normalized(g_idx: Tensor, groups: int) -> Tensor:
    """int32; packers of GPTQModel accept negative entries, which count from the last group."""
    g_idx = g_idx.to(torch.int32)
    return torch.where(g_idx < 0, g_idx + groups, g_idx)
