"""Words of 8, 16, 32 and 64 bits (`pack_dtype`), against a packer of Python integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.brute_packing import Stored, brute_module
from helpers.checkpoints import MODULE, config_of, random_affine, write_folder
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import ConfigError, TensorError, UnsupportedError
from terrazzo.packing import join_words, pack
from terrazzo.spec import Format, QuantSpec, words_for

TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
LABELS = {Format.GPTQ: Stored.MINUS_ONE, Format.GPTQ_V2: Stored.TRUE}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@settings(max_examples=80)
@given(
    dtype=st.sampled_from(TYPES),
    spec=st.builds(
        QuantSpec,
        bits=st.sampled_from([2, 4, 8]),
        group_size=st.sampled_from([-1, 16, 50]),
        sym=st.booleans(),
        desc_act=st.booleans(),
    ),
    out_features=st.integers(1, 70),
    in_features=st.integers(2, 130),
    label=st.sampled_from(sorted(LABELS, key=str)),
)
def test_any_size_reads_back_from_words_of_any_type(
    tmp_path_factory: pytest.TempPathFactory,
    dtype: torch.dtype,
    spec: QuantSpec,
    out_features: int,
    in_features: int,
    label: Format,
) -> None:
    weight = random_affine(spec, out_features, in_features)
    tensors = brute_module(weight, spec.bits, dtype, LABELS[label])
    config = config_of(spec, label, pack_dtype=name_of(dtype))
    folder = write_folder(tmp_path_factory.mktemp("any"), tensors, config)
    checkpoint = Checkpoint(folder)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert torch.equal(checkpoint.quant_tensor(MODULE).qweight, pack(weight.codes, spec.bits))
    assert not [each for each in checkpoint.conflicts if each.field == "pack_dtype"]


@given(st.sampled_from(TYPES), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32 - 1))
def test_joined_words_are_the_same_stream(
    dtype: torch.dtype, rows: int, columns: int, seed: int
) -> None:
    info = torch.iinfo(dtype)
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(info.min, info.max, (rows, columns), dtype=dtype, generator=generator)
    count = words_for(rows * info.bits, 1)
    joined = join_words(words, count)
    for column in range(columns):
        narrow, wide = words[:, column].tolist(), joined[:, column].tolist()
        stream = sum((w % (1 << info.bits)) << (info.bits * i) for i, w in enumerate(narrow))
        assert stream == sum((w % (1 << 32)) << (32 * i) for i, w in enumerate(wide))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_symmetric_words_are_known_whatever_the_label_says(
    tmp_path: Path, bits: int, dtype: torch.dtype
) -> None:
    spec = QuantSpec(bits, 32)
    weight = random_affine(spec, 32, 64)
    tensors = brute_module(weight, bits, dtype, Stored.TRUE)
    config = config_of(spec, Format.GPTQ, pack_dtype=name_of(dtype))
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, config))
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)
    assert [conflict.field for conflict in checkpoint.conflicts] == ["checkpoint_format"]


@pytest.mark.parametrize("dtype", TYPES)
def test_a_borrow_stays_in_its_word(tmp_path: Path, dtype: torch.dtype) -> None:
    spec = QuantSpec(4, -1, sym=False)
    weight = random_affine(spec, 64, 32)
    weight.zeros[0] = (torch.arange(64) % 3).to(torch.uint8)
    tensors = brute_module(weight, 4, dtype)
    config = config_of(spec, pack_dtype=name_of(dtype))
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, config))
    assert torch.equal(checkpoint.quant_tensor(MODULE).zeros, weight.zeros)


@pytest.mark.parametrize(
    "said",
    [
        {"pack_dtype": "int16"},
        {"meta": {"pack_dtype": "int16"}},
        {"pack_dtype": "torch.int16"},
        {"pack_dtype": "int32", "dynamic": {".*down_proj": {"pack_dtype": "int16"}}},
    ],
)
def test_every_place_that_names_the_type(tmp_path: Path, said: dict[str, Any]) -> None:
    spec = QuantSpec(4, 32)
    tensors = brute_module(random_affine(spec, 32, 64), 4, torch.int16)
    assert Checkpoint(write_folder(tmp_path, tensors, config_of(spec, **said))).conflicts == ()


@pytest.mark.parametrize(
    ("said", "claim"),
    [
        ({}, "int32 by base config"),
        ({"pack_dtype": "int16"}, "int16 by base config"),
        ({"dynamic": {".*down_proj": {"pack_dtype": "int64"}}}, "int64 by .*down_proj"),
    ],
)
def test_the_tensors_win_and_the_config_is_named(
    tmp_path: Path, said: dict[str, Any], claim: str
) -> None:
    spec = QuantSpec(4, 32)
    weight = random_affine(spec, 32, 64)
    tensors = brute_module(weight, 4, torch.int8)
    checkpoint = Checkpoint(write_folder(tmp_path, tensors, config_of(spec, **said)))
    (conflict,) = checkpoint.conflicts
    assert f"pack_dtype: {claim}, but the words on disk are int8" in str(conflict)
    assert torch.equal(checkpoint.dequantize(MODULE), weight.dequantized)


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_widths_that_no_tool_packs_so_are_refused(tmp_path: Path, bits: int) -> None:
    spec = QuantSpec(bits, 32)
    tensors = brute_module(random_affine(spec, 32, 64), bits, torch.int16)
    with pytest.raises(UnsupportedError, match=rf"{bits} bits in words of torch\.int16; legal are"):
        Checkpoint(write_folder(tmp_path, tensors, config_of(spec)))


def test_words_of_two_types_in_one_module_are_refused(tmp_path: Path) -> None:
    spec = QuantSpec(4, 32)
    weight = random_affine(spec, 32, 64)
    tensors = brute_module(weight, 4, torch.int16)
    tensors[f"{MODULE}.qzeros"] = brute_module(weight, 4)[f"{MODULE}.qzeros"]
    with pytest.raises(TensorError, match=r"qzeros .*torch\.int32 .*legal is 2-D of torch\.int16"):
        Checkpoint(write_folder(tmp_path, tensors, config_of(spec)))


def test_an_unknown_type_is_named(tmp_path: Path) -> None:
    spec = QuantSpec(4, 32)
    tensors = brute_module(random_affine(spec, 32, 64), 4)
    folder = write_folder(tmp_path, tensors, config_of(spec, pack_dtype="float16"))
    with pytest.raises(ConfigError, match="pack_dtype is 'float16'; legal is int8, int16"):
        Checkpoint(folder)
