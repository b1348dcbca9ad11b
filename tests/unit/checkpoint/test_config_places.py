"""Where a quantization config may stand, and the list that leaves modules out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.checkpoints import Configs, packed_module, random_affine, write_folder
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import ConfigError
from terrazzo.rules import BASE, NO_CONFIG
from terrazzo.spec import DENSE, QuantSpec

SPEC = QuantSpec(4, 32)
FIELDS = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
LAYER = "model.layers.0"
UP, OUT = f"{LAYER}.mlp.up_proj", f"{LAYER}.self_attn.o_proj"


def tensors_of(*dense: str, packed: tuple[str, ...] = (UP,)) -> dict[str, Tensor]:
    tensors = {f"{name}.weight": torch.ones(32, 64) for name in dense}
    for name in packed:
        tensors |= packed_module(random_affine(SPEC, 32, 64), 4, module=name)
    return tensors


def opened(folder: Path, tensors: dict[str, Tensor], model: dict[str, Any]) -> Checkpoint:
    return Checkpoint(write_folder(folder, tensors, Configs(model=model)))


def test_the_config_of_a_text_tower_counts(tmp_path: Path) -> None:
    model = {"model_type": "tower", "text_config": {"quantization_config": {**FIELDS, "bits": 8}}}
    checkpoint = opened(tmp_path, tensors_of(), model)
    (conflict,) = checkpoint.conflicts
    assert "bits: 8 by base config, but the tensors hold 4" in str(conflict)


def test_the_outer_config_comes_first(tmp_path: Path) -> None:
    inner = {"quantization_config": {**FIELDS, "bits": 8}}
    model = {"text_config": inner, "quantization_config": FIELDS}
    checkpoint = opened(tmp_path, tensors_of(), model)
    assert checkpoint.conflicts == ()
    assert checkpoint.plan[UP].decided_by == BASE


@pytest.mark.parametrize("text_config", [{}, None, "text", {"quantization_config": None}])
def test_a_text_tower_without_config_says_nothing(tmp_path: Path, text_config: object) -> None:
    checkpoint = opened(tmp_path, tensors_of(), {"text_config": text_config})
    assert checkpoint.plan[UP].decided_by == NO_CONFIG


def test_a_malformed_inner_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="quantization_config is 4; legal is an object"):
        opened(tmp_path, tensors_of(), {"text_config": {"quantization_config": 4}})


LISTS = [["mlp.up_proj"], [["mlp.up_proj", "mlp.gate_proj"]], [UP], ["self_attn.k_proj", "up_proj"]]


@pytest.mark.parametrize("listed", LISTS)
def test_a_list_of_quantized_modules_leaves_the_others_dense(
    tmp_path: Path, listed: list[Any]
) -> None:
    fields = {**FIELDS, "modules_in_block_to_quantize": listed}
    checkpoint = opened(tmp_path, tensors_of(OUT), {"quantization_config": fields})
    assert checkpoint.conflicts == ()
    assert checkpoint.plan[OUT].spec == DENSE
    assert str(checkpoint.plan[OUT].decided_by) == "modules_in_block_to_quantize"
    assert checkpoint.plan[UP].decided_by == BASE


def test_rules_and_the_switch_of_the_head_are_heard_before_the_list(tmp_path: Path) -> None:
    fields = {
        **FIELDS,
        "lm_head": True,
        "dynamic": {".*o_proj": {"bits": 4}, "-:.*gate_proj": {}},
        "modules_in_block_to_quantize": ["mlp.up_proj"],
    }
    gate = f"{LAYER}.mlp.gate_proj"
    tensors = tensors_of(gate, packed=(UP, OUT, "lm_head"))
    checkpoint = opened(tmp_path, tensors, {"quantization_config": fields})
    assert checkpoint.conflicts == ()
    assert str(checkpoint.plan[OUT].decided_by) == ".*o_proj"
    assert str(checkpoint.plan[gate].decided_by) == "-:.*gate_proj"
    assert checkpoint.plan["lm_head"].decided_by == BASE


def test_a_list_that_leaves_out_a_quantized_module_is_a_conflict(tmp_path: Path) -> None:
    fields = {**FIELDS, "modules_in_block_to_quantize": ["mlp.up_proj"]}
    tensors = tensors_of(packed=(UP, OUT))
    (conflict,) = opened(tmp_path, tensors, {"quantization_config": fields}).conflicts
    assert "dense by modules_in_block_to_quantize, but 4-bit g32 sym on disk" in str(conflict)


@pytest.mark.parametrize("value", [3, [3], [["a", None]]])
def test_a_malformed_list_is_named(tmp_path: Path, value: object) -> None:
    fields = {**FIELDS, "modules_in_block_to_quantize": value}
    with pytest.raises(ConfigError, match="modules_in_block_to_quantize is"):
        opened(tmp_path, tensors_of(), {"quantization_config": fields})


def test_inputs_that_another_tool_would_round_are_remarked(tmp_path: Path) -> None:
    fields = {**FIELDS, "activation": "w4afp8"}
    checkpoint = opened(tmp_path, tensors_of(), {"quantization_config": fields})
    (remark,) = checkpoint.remarks
    assert "activation is 'w4afp8', which rounds the inputs of linears" in remark
    assert checkpoint.conflicts == ()
