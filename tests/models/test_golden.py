"""Logits of real checkpoints, against the values of the tool that quantized them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import UnsupportedError
from terrazzo.models.loader import load
from terrazzo.nn.attention import CausalContext

GOLDEN = Path(__file__).parents[1] / "golden"
NO_DECODER = ("mixtral-w4-g32", "qwen3_moe-rules")
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))


@pytest.mark.parametrize("folder", [name for name in FOLDERS if name not in NO_DECODER])
def test_logits_are_the_golden_ones(folder: str) -> None:
    with safe_open(GOLDEN / folder / "golden.safetensors", framework="pt") as golden:
        ids, expected = golden.get_tensor("input_ids"), golden.get_tensor("logits")
    decoder = load(Checkpoint(GOLDEN / folder))
    hidden = decoder(ids.flatten(), CausalContext(*ids.shape))
    actual = decoder.logits(hidden).view_as(expected)
    assert float((actual - expected).abs().max() / expected.abs().max()) <= 1e-4


@pytest.mark.parametrize("folder", NO_DECODER)
def test_an_architecture_without_decoder_is_refused_by_name(folder: str) -> None:
    with pytest.raises(UnsupportedError, match=r"config\.json: architecture '\w+ForCausalLM'"):
        load(Checkpoint(GOLDEN / folder))


def test_all_golden_folders_are_here() -> None:
    assert len(FOLDERS) >= 30
    assert set(NO_DECODER) <= set(FOLDERS)
