"""Public bug reports on what words mean: zero points, widths, order, scales.

As in test_public_reports.py: predicted where they are of another engine, and shown not to be here.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from helpers.dialects import fabricate, outcome
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.dialects.engines import ENGINES
from terrazzo.dialects.prediction import Outcome
from terrazzo.dialects.subject import Subject
from terrazzo.packing import decode_zeros, encode_zeros
from terrazzo.spec import Format, QuantSpec, packed_shapes

GOLDEN = Path(__file__).parents[2] / "golden"
LOADS, WRONG = Outcome.LOADS, Outcome.SILENTLY_WRONG
Q = "model.layers.0.self_attn.q_proj"


def test_vllm_38966_true_zero_points_under_the_label_of_v1() -> None:
    folder = GOLDEN / "wild-v2-zeros-labelled-gptq"
    checkpoint = Checkpoint(folder)
    assert {c.field for c in checkpoint.conflicts} == {"checkpoint_format"}
    name = next(iter(checkpoint.plan.quantized))
    assert set(checkpoint.quant_tensor(name).zeros.flatten().tolist()) == {8}
    subject = Subject.of(checkpoint)
    assert (outcome("vllm", subject), outcome("gptqmodel", subject)) == (LOADS, WRONG)


@pytest.mark.parametrize("bits", [2, 4])
def test_vllm_26092_26343_v2_is_not_v1(bits: int, tmp_path: Path) -> None:
    spec = QuantSpec(bits, 64, sym=False)
    weights = {
        label: Checkpoint(fabricate(tmp_path / label.value, {}, spec, checkpoint_format=label))
        for label in (Format.GPTQ, Format.GPTQ_V2)
    }
    old, new = weights[Format.GPTQ], weights[Format.GPTQ_V2]
    assert not torch.equal(old.tensor(f"{Q}.qzeros"), new.tensor(f"{Q}.qzeros"))
    assert torch.equal(old.dequantize(Q), new.dequantize(Q))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_autogptq_325_559_640_gptqmodel_2350_2351_a_zero_point_of_zero(bits: int) -> None:
    """Minus one borrows from the next field; decoding undoes it, and 0 is neither 16 nor 15."""
    zeros = torch.tensor([[0, 3, 0, 0, 1, 2, 0, 3] * 4], dtype=torch.uint8)
    words = encode_zeros(zeros, bits, Format.GPTQ)
    assert torch.equal(decode_zeros(words, 32, bits, Format.GPTQ), zeros)


def test_gptqmodel_2763_1218_1278_1280_1863_2984_2985_three_bits() -> None:
    """Words of releases with exchanged constants, and sizes that round up."""
    checkpoint = Checkpoint(GOLDEN / "wild-w3-old-zero-words")
    name = next(iter(checkpoint.plan.quantized))
    assert set(checkpoint.quant_tensor(name).zeros.flatten().tolist()) == {4}
    assert packed_shapes(QuantSpec(3, 64), 96, 160).qweight == (15, 96)
    assert outcome("gptqmodel", Subject.of(checkpoint)) is WRONG


def test_vllm_48148_54809_g_idx_counts_whatever_the_flag_says() -> None:
    checkpoint = Checkpoint(GOLDEN / "wild-g_idx-permuted-flag-false")
    assert {c.field for c in checkpoint.conflicts} == {"desc_act"}
    assert all(spec.desc_act for spec in checkpoint.plan.quantized.values())
    assert outcome("vllm", Subject.of(checkpoint)) is WRONG


def test_sglang_36822_scales_stay_float16(tmp_path: Path) -> None:
    """A bfloat16 model has float16 scales; casting them would lose three bits."""
    folder = fabricate(tmp_path / "in", {})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    checkpoint = Checkpoint(folder)
    scales = checkpoint.quant_tensor(Q).scales
    assert scales.dtype == torch.float16
    assert torch.equal(scales, checkpoint.tensor(f"{Q}.scales"))


def test_gptqmodel_2824_symmetric_v1_and_v2_are_one(tmp_path: Path) -> None:
    folders = [
        fabricate(tmp_path / label.value, {}, checkpoint_format=label)
        for label in (Format.GPTQ, Format.GPTQ_V2)
    ]
    old, new = (Checkpoint(folder) for folder in folders)
    assert all(
        torch.equal(old.dequantize(name), new.dequantize(name)) for name in old.plan.quantized
    )
    for engine in ENGINES.values():
        assert engine.predict(Subject.of(new)).outcome is LOADS
