"""Checkpoints of the real GPTQModel mean here what they mean there, to the bit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from terrazzo.checkpoint.checkpoint import Checkpoint

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDERS = sorted(path.parent for path in GOLDEN.glob("*/golden.json"))
UNDISPUTED = [folder for folder in FOLDERS if not folder.name.startswith("wild-")]

every_folder = pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)


def modules_of(folder: Path) -> dict[str, dict[str, Any]]:
    modules = json.loads((folder / "golden.json").read_text())["modules"]
    assert isinstance(modules, dict)
    return modules


def test_the_folders_are_here() -> None:
    assert len(FOLDERS) >= 27


@every_folder
def test_weights_are_equal_to_the_bit(folder: Path) -> None:
    checkpoint, modules = Checkpoint(folder), modules_of(folder)
    assert set(checkpoint.plan.quantized) == set(modules)
    for name, module in modules.items():
        weight_NK = checkpoint.dequantize(name)
        assert tuple(weight_NK.shape) == (module["out_features"], module["in_features"])
        digest = hashlib.sha256(weight_NK.numpy().tobytes()).hexdigest()
        assert digest == module["dequant_sha256"], name


@every_folder
def test_the_plan_is_what_the_module_was_quantized_with(folder: Path) -> None:
    plan = Checkpoint(folder).plan.quantized
    for name, module in modules_of(folder).items():
        spec = plan[name]
        assert (spec.bits, spec.group_size) == (module["bits"], module["group_size"]), name
        assert spec.sym == module["sym"], name
        assert spec.desc_act != module["g_idx_is_sequential"], name


@every_folder
def test_zero_points_have_the_range_that_gptqmodel_saw(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    for name, module in modules_of(folder).items():
        zeros = checkpoint.quant_tensor(name).zeros
        assert int(zeros.min()) == module["true_zero_min"], name
        assert int(zeros.max()) == module["true_zero_max"], name


@pytest.mark.parametrize("folder", UNDISPUTED, ids=lambda folder: folder.name)
def test_gptqmodel_contradicts_itself_nowhere(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    assert [str(conflict) for conflict in checkpoint.conflicts] == []
    assert checkpoint.remarks == ()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("wild-g_idx-permuted-flag-false", "desc_act"),
        ("wild-v2-zeros-labelled-gptq", "checkpoint_format"),
        ("wild-w3-old-zero-words", "checkpoint_format"),
    ],
)
def test_wrong_labels_are_reported(name: str, field: str) -> None:
    conflicts = Checkpoint(GOLDEN / name).conflicts
    assert {conflict.field for conflict in conflicts} == {field}


def test_the_order_in_quantize_config_wins_and_the_other_is_reported() -> None:
    checkpoint = Checkpoint(GOLDEN / "wild-sorted-rules")
    assert checkpoint.conflicts == ()
    (remark,) = checkpoint.remarks
    assert "another order in config.json" in remark


def test_a_dense_linear_names_the_rule_that_left_it_dense() -> None:
    plan = Checkpoint(GOLDEN / "llama-rules-shards").plan
    assert plan.dense
    rules = {str(plan[name].decided_by) for name in plan.dense if name != "lm_head"}
    assert all(rule.startswith("-:") for rule in rules)
