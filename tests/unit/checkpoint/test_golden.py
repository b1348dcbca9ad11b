"""Checkpoints of the real GPTQModel: the same weights bit for bit, the same decisions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.rules import resolve
from terrazzo.spec import DENSE, QuantSpec

GOLDEN = Path(__file__).parents[2] / "golden"
FOLDERS = sorted(path.parent.name for path in GOLDEN.glob("*/golden.json"))
CONFLICTS = {
    "wild-g_idx-permuted-flag-false": "desc_act",
    "wild-v2-zeros-labelled-gptq": "checkpoint_format",
    "wild-w3-old-zero-words": "checkpoint_format",
}


def golden_modules(folder: str) -> dict[str, dict[str, Any]]:
    modules: dict[str, dict[str, Any]] = json.loads((GOLDEN / folder / "golden.json").read_text())[
        "modules"
    ]
    return modules


def test_the_golden_folders_are_here() -> None:
    assert len(FOLDERS) == 30


@pytest.mark.parametrize("folder", FOLDERS)
def test_weights_are_equal_bit_for_bit(folder: str) -> None:
    checkpoint = Checkpoint(GOLDEN / folder)
    for name, golden in golden_modules(folder).items():
        weight = checkpoint.dequantize(name)
        assert weight.shape == (golden["out_features"], golden["in_features"])
        digest = hashlib.sha256(weight.numpy().tobytes()).hexdigest()
        assert digest == golden["dequant_sha256"], name


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_plan_holds_the_facts(folder: str) -> None:
    plan = Checkpoint(GOLDEN / folder).plan
    expected = {
        name: QuantSpec(
            golden["bits"],
            golden["group_size"],
            golden["sym"],
            desc_act=not golden["g_idx_is_sequential"],
        )
        for name, golden in golden_modules(folder).items()
    }
    assert plan.quantized == expected


@pytest.mark.parametrize("folder", [name for name in FOLDERS if not name.startswith("wild-")])
def test_rules_resolve_as_in_gptqmodel(folder: str) -> None:
    golden = golden_modules(folder)
    plan = resolve(Checkpoint(GOLDEN / folder).rules, golden)
    resolved = {name: module["resolved"] for name, module in golden.items()}
    assert plan.quantized == {name: QuantSpec(**spec) for name, spec in resolved.items()}


@pytest.mark.parametrize("folder", FOLDERS)
def test_dense_linears_are_dense(folder: str) -> None:
    golden = json.loads((GOLDEN / folder / "golden.json").read_text())
    plan = Checkpoint(GOLDEN / folder).plan
    held = [name for name in golden.get("dense_linears", {}) if name in plan]
    assert all(plan[name].spec is DENSE for name in held)


@pytest.mark.parametrize("folder", FOLDERS)
def test_only_the_folders_made_to_disagree_have_conflicts(folder: str) -> None:
    fields = {conflict.field for conflict in Checkpoint(GOLDEN / folder).conflicts}
    assert fields == ({CONFLICTS[folder]} if folder in CONFLICTS else set())


def test_sorted_rules_are_remarked_and_the_separate_file_decides() -> None:
    checkpoint = Checkpoint(GOLDEN / "wild-sorted-rules")
    (remark,) = checkpoint.remarks
    assert "another order in config.json than in quantize_config.json" in remark
    up = checkpoint.plan["model.layers.0.mlp.up_proj"]
    assert up.spec == QuantSpec(8, 32)
    assert str(up.decided_by) == r"^model\.layers\.0\.mlp\.up_proj$"
