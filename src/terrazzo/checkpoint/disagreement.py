"""Finds where a module is not what config and rules say it is."""

from __future__ import annotations

from collections.abc import Iterator

from terrazzo.checkpoint.conflict import Conflict
from terrazzo.checkpoint.facts import Facts
from terrazzo.checkpoint.zero_points import ZeroReading
from terrazzo.rules import Resolution
from terrazzo.spec import Dense, QuantSpec

_USED = "Using the tensors. Correct the config or the rule, so that other engines read the same"


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
