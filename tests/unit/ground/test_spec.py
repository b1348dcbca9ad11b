"""Specs are complete at birth and know their packed shapes."""

from __future__ import annotations

import pytest

from terrazzo.errors import ConfigError
from terrazzo.spec import QuantSpec, packed_shapes, words_for


@pytest.mark.parametrize("bits", [-1, 0, 1, 9, 16])
def test_illegal_bits_are_refused_with_the_legal_ones(bits: int) -> None:
    with pytest.raises(ConfigError, match=f"bits is {bits}; legal values are 2, 3"):
        QuantSpec(bits=bits)


@pytest.mark.parametrize("group_size", [0, -2, -128])
def test_illegal_group_sizes_are_refused(group_size: int) -> None:
    with pytest.raises(ConfigError, match=f"group_size is {group_size}"):
        QuantSpec(group_size=group_size)


def test_group_minus_one_is_one_group_over_all_inputs() -> None:
    spec = QuantSpec(group_size=-1)
    assert spec.group_of(576) == 576
    assert spec.num_groups(576) == 1


def test_the_last_group_may_be_short() -> None:
    assert QuantSpec(group_size=128).num_groups(576) == 5


@pytest.mark.parametrize(("bits", "words"), [(2, 36), (3, 54), (4, 72), (5, 90), (8, 144)])
def test_words_for_576_codes(bits: int, words: int) -> None:
    assert words_for(576, bits) == words


def test_packed_shapes_of_an_odd_weight() -> None:
    shapes = packed_shapes(QuantSpec(bits=4, group_size=32), out_features=125, in_features=100)
    assert shapes.qweight == (13, 125)
    assert shapes.qzeros == (4, 16)
    assert shapes.scales == (4, 125)
    assert shapes.g_idx == (100,)
    assert shapes.num_bytes == 4 * (13 * 125 + 4 * 16 + 100) + 2 * 4 * 125


def test_str_says_what_a_user_would_say() -> None:
    assert str(QuantSpec(3, -1, sym=False, desc_act=True)) == "3-bit channel asym act-order"
    assert str(QuantSpec()) == "4-bit g128 sym"
