"""The bit law: packing is invertible, and the words are those that GPTQ writers produce."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from terrazzo.packing import (
    QuantTensor,
    decode_qweight,
    decode_zeros,
    dequantize,
    encode_qweight,
    encode_zeros,
    is_planar,
    pack,
    sequential_groups,
    unpack,
)
from terrazzo.spec import Format, QuantSpec, words_for

BITS = st.sampled_from([2, 3, 4, 5, 6, 7, 8])
CONTINUOUS_BITS = st.sampled_from([2, 3, 4, 8])
SEEDS = st.integers(0, 2**32 - 1)


def random_codes(rows: int, columns: int, bits: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, generator=generator)


def stream_words(codes: list[int], bits: int) -> list[int]:
    """Brute force: one big LSB-first integer, cut into signed 32-bit words."""
    stream = sum(code << (index * bits) for index, code in enumerate(codes))
    words = []
    for word in range(words_for(len(codes), bits)):
        unsigned = (stream >> (32 * word)) & 0xFFFFFFFF
        words.append(unsigned - (1 << 32) if unsigned >= 1 << 31 else unsigned)
    return words


@given(BITS, st.integers(1, 100), st.integers(1, 5), SEEDS)
def test_words_are_the_lsb_first_stream(bits: int, rows: int, columns: int, seed: int) -> None:
    codes = random_codes(rows, columns, bits, seed)
    expected = [stream_words(codes[:, n].tolist(), bits) for n in range(columns)]
    assert pack(codes, bits).T.tolist() == expected


@given(BITS, st.integers(1, 100), st.integers(1, 5), SEEDS)
def test_unpack_inverts_pack(bits: int, rows: int, columns: int, seed: int) -> None:
    codes = random_codes(rows, columns, bits, seed)
    assert torch.equal(unpack(pack(codes, bits), rows, bits), codes)


@given(BITS, st.integers(1, 4), st.integers(1, 5), SEEDS)
def test_planar_qweight_round_trip(bits: int, blocks: int, columns: int, seed: int) -> None:
    codes = random_codes(32 * blocks, columns, bits, seed)
    words = encode_qweight(codes, bits, Format.GPTQ_P)
    assert words.shape == (words_for(32 * blocks, bits), columns)
    assert torch.equal(decode_qweight(words, 32 * blocks, bits, Format.GPTQ_P), codes)


@given(st.sampled_from([2, 4, 8]), SEEDS)
def test_planar_equals_continuous_where_one_plane_suffices(bits: int, seed: int) -> None:
    codes = random_codes(64, 3, bits, seed)
    assert not is_planar(bits, Format.GPTQ_P)
    assert torch.equal(encode_qweight(codes, bits, Format.GPTQ_P), pack(codes, bits))


def test_planar_five_bits_word_by_word() -> None:
    codes = torch.arange(32, dtype=torch.uint8).unsqueeze(1)
    words = [word & 0xFFFFFFFF for word in encode_qweight(codes, 5, Format.GPTQ_P)[:, 0].tolist()]
    low_plane = [0x76543210, 0xFEDCBA98, 0x76543210, 0xFEDCBA98]
    high_plane = [0xFFFF0000]
    assert words == low_plane + high_plane


@given(CONTINUOUS_BITS, st.sampled_from(list(Format)), st.integers(1, 4), st.integers(1, 3), SEEDS)
def test_zeros_round_trip(
    bits: int, checkpoint_format: Format, groups: int, blocks: int, seed: int
) -> None:
    zeros = random_codes(groups, 32 * blocks, bits, seed)
    words = encode_zeros(zeros, bits, checkpoint_format)
    assert words.shape == (groups, words_for(32 * blocks, bits))
    assert torch.equal(decode_zeros(words, 32 * blocks, bits, checkpoint_format), zeros)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 70), SEEDS)
def test_v1_zeros_survive_a_tail_that_does_not_fill_its_word(
    bits: int, out_features: int, seed: int
) -> None:
    zeros = random_codes(2, out_features, bits, seed)
    words = encode_zeros(zeros, bits, Format.GPTQ)
    assert torch.equal(decode_zeros(words, out_features, bits, Format.GPTQ), zeros)


def test_v1_zero_words_borrow_across_fields() -> None:
    zeros = torch.tensor([[0, 5, 9, 15, 8, 8, 8, 8]], dtype=torch.uint8)
    assert encode_zeros(zeros, 4, Format.GPTQ).item() & 0xFFFFFFFF == 0x7777E83F


def test_symmetric_zero_words_are_the_constants_that_writers_store() -> None:
    def words(bits: int, checkpoint_format: Format) -> list[str]:
        zeros = torch.full((1, 32), 1 << (bits - 1), dtype=torch.uint8)
        packed = encode_zeros(zeros, bits, checkpoint_format)[0].tolist()
        return sorted({f"{word & 0xFFFFFFFF:08X}" for word in packed})

    assert words(2, Format.GPTQ) == ["55555555"]
    assert words(4, Format.GPTQ) == ["77777777"]
    assert words(8, Format.GPTQ) == ["7F7F7F7F"]
    assert words(3, Format.GPTQ) == ["6DB6DB6D", "B6DB6DB6", "DB6DB6DB"]
    assert words(3, Format.GPTQ_V2) == ["24924924", "49249249", "92492492"]
    assert words(3, Format.GPTQ_P) == ["00000000", "FFFFFFFF"]
    assert words(4, Format.GPTQ_V2) == ["88888888"]


@given(BITS, st.integers(1, 40), st.integers(1, 12), st.integers(1, 4), SEEDS)
def test_dequantize_is_the_affine_formula(
    bits: int, in_features: int, out_features: int, group: int, seed: int
) -> None:
    spec = QuantSpec(bits=bits, group_size=group)
    codes = random_codes(in_features, out_features, bits, seed)
    zeros = random_codes(spec.num_groups(in_features), out_features, bits, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(zeros.shape, generator=generator).to(torch.float16)
    order = torch.randperm(in_features, generator=generator)
    g_idx = sequential_groups(in_features, group)[order]
    weight = dequantize(QuantTensor(spec, pack(codes, bits), scales, zeros, g_idx))
    for n in range(out_features):
        for k in range(in_features):
            g = g_idx[k]
            expected = scales[g, n].double() * (int(codes[k, n]) - int(zeros[g, n]))
            assert weight[n, k].double() == expected
