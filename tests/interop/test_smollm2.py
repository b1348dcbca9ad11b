"""A real model in both directions: TERRAZZO_SMOLLM2 names a Hugging Face folder of SmolLM2-135M."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.witness import Witness, exact_logits, quantize_with_gptqmodel
from terrazzo import Checkpoint, QuantSpec, RuleSet, quantize
from terrazzo.engine.tokenizer import Tokenizer
from terrazzo.quantization.options import CalibrationOptions

FOLDER = os.environ.get("TERRAZZO_SMOLLM2", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER, reason="TERRAZZO_SMOLLM2 names no model folder"),
]

LOGIT_TOLERANCE = 1e-4
DYNAMIC = {
    "+:^model\\.layers\\.([0-3]|2[6-9])\\.mlp\\.down_proj$": {"bits": 8, "group_size": 64},
    "-:.*\\.(?:5|[[:digit:]]7)\\.self_attn\\.o_proj": {},
    "+:.*\\.v_proj": {"bits": 8, "group_size": 32, "sym": False},
    "+:^lm_head$": {"bits": 8, "group_size": 64},
}
PROMPT = (
    "The river rose in the night. By morning the lower meadows had gone under, and the herons "
    "stood along the new shore as if it had always been there."
)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a head of its own: GPTQModel quantizes no head that is tied."""
    folder = tmp_path_factory.mktemp("smollm2") / "untied"
    shutil.copytree(FOLDER, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def assert_same_model(folder: Path) -> None:
    token_ids = Tokenizer(folder).encode(PROMPT)
    witness, checkpoint = Witness(folder), Checkpoint(folder)
    assert checkpoint.conflicts == ()
    weights = witness.dequantized()
    assert set(weights) == set(checkpoint.plan.quantized)
    for name, weight in weights.items():
        assert torch.equal(checkpoint.dequantize(name), weight), name
    expected = witness.logits(token_ids)
    difference = (exact_logits(folder, token_ids) - expected).abs().max()
    assert difference <= LOGIT_TOLERANCE * expected.abs().max()


def test_terrazzo_writes_and_gptqmodel_reads(tmp_path: Path) -> None:
    quantize(
        FOLDER,
        tmp_path / "quantized",
        rules=RuleSet.parse(DYNAMIC, QuantSpec(4, 128), lm_head=True),
        calibration=CalibrationOptions(num_tokens=512, sequence_length=128),
    )
    assert_same_model(tmp_path / "quantized")


def test_gptqmodel_writes_and_terrazzo_reads(untied: Path, tmp_path: Path) -> None:
    token_ids = list(Tokenizer(untied).encode(PROMPT))
    folder = quantize_with_gptqmodel(
        untied,
        tmp_path / "quantized",
        [token_ids] * 8,
        bits=4,
        group_size=128,
        lm_head=True,
        dynamic=DYNAMIC,
    )
    assert_same_model(folder)
