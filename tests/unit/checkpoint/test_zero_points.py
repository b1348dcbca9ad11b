"""Zero points that cannot be read as labelled: destroyed ones, and 3 bits of two ages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.brute_packing import Stored, brute_module, rounded_weight
from helpers.checkpoints import MODULE, Affine, config_of, random_affine, write_folder
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import TensorError
from terrazzo.spec import Format, QuantSpec

MADE_BY = {"meta": {"quantizer": ["gptqmodel:7.7.0"]}}
WIDTHS = [2, 3, 4, 8]


def asymmetric(bits: int) -> QuantSpec:
    return QuantSpec(bits, 32, sym=False)


def written(folder: Path, weight: Affine, bits: int, stored: Stored, **more: Any) -> Path:
    tensors = brute_module(weight, bits, stored=stored)
    return write_folder(folder, tensors, config_of(asymmetric(bits), **more))


def with_zeros(bits: int, lowest: int, seed: int = 0) -> Affine:
    """Random weights whose zero points are `lowest` and more."""
    weight = random_affine(asymmetric(bits), 64, 128, seed)
    weight.zeros.clamp_(min=lowest)
    return weight


@pytest.mark.parametrize("bits", WIDTHS)
def test_destroyed_zero_points_are_refused(tmp_path: Path, bits: int) -> None:
    weight = with_zeros(bits, 0)
    weight.zeros[:, 5] = 0
    folder = written(tmp_path, weight, bits, Stored.UNMASKED)
    with pytest.raises(TensorError, match=r"zero points of 1 modules are lost") as caught:
        Checkpoint(folder)
    message = str(caught.value)
    assert f"the first in {MODULE}.qzeros" in message
    assert "AutoGPTQ" in message
    assert "Quantize the original model again" in message


def test_the_number_of_lost_zero_points_is_told(tmp_path: Path) -> None:
    """Groups lose seven, six and two fields of a word of eight; the last field loses nothing."""
    weight = with_zeros(4, 2)
    for group, column in ((0, 0), (1, 9), (2, 21), (3, 31)):
        weight.zeros[group, column] = 0
    with pytest.raises(TensorError, match="15 zero points of 1 modules"):
        Checkpoint(written(tmp_path, weight, 4, Stored.UNMASKED))


@pytest.mark.parametrize("bits", WIDTHS)
def test_the_same_tool_is_read_where_it_destroyed_nothing(tmp_path: Path, bits: int) -> None:
    weight = with_zeros(bits, 1)
    checkpoint = Checkpoint(written(tmp_path, weight, bits, Stored.UNMASKED))
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert not [each for each in checkpoint.conflicts if "AutoGPTQ" in str(each)]


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_nothing_is_lost_behind_the_last_field_of_a_word(tmp_path: Path, bits: int) -> None:
    weight = with_zeros(bits, 1)
    weight.zeros[:, 32 // bits - 1] = 0
    checkpoint = Checkpoint(written(tmp_path, weight, bits, Stored.UNMASKED))
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert checkpoint.conflicts == ()


@settings(max_examples=60)
@given(
    bits=st.sampled_from(WIDTHS), seed=st.integers(0, 10_000), maker=st.sampled_from([{}, MADE_BY])
)
def test_a_tool_that_borrows_or_masks_is_never_refused(
    tmp_path_factory: pytest.TempPathFactory, bits: int, seed: int, maker: dict[str, Any]
) -> None:
    weight = with_zeros(bits, 0, seed)
    folder = written(tmp_path_factory.mktemp("any"), weight, bits, Stored.MINUS_ONE, **maker)
    checkpoint = Checkpoint(folder)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert not [each for each in checkpoint.conflicts if "AutoGPTQ" in str(each)]


def test_what_few_words_cannot_decide_is_said(tmp_path: Path) -> None:
    """A zero and a one that end a word are stored as AutoGPTQ stores a zero before anything."""
    weight = with_zeros(4, 2)
    weight.zeros[0, 6], weight.zeros[0, 7] = 0, 1
    weight.zeros[1, :40] = 1
    checkpoint = Checkpoint(written(tmp_path / "any", weight, 4, Stored.MINUS_ONE))
    (conflict,) = checkpoint.conflicts
    assert "1 of them end a word of ones behind a zero: they are what they say" in str(conflict)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    known = Checkpoint(written(tmp_path / "known", weight, 4, Stored.MINUS_ONE, **MADE_BY))
    assert known.conflicts == ()


def test_a_known_tool_is_trusted_with_ones_behind_a_zero(tmp_path: Path) -> None:
    weight = with_zeros(4, 2)
    weight.zeros[:, 8] = 0
    weight.zeros[:, 9:16] = 1
    checkpoint = Checkpoint(written(tmp_path / "known", weight, 4, Stored.MINUS_ONE, **MADE_BY))
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    old = {"meta": {"quantizer": "gptqmodel:0.8.1"}}
    with pytest.raises(TensorError, match="28 zero points"):
        Checkpoint(written(tmp_path / "old", weight, 4, Stored.MINUS_ONE, **old))


def test_two_zeros_beside_each_other_prove_nothing_of_three_bits(tmp_path: Path) -> None:
    """A tool that masks stores them as AutoGPTQ does, if they end a word."""
    weight = rounded_weight(asymmetric(3), 64, 128)
    weight.zeros.clamp_(min=1)
    weight.zeros[0, 8:10] = 0
    weight.zeros[1, 31] = 0
    checkpoint = Checkpoint(written(tmp_path, weight, 3, Stored.MINUS_ONE))
    (conflict,) = checkpoint.conflicts
    assert "1 of them end a word of ones behind a zero" in str(conflict)
    assert torch.equal(checkpoint.quant_tensor(MODULE).zeros, weight.zeros)


@pytest.mark.parametrize("seed", range(6))
def test_three_bits_are_read_as_the_release_that_wrote_them(tmp_path: Path, seed: int) -> None:
    """The codes tell: a zero point lies near the mean code of its group."""
    weight = rounded_weight(asymmetric(3), 64, 128, seed)
    before = Checkpoint(written(tmp_path / "before", weight, 3, Stored.EXCHANGED))
    today = Checkpoint(written(tmp_path / "today", weight, 3, Stored.MINUS_ONE))
    assert torch.equal(before.dequantize(MODULE), weight.dequantized)
    assert torch.equal(today.dequantize(MODULE), weight.dequantized)
    (conflict,) = before.conflicts
    assert "only with the 3-bit constants that GPTQModel once exchanged" in str(conflict)
    assert today.conflicts == ()


def test_three_bits_of_unknown_age_are_read_as_labelled_aloud(tmp_path: Path) -> None:
    """Random codes fit no zero points."""
    weight = with_zeros(3, 1)
    checkpoint = Checkpoint(written(tmp_path / "any", weight, 3, Stored.MINUS_ONE))
    (conflict,) = checkpoint.conflicts
    assert "zero points: gptq of 3 bits, which GPTQModel has stored in two ways" in str(conflict)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    known = Checkpoint(written(tmp_path / "known", weight, 3, Stored.MINUS_ONE, **MADE_BY))
    assert known.conflicts == ()


def test_three_bits_with_true_zero_points_are_in_no_doubt(tmp_path: Path) -> None:
    weight = with_zeros(3, 0)
    tensors = brute_module(weight, 3, stored=Stored.TRUE)
    config = config_of(asymmetric(3), Format.GPTQ_V2)
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, config))
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert checkpoint.conflicts == ()
