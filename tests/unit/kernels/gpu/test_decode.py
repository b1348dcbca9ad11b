"""The products of a card's kernels against float64, on an emulated card."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from helpers.emulated_card import COMPILER, EmulatedCard
from helpers.quant_tensors import random_quant_tensor, uneven_quant_tensor
from terrazzo.kernels.gpu.decode import DecodeProduct, Epilogue, LaunchPlan, plan, shared_bytes
from terrazzo.kernels.gpu.records import Records, dense_records, quantized_records
from terrazzo.packing import QuantTensor, dequantize
from terrazzo.spec import QuantSpec

pytestmark = pytest.mark.skipif(COMPILER is None, reason="the emulator needs g++")

CPU = torch.device("cpu")
NO_BIAS = torch.empty(0)
FLOATS = (torch.bfloat16, torch.float16)
SPECS = [
    QuantSpec(bits, group, sym)
    for bits, (group, sym) in zip(
        itertools.cycle(range(2, 9)),
        itertools.product((128, 64, 32, 16, -1), (True, False)),
        strict=False,
    )
] + [QuantSpec(bits, 64, sym) for bits in range(2, 9) for sym in (True, False)]


@pytest.fixture(scope="module")
def card(tmp_path_factory: pytest.TempPathFactory) -> EmulatedCard:
    return EmulatedCard(tmp_path_factory.mktemp("kernels"))


def random_rows(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(dtype)


def product(x_MK: Tensor, weight: QuantTensor) -> Tensor:
    return x_MK.double() @ dequantize(weight).double().T


def assert_near(y_MN: Tensor, expected_MN: Tensor, tolerance: float = 1e-6) -> None:
    assert (y_MN.double() - expected_MN).norm() <= tolerance * expected_MN.norm()


def poisoned(rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((rows, columns), float("nan"), dtype=dtype)


def launch_plans(shape_of: DecodeProduct, rows: int) -> list[LaunchPlan]:
    """The one that would be chosen, and others with slices and short rings."""
    shape = shape_of.shape(rows)
    cuts = ((1, 1, 2), (2, 3, 3), (3, 2, 5))
    return [plan(shape, num_sms=2)] + [LaunchPlan(*c, shared_bytes(shape, *c)) for c in cuts]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("rows", [1, 7, 16])
def test_every_kind_side_by_side_in_one_launch(
    card: EmulatedCard, dtype: torch.dtype, rows: int
) -> None:
    weights = [random_quant_tensor(spec, 40, 392, seed) for seed, spec in enumerate(SPECS)]
    dense_NK = random_rows(24, 392, dtype)
    shards = [quantized_records(weight, CPU) for weight in weights]
    decode = DecodeProduct(card, [*shards, dense_records(dense_NK, dtype, CPU)], dtype, NO_BIAS)
    x_MK = random_rows(rows, 392, dtype)
    expected_MN = torch.cat(
        [product(x_MK, weight) for weight in weights] + [x_MK.double() @ dense_NK.double().T], dim=1
    )
    for launch in launch_plans(decode, rows):
        y_MN = poisoned(rows, 40 * len(weights) + 24)
        decode.run(x_MK, y_MN, launch)
        for start in range(0, expected_MN.shape[1], 40):
            assert_near(y_MN[:, start : start + 40], expected_MN[:, start : start + 40])


@pytest.mark.parametrize("bits", range(2, 9))
def test_act_order_and_groups_that_no_block_divides(card: EmulatedCard, bits: int) -> None:
    for weight in (
        random_quant_tensor(QuantSpec(bits, 32, desc_act=True), 32, 200),
        random_quant_tensor(QuantSpec(bits, 40), 32, 200),
        uneven_quant_tensor(QuantSpec(bits, 64, desc_act=True), 32, 200),
    ):
        decode = DecodeProduct(card, [quantized_records(weight, CPU)], torch.bfloat16, NO_BIAS)
        x_MK, y_MN = random_rows(3, 200, torch.bfloat16), poisoned(3, 32)
        decode(x_MK, y_MN)
        assert_near(y_MN, product(x_MK, weight))


@pytest.mark.parametrize("epilogue", [Epilogue.SILU, Epilogue.GELU])
@pytest.mark.parametrize("rows", [2, 12])
def test_gate_and_up_of_different_widths(card: EmulatedCard, epilogue: Epilogue, rows: int) -> None:
    gate, up = (random_quant_tensor(QuantSpec(*spec), 72, 256) for spec in ((4, 128), (3, 64)))
    shards = [quantized_records(each, CPU) for each in (gate, up)]
    bias_N = random_rows(1, 144, torch.float32)[0]
    decode = DecodeProduct(card, shards, torch.bfloat16, bias_N, epilogue)
    x_MK = random_rows(rows, 256, torch.bfloat16)
    sums_MN = torch.cat([product(x_MK, gate), product(x_MK, up)], dim=1) + bias_N
    gate_MN, up_MN = sums_MN.chunk(2, dim=1)
    activated = (
        torch.nn.functional.silu(gate_MN)
        if epilogue is Epilogue.SILU
        else torch.nn.functional.gelu(gate_MN, approximate="tanh")
    )
    for launch in launch_plans(decode, rows):
        y_MN = poisoned(rows, 72, torch.bfloat16)
        decode.run(x_MK, y_MN, launch)
        assert_near(y_MN, activated * up_MN, tolerance=4e-3)


def test_rows_and_columns_of_larger_tensors(card: EmulatedCard) -> None:
    """An odd stride takes the path that copies value by value."""
    weight = random_quant_tensor(QuantSpec(4, 128), 24, 256)
    decode = DecodeProduct(card, [quantized_records(weight, CPU)], torch.float16, NO_BIAS)
    for stride in (264, 301):
        x_MK = random_rows(3, stride, torch.float16)[:, :256]
        y_MN = poisoned(3, 64)
        decode(x_MK, y_MN[:, 8:32])
        assert_near(y_MN[:, 8:32], product(x_MK, weight))
        assert y_MN[:, :8].isnan().all()
        assert y_MN[:, 32:].isnan().all()


def test_a_row_does_not_depend_on_its_neighbours(card: EmulatedCard) -> None:
    weight = random_quant_tensor(QuantSpec(4, 128), 32, 384)
    decode = DecodeProduct(card, [quantized_records(weight, CPU)], torch.bfloat16, NO_BIAS)
    x_MK, alone_MN, together_MN = (
        random_rows(8, 384, torch.bfloat16),
        poisoned(8, 32),
        poisoned(8, 32),
    )
    decode(x_MK, together_MN)
    for row in range(8):
        decode(x_MK[row : row + 1], alone_MN[row : row + 1])
    assert torch.equal(alone_MN, together_MN)


def test_bytes_of_a_record_are_those_of_its_kind() -> None:
    for spec in SPECS:
        records: Records = quantized_records(random_quant_tensor(spec, 20, 300), CPU)
        assert records.data.shape == (2, 3, records.kind.num_bytes)
