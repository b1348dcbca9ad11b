"""What vLLM and SGLang share: they run GPTQ through Marlin, and allocate before they read.

Sizes are those of one device. Both build parameters from config and rules, then copy tensors in;
what does not fit raises, is cut, or is padded, depending on the axis.
"""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.dialects.prediction import Finding, Refusal, silently_wrong
from terrazzo.dialects.subject import WORD_TYPE, Linear
from terrazzo.dialects.units import Role, Unit
from terrazzo.spec import PER_CHANNEL, WORD_BITS, QuantSpec, packed_shapes

BITS = (4, 8)
GROUP_SIZES = (PER_CHANNEL, 32, 64, 128)
VOCABULARY_STEP = 64
"""Vocabularies are padded to this; the copy of a packed head does not know the padding."""


def check_type(spec: QuantSpec) -> None:
    """Refusal where Marlin has no type for it."""
    if spec.bits not in BITS or not spec.sym:
        raise Refusal(f"Unsupported quantization config: bits={spec.bits}, sym={spec.sym}")


def check_words(unit: Unit) -> None:
    """Parameters are allocated for words of int32, whatever the config says."""
    for shard in unit.quantized:
        if shard.word_type != WORD_TYPE:
            raise Refusal(
                f"AssertionError on shapes: {shard.leaf} has words of {shard.word_type} on disk, "
                f"and {WORD_TYPE} is allocated"
            )


def check_group(spec: QuantSpec) -> None:
    if spec.group_size not in GROUP_SIZES:
        raise Refusal(
            f"Marlin does not support group_size = {spec.group_size}; it has "
            f"{', '.join(map(str, GROUP_SIZES))}"
        )


def check_head(unit: Unit) -> None:
    out_features = unit.shards[0].out_features
    if unit.role is Role.HEAD and out_features % VOCABULARY_STEP:
        raise Refusal(
            f"a vocabulary of {out_features} is padded to a multiple of {VOCABULARY_STEP}, along "
            "the wrong axis of a packed head"
        )


def group_rows(spec: QuantSpec, in_features: int) -> int:
    """Rows of scales that an engine allocates: it rounds down."""
    return 1 if spec.group_size == PER_CHANNEL else in_features // spec.group_size


def check_widths(spec: QuantSpec, shard: Linear) -> None:
    """Inputs must fill whole words. The columns of qzeros are never cut: other bits always show."""
    assert isinstance(shard.spec, QuantSpec)
    if shard.in_features * spec.bits % WORD_BITS:
        raise Refusal(f"{shard.in_features} inputs of {spec.bits} bits do not fill their last word")
    disk = packed_shapes(shard.spec, shard.out_features, shard.in_features).qzeros[1]
    expected = shard.out_features * spec.bits // WORD_BITS
    if disk != expected:
        raise Refusal(
            f"AssertionError on shapes: {shard.leaf} has {shard.spec.bits} bits on disk, "
            f"{spec.bits} by config and rules (qzeros have {disk} columns instead of {expected})"
        )


def disk_rows(shard: Linear) -> int:
    assert isinstance(shard.spec, QuantSpec)
    return shard.spec.num_groups(shard.in_features)


def ignored_tensors(spec: QuantSpec, unit: Unit) -> Iterator[Finding]:
    """Marlin never reads qzeros, and g_idx only where the flag is set."""
    for shard in unit.quantized:
        held = shard.spec
        assert isinstance(held, QuantSpec)
        if not held.sym:
            yield from silently_wrong(
                [shard.name], "its zero points are not the middle code, and Marlin ignores them"
            )
        if held.desc_act and not spec.desc_act:
            yield from silently_wrong(
                [shard.name], "g_idx is not sequential, but desc_act is false, so it is ignored"
            )
