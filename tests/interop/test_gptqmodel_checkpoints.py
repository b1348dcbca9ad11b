"""What GPTQModel writes is read here with the same bits: specs, weights, logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gptqmodel import QuantizeConfig
from gptqmodel.quantization.config import dynamic_get

from helpers.witness import (
    TOKENS,
    Witness,
    exact_logits,
    quantize_with_gptqmodel,
    write_tiny_model,
)
from terrazzo import Checkpoint
from terrazzo.rules import layer_relative

LOGIT_TOLERANCE = 1e-4
"""Largest difference over the largest logit: both sides compute in float32."""


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    config: Mapping[str, Any]
    architecture: str = "llama"
    tied: bool = False


CASES = [
    Case(
        "mixed",
        {
            "bits": 4,
            "group_size": 32,
            "lm_head": True,
            "dynamic": {
                "+:.*down_proj": {"bits": 8, "group_size": 64},
                "-:.*layers\\.1\\.self_attn\\.o_proj": {},
                "+:.*v_proj": {"bits": 8, "group_size": 16, "sym": False},
            },
        },
    ),
    Case(
        "shards_disagree",
        {
            "bits": 4,
            "group_size": 32,
            "dynamic": {
                "+:.*q_proj": {"bits": 8},
                "-:.*k_proj": {},
                "+:.*v_proj": {"bits": 2, "group_size": 16, "sym": False},
                "+:.*gate_proj": {"desc_act": True},
            },
        },
    ),
    Case(
        "act_order",
        {
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "desc_act": True,
            "act_group_aware": False,
            "dynamic": {"+:.*layers\\.0\\.mlp": {"desc_act": False, "sym": True}},
        },
    ),
    Case(
        "three_bit_v2",
        {
            "bits": 3,
            "group_size": 32,
            "sym": False,
            "format": "gptq_v2",
            "dynamic": {"+:.*mlp\\.": {"bits": 2, "group_size": 16}, ".*o_proj": {"bits": 8}},
        },
    ),
    Case(
        "planar",
        {
            "bits": 4,
            "group_size": 32,
            "dynamic": {
                "+:.*q_proj": {"bits": 3},
                "+:.*up_proj": {"bits": 5, "sym": False},
                "+:.*down_proj": {"bits": 6},
                "+:.*v_proj": {"bits": 7, "sym": False},
            },
        },
    ),
    Case(
        "words_of_int8",
        {
            "bits": 4,
            "group_size": 32,
            "sym": False,
            "pack_dtype": "int8",
            "pack_impl": "original",
            "dynamic": {
                "+:.*q_proj": {"bits": 2, "group_size": 16},
                "+:.*down_proj": {"bits": 8, "sym": True},
            },
        },
    ),
    Case(
        "words_of_int16_v2",
        {
            "bits": 2,
            "group_size": 32,
            "sym": False,
            "format": "gptq_v2",
            "pack_dtype": "int16",
            "pack_impl": "original",
            "dynamic": {"+:.*mlp": {"bits": 8, "desc_act": True}, ".*o_proj": {"bits": 4}},
        },
    ),
    Case(
        "channelwise_qwen3_tied",
        {"bits": 8, "group_size": -1, "act_group_aware": False},
        architecture="qwen3",
        tied=True,
    ),
    Case(
        "relative_negative_qwen2",
        {
            "bits": 4,
            "group_size": 64,
            "sym": False,
            "dynamic": {"-:self_attn\\.[qk]": {}, "+:.*0\\.mlp": {}, ".*mlp": {"bits": 8}},
        },
        architecture="qwen2",
    ),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    parameter = request.param
    assert isinstance(parameter, Case)
    return parameter


@pytest.fixture(scope="module")
def folder(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp(case.name)
    dense = write_tiny_model(work / "dense", case.architecture, tie_word_embeddings=case.tied)
    return quantize_with_gptqmodel(dense, work / "quantized", **case.config)


@pytest.fixture(scope="module")
def witness(folder: Path) -> Witness:
    return Witness(folder)


def test_dequantized_weights_are_equal_to_the_bit(folder: Path, witness: Witness) -> None:
    checkpoint = Checkpoint(folder)
    expected = witness.dequantized()
    assert set(checkpoint.plan.quantized) == set(expected)
    for name, weight in expected.items():
        assert torch.equal(checkpoint.dequantize(name), weight), name


def test_logits_agree(folder: Path, witness: Witness) -> None:
    expected = witness.logits(TOKENS)
    difference = (exact_logits(folder, TOKENS) - expected).abs().max()
    assert difference <= LOGIT_TOLERANCE * expected.abs().max()


def test_tensors_confirm_the_rules(case: Case, folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert checkpoint.conflicts == ()
    config = QuantizeConfig.from_pretrained(str(folder))
    for name, resolution in checkpoint.plan.items():
        relative = layer_relative(name)
        negative = False in (dynamic_get(config.dynamic, n) for n in (name, relative))
        if negative or (name == "lm_head" and not config.lm_head):
            assert name in checkpoint.plan.dense
            continue
        spec = checkpoint.plan.quantized[name]
        assert spec.bits == dynamic_get(config.dynamic, name, "bits", config.bits), resolution
        group = dynamic_get(config.dynamic, name, "group_size", config.group_size)
        in_features = checkpoint.quant_tensor(name).in_features
        assert spec.group_of(in_features) == (in_features if group == -1 else group), resolution
