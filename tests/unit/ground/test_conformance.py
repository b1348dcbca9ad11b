"""Vectors on which readers of `dynamic` and of packed words are known to differ."""

from __future__ import annotations

import pytest
import torch

from terrazzo.errors import RuleError
from terrazzo.packing import decode_zeros, encode_zeros
from terrazzo.rules import RuleSet
from terrazzo.spec import DENSE, Dense, Format, QuantSpec, packed_shapes

BASE = QuantSpec(4, 128)
EIGHT = QuantSpec(8, 128)
LAYER_18 = "model.layers.18.mlp"


def decided(dynamic: dict[str, object], name: str) -> QuantSpec | Dense:
    return RuleSet.parse(dynamic, BASE, lm_head=True).resolve_name(name).spec


def words(*values: int) -> torch.Tensor:
    """uint32 words as the int32 row of one group."""
    return torch.tensor([values], dtype=torch.int64).to(torch.int32)


def test_negative_rules_are_first() -> None:
    dynamic = {r"+:.*layers\.0\..*": {"bits": 8}, "-:.*down_proj": {}}
    assert decided(dynamic, "model.layers.0.mlp.down_proj") is DENSE
    assert decided(dict(reversed(dynamic.items())), "model.layers.0.mlp.down_proj") is DENSE


def test_an_empty_rule_shields() -> None:
    dynamic = {"+:.*o_proj": {}, ".*": {"bits": 8}}
    assert decided(dynamic, "model.layers.0.self_attn.o_proj") == BASE
    assert decided(dynamic, "model.layers.0.self_attn.q_proj") == EIGHT


def test_null_means_none_for_negative_rules_alone() -> None:
    assert decided({"-:x": None}, "x") is DENSE
    with pytest.raises(RuleError, match="its value is None"):
        decided({"+:x": None}, "x")


@pytest.mark.parametrize(
    ("child", "spec"),
    [("gate_proj", EIGHT), ("gate_up_proj", EIGHT), ("up_proj", BASE), ("experts", BASE)],
)
def test_a_pattern_is_asked_one_name_at_a_time(child: str, spec: QuantSpec) -> None:
    assert decided({r".*\.18\..*gate.*": {"bits": 8}}, f"{LAYER_18}.{child}") == spec


def test_the_key_of_the_head_is_anchored_at_the_start() -> None:
    dynamic: dict[str, object] = {"lm_head": {"bits": 8}}
    assert decided(dynamic, "lm_head") == EIGHT
    assert decided(dynamic, "language_model.lm_head") == BASE


def test_v1_words_are_added_to_not_their_fields() -> None:
    zeros = [0, 5, 9, 15, 8, 8, 8, 8]
    decoded = decode_zeros(words(0x7777E83F), 8, 4, Format.GPTQ)
    assert decoded.tolist() == [zeros]
    assert torch.equal(encode_zeros(decoded, 4, Format.GPTQ), words(0x7777E83F))


def test_three_bit_v1_words_are_the_middle() -> None:
    stored = words(0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D)
    assert decode_zeros(stored, 32, 3, Format.GPTQ).tolist() == [[4] * 32]


@pytest.mark.parametrize(
    ("bits", "label", "stored"),
    [
        (2, Format.GPTQ, (0x55555555, 0x55555555)),
        (2, Format.GPTQ_V2, (0xAAAAAAAA, 0xAAAAAAAA)),
        (3, Format.GPTQ_V2, (0x24924924, 0x49249249, 0x92492492)),
        (3, Format.GPTQ_P, (0, 0, 0xFFFFFFFF)),
        (4, Format.GPTQ, (0x77777777,) * 4),
        (4, Format.GPTQ_V2, (0x88888888,) * 4),
        (5, Format.GPTQ_P, (0, 0, 0, 0, 0xFFFFFFFF)),
        (6, Format.GPTQ_P, (0, 0, 0, 0, 0xAAAAAAAA, 0xAAAAAAAA)),
        (7, Format.GPTQ_P, (0, 0, 0, 0, 0, 0, 0xFFFFFFFF)),
        (8, Format.GPTQ, (0x7F7F7F7F,) * 8),
        (8, Format.GPTQ_V2, (0x80808080,) * 8),
    ],
)
def test_words_of_the_middle_zero_point(bits: int, label: Format, stored: tuple[int, ...]) -> None:
    middle = torch.full((1, 32), 1 << (bits - 1), dtype=torch.uint8)
    assert torch.equal(encode_zeros(middle, bits, label), words(*stored))
    assert torch.equal(decode_zeros(words(*stored), 32, bits, label), middle)


@pytest.mark.parametrize(("in_features", "groups"), [(448, 4), (192, 2), (704, 6), (896, 7)])
def test_a_last_group_may_be_short(in_features: int, groups: int) -> None:
    assert packed_shapes(BASE, 64, in_features).scales == (groups, 64)
