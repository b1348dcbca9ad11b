"""Logits of real checkpoints, against the values of the tool that quantized them."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.models.loader import load
from terrazzo.nn.attention import CausalContext

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.safetensors"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_logits_are_the_golden_ones(folder: str) -> None:
    with safe_open(GOLDEN / folder / "golden.safetensors", framework="pt") as golden:
        ids, expected = golden.get_tensor("input_ids"), golden.get_tensor("logits")
    decoder = load(Checkpoint(GOLDEN / folder))
    hidden = decoder(ids.flatten(), CausalContext(*ids.shape))
    actual = decoder.logits(hidden).view_as(expected)
    assert float((actual - expected).abs().max() / expected.abs().max()) <= 1e-4


def test_all_golden_folders_are_here() -> None:
    assert len(FOLDERS) >= 30
