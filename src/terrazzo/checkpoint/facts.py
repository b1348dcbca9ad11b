"""What one quantized module is, read off its tensors.

Shapes decide bits, groups and sizes; `g_idx` decides act-order; the zero points decide symmetry.
The config serves as a tie-break where shapes leave a choice, and for the two things that no shape
shows: whether zero points are stored minus one (v1), and whether codes are in bit planes. The type
of `qweight` is the width of the words, whatever `pack_dtype` says.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from terrazzo.checkpoint.files import TensorFiles
from terrazzo.checkpoint.zero_points import Coded, ZeroPoints, ZeroReading, judge_zero_points
from terrazzo.errors import TensorError, UnsupportedError
from terrazzo.packing import (
    BYTE_BITS,
    PLANAR_ONLY_BITS,
    WORD_DTYPES,
    QuantTensor,
    decode_legacy_3bit_zeros,
    decode_qweight,
    decode_zeros,
    is_planar,
    join_words,
    pack,
    sequential_groups,
)
from terrazzo.spec import (
    LEGAL_BITS,
    PER_CHANNEL,
    WORD_BITS,
    Name,
    QuantSpec,
    WordFormat,
    words_for,
)

_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_INDEX_DTYPES = (torch.int32, torch.int64)


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

    def dtype(self, suffix: str) -> torch.dtype:
        return self.files.headers[f"{self.module}.{suffix}"].dtype

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
    """spec: as the tensors have it. word_dtype: the type of the words. label: the format that the
    config names. zeros: how zero points are stored, and the layout that the codes are in.
    """

    spec: QuantSpec
    in_features: int
    out_features: int
    word_dtype: torch.dtype
    label: WordFormat
    zeros: ZeroPoints


@dataclass(frozen=True, slots=True)
class _Words:
    """Sizes that bound the bit width. bits: of one word. rows: words along K of qweight. columns:
    words along N of qzeros.
    """

    bits: int
    rows: int
    columns: int
    out_features: int

    def fit(self, bits: int, in_features: int) -> bool:
        return self.fit_outputs(bits) and words_for(in_features, bits, self.bits) == self.rows

    def fit_outputs(self, bits: int) -> bool:
        return words_for(self.out_features, bits, self.bits) == self.columns


def read_facts(packed: PackedFiles, said: QuantSpec, label: WordFormat) -> Facts:
    """said: the spec that config and rules give the module.

    Reads `g_idx` and `qzeros`, and a few columns of `qweight` where zero points of 3 bits are in
    doubt. Raises TensorError when the tensors contradict each other, UnsupportedError for words
    that no tool writes.
    """
    rows, out_features = packed.shape("qweight", *WORD_DTYPES)
    word_dtype = packed.dtype("qweight")
    groups, scale_columns = packed.shape("scales", *_SCALE_DTYPES)
    zero_rows, zero_columns = packed.shape("qzeros", word_dtype)
    if scale_columns != out_features or zero_rows != groups or groups == 0:
        raise packed.contradiction("qweight, qzeros and scales disagree on outputs or groups")
    words = _Words(8 * word_dtype.itemsize, rows, zero_columns, out_features)
    in_features = _in_features(packed, said, words)
    bits = _bits(packed, said, words, in_features)
    _check_words(packed, bits, word_dtype)
    group_size, g_idx = _grouping(packed, said, in_features, groups)
    coded = Coded(packed.tensor("qweight"), packed.tensor("qzeros"), g_idx, out_features, bits)
    zeros = judge_zero_points(coded, said.sym, label)
    _check_planar(packed, bits, in_features, out_features, zeros.layout)
    plain = QuantSpec(bits, group_size, zeros.sym)
    order = sequential_groups(in_features, plain.group_of(in_features))
    spec = replace(plain, desc_act=not torch.equal(g_idx, order))
    return Facts(spec, in_features, out_features, word_dtype, label, zeros)


def read_quant_tensor(packed: PackedFiles, facts: Facts) -> QuantTensor:
    """The module in canonical form; its words stay mapped from the file unless they are planar or
    of another type than int32.
    """
    spec, layout = facts.spec, facts.zeros.layout
    qweight = packed.tensor("qweight")
    if is_planar(spec.bits, layout):
        qweight = pack(decode_qweight(qweight, facts.in_features, spec.bits, layout), spec.bits)
    qweight = join_words(qweight, words_for(facts.in_features, spec.bits))
    return QuantTensor(spec, qweight, _half(packed), _zeros(packed, facts), _g_idx(packed, facts))


def _zeros(packed: PackedFiles, facts: Facts) -> Tensor:
    """uint8 [G, N]: the true zero points."""
    qzeros, bits = packed.tensor("qzeros"), facts.spec.bits
    if facts.zeros.reading is ZeroReading.MIDDLE:
        shape = (qzeros.shape[0], facts.out_features)
        return torch.full(shape, facts.spec.mid_code, dtype=torch.uint8)
    if facts.zeros.reading is ZeroReading.LEGACY_3BIT:
        return decode_legacy_3bit_zeros(qzeros, facts.out_features)
    return decode_zeros(qzeros, facts.out_features, bits, facts.zeros.layout)


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


def _in_features(packed: PackedFiles, said: QuantSpec, words: _Words) -> int:
    """Without `g_idx` the words tell: their number, with the bit width that qzeros have, and where
    the last word may be part empty, the groups.
    """
    if packed.has("g_idx"):
        return packed.shape("g_idx", *_INDEX_DTYPES)[0]
    fitting = [bits for bits in LEGAL_BITS if words.fit_outputs(bits)]
    bits = said.bits if said.bits in fitting or len(fitting) != 1 else fitting[0]
    full = words.rows * words.bits // bits
    grouped = packed.shape("scales", *_SCALE_DTYPES)[0] * said.group_of(full)
    fits = words_for(grouped, bits, words.bits) == words.rows
    return grouped if grouped < full and fits else full


def _bits(packed: PackedFiles, said: QuantSpec, words: _Words, in_features: int) -> int:
    fitting = [bits for bits in LEGAL_BITS if words.fit(bits, in_features)]
    if said.bits in fitting:
        return said.bits
    if len(fitting) == 1:
        return fitting[0]
    if not fitting:
        raise packed.contradiction(
            f"no bit width fits {in_features} inputs, {words.out_features} outputs and words of "
            f"{words.bits} bits"
        )
    raise packed.contradiction(f"the shapes fit {fitting} bits, and the config says {said.bits}")


def _check_words(packed: PackedFiles, bits: int, dtype: torch.dtype) -> None:
    if dtype != torch.int32 and bits not in BYTE_BITS:
        raise UnsupportedError(
            f"{packed.module}.qweight: {bits} bits in words of {dtype}; legal are 2, 4 and 8 bits, "
            "because no tool packs others into words that are not int32. Save the model again with "
            "pack_dtype int32"
        )


def _grouping(
    packed: PackedFiles, said: QuantSpec, in_features: int, groups: int
) -> tuple[int, Tensor]:
    """(group size, int32 [K]: the group of each input)."""
    if not packed.has("g_idx"):
        group = _uniform_group(packed, said, in_features, groups)
        spec = QuantSpec(group_size=group)
        return group, sequential_groups(in_features, spec.group_of(in_features))
    g_idx = _normalized(packed.tensor("g_idx"), groups)
    if in_features == 0 or int(g_idx.min()) < 0 or int(g_idx.max()) != groups - 1:
        raise packed.contradiction(f"g_idx does not number the {groups} groups of scales")
    if said.num_groups(in_features) == groups and torch.equal(
        g_idx, sequential_groups(in_features, said.group_of(in_features))
    ):
        return said.group_size, g_idx
    largest = int(torch.bincount(g_idx).max())
    if torch.equal(g_idx, sequential_groups(in_features, largest)):
        return PER_CHANNEL if groups == 1 else largest, g_idx
    return _uniform_group(packed, said, in_features, groups), g_idx


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
    packed: PackedFiles, bits: int, in_features: int, out_features: int, layout: WordFormat
) -> None:
    blocks = in_features % WORD_BITS == 0 and out_features % WORD_BITS == 0
    if is_planar(bits, layout) and not blocks:
        reason = "is always planar" if bits in PLANAR_ONLY_BITS else "is planar in gptq_p"
        raise packed.contradiction(
            f"{bits} bits {reason}, so inputs and outputs must be multiples of 32, not "
            f"{in_features} and {out_features}"
        )


def _g_idx(packed: PackedFiles, facts: Facts) -> Tensor:
    if not packed.has("g_idx"):
        return sequential_groups(facts.in_features, facts.spec.group_of(facts.in_features))
    groups = packed.shape("scales", *_SCALE_DTYPES)[0]
    return _normalized(packed.tensor("g_idx"), groups)


def _normalized(g_idx: Tensor, groups: int) -> Tensor:
    """int32; packers of GPTQModel accept negative entries, which count from the last group."""
    g_idx = g_idx.to(torch.int32)
    return torch.where(g_idx < 0, g_idx + groups, g_idx)
