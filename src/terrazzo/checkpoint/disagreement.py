"""Finds where a module is not what config and rules say it is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from terrazzo.checkpoint.conflict import Conflict
from terrazzo.checkpoint.facts import Facts
from terrazzo.checkpoint.zero_points import NO_OVERFLOW, Doubt, ZeroReading
from terrazzo.errors import TensorError
from terrazzo.rules import Resolution, Rule
from terrazzo.spec import Dense, Name, QuantSpec

_USED = "Using the tensors. Correct the config or the rule, so that other engines read the same"
_PACK_DTYPE = "pack_dtype"

_MASKED_SINCE = {"terrazzo": (0,), "gptqmodel": (0, 9)}
_THREE_BITS_SINCE = {"terrazzo": (0,), "gptqmodel": (7, 3)}
"""Tool -> the release from which on its zero points are known to be sound."""


def kind_conflict(said: Resolution, held: QuantSpec | Dense) -> Conflict:
    """Config and tensors disagree on whether the module is quantized at all."""
    return Conflict(
        said.name, "quantized", f"{said.spec} by {said.decided_by}", f"{held} on disk", _USED
    )


def spec_conflicts(said: Resolution, claimed: QuantSpec, facts: Facts) -> Iterator[Conflict]:
    """Both say quantized; yields each field on which they differ."""
    held, decider = facts.spec, said.decided_by
    for field in ("bits", "group_size", "sym"):
        claim, fact = getattr(claimed, field), getattr(held, field)
        if claim != fact:
            yield Conflict(
                said.name, field, f"{claim} by {decider}", f"the tensors hold {fact}", _USED
            )
    if held.desc_act and not claimed.desc_act:
        yield Conflict(
            said.name,
            "desc_act",
            f"false by {decider}",
            "g_idx is not sequential",
            "Using g_idx. Set desc_act to true: engines that trust the flag compute garbage",
        )
    if facts.zeros.reading is ZeroReading.MIDDLE:
        yield Conflict(
            said.name,
            "checkpoint_format",
            facts.label.value,
            "qzeros hold the middle zero point in the encoding of another format",
            "Using the middle. Engines that trust the label shift every weight of this module",
        )
    if facts.zeros.reading is ZeroReading.LEGACY_3BIT:
        yield Conflict(
            said.name,
            "checkpoint_format",
            facts.label.value,
            "qzeros fit the codes only with the 3-bit constants that GPTQModel once exchanged",
            "Using those. Write the module again: today's engines shift most of its weights",
        )


def word_conflicts(said: Resolution, pack_dtype: str, facts: Facts) -> Iterator[Conflict]:
    """pack_dtype: of the config; a rule may have its own."""
    rule = said.decided_by
    claim = rule.options.get(_PACK_DTYPE, pack_dtype) if isinstance(rule, Rule) else pack_dtype
    held = str(facts.word_dtype).removeprefix("torch.")
    if str(claim).removeprefix("torch.") != held:
        yield Conflict(
            said.name, _PACK_DTYPE, f"{claim} by {rule}", f"the words on disk are {held}", _USED
        )


def age_conflicts(modules: Mapping[Name, Facts], quantizers: tuple[str, ...]) -> Iterator[Conflict]:
    """3 bits that two releases of GPTQModel would read differently, and no evidence for either."""
    if _is_sound(quantizers, _THREE_BITS_SINCE):
        return
    for name, facts in modules.items():
        if facts.zeros.doubt is Doubt.AGE:
            yield Conflict(
                name,
                "zero points",
                f"{facts.label.value} of 3 bits, which GPTQModel has stored in two ways",
                "the codes fit both alike",
                "Reading it as releases from 7.3 do. If it is older, quantize the model again",
            )


def neighbour_conflicts(modules: Mapping[Name, Facts]) -> Iterator[Conflict]:
    """3 bits of AutoRound before 0.16, which stored zero points of zero badly."""
    for name, facts in modules.items():
        if facts.zeros.doubt is Doubt.NEIGHBOURS:
            yield Conflict(
                name,
                "zero points",
                f"{facts.label.value} of 3 bits",
                "some are zero, and AutoRound before 0.16 changed others in the same word then",
                "Reading them as they stand. Export the model with a newer AutoRound, or in its "
                "own format auto_round, which stores true zero points",
            )


def overflow_conflicts(
    folder: Path, modules: Mapping[Name, Facts], quantizers: tuple[str, ...]
) -> Iterator[Conflict]:
    """Zero points that may be lost. TensorError where they are."""
    hit = {name: facts.zeros.overflow for name, facts in modules.items()}
    total = sum(hit.values(), NO_OVERFLOW)
    if _is_sound(quantizers, _MASKED_SINCE) or total.lost == 0 or total.spared:
        return
    hit = {name: overflow for name, overflow in hit.items() if overflow.lost}
    if total.is_proven:
        raise TensorError(
            f"{folder}: {total.lost} zero points of {len(hit)} modules are lost, the first in "
            f"{next(iter(hit))}.qzeros: behind each zero point of zero the rest of its word is "
            "ones, as AutoGPTQ wrote asymmetric weights in format gptq. Nothing can bring them "
            "back. Quantize the original model again, for example with `terrazzo quantize`"
        )
    for name, overflow in hit.items():
        yield Conflict(
            name,
            "zero points",
            "asymmetric in format gptq, by a tool that does not tell its name",
            f"{overflow.lost} of them end a word of ones behind a zero: they are what they say, or "
            "AutoGPTQ destroyed them when it subtracted one from zero",
            "Reading them as they stand. Ask which tool made the file; if AutoGPTQ, quantize again",
        )


def _is_sound(quantizers: tuple[str, ...], since: Mapping[str, tuple[int, ...]]) -> bool:
    for quantizer in quantizers:
        tool, _, version = quantizer.partition(":")
        release = tuple(int(part) for part in re.findall(r"\d+", version)[:3])
        if tool.lower() in since and release >= since[tool.lower()]:
            return True
    return False
