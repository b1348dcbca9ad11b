"""`inspect` tells what serving would do, module by module, and never more than it knows."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from terrazzo import LLM, cli
from terrazzo.inspection.inspection import Serving, Unservable, inspect
from terrazzo.inspection.render import to_json, to_text
from terrazzo.kernels.machine import why_not_native
from terrazzo.spec import DENSE, QuantSpec

GOLDEN = Path(__file__).parents[2] / "golden"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = GOLDEN / "llama-rules-positive-negative"
    ignored = shutil.ignore_patterns("golden.*")
    return Path(shutil.copytree(source, tmp_path / "model", ignore=ignored))


def test_every_module_has_its_facts_rule_and_kernel(folder: Path) -> None:
    inspection = inspect(folder)
    lines = {line.name: line for line in inspection.modules}
    assert len(lines) == 22
    down = lines["model.layers.1.mlp.down_proj"]
    assert isinstance(down.spec, QuantSpec)
    assert down.shape == (64, 128)
    chosen = "torch_dequantized" if why_not_native() else "native_int8"
    assert down.kernel == chosen
    assert {verdict.kernel for verdict in down.verdicts} >= {"torch_dequantized", "torch_reference"}
    assert lines["lm_head"].kernel == ("torch_dense" if why_not_native() else "native_dense_int8")
    assert lines["lm_head"].decided_by == "lm_head: false"
    assert "matches no module" in inspection.remarks[0]


def test_bytes_add_up_to_the_file(folder: Path) -> None:
    inspection = inspect(folder)
    tensors = load_file(folder / "model.safetensors")
    assert inspection.total_bytes == sum(tensor.nbytes for tensor in tensors.values())
    linears = [
        name
        for name in tensors
        if name.rpartition(".")[0] in {line.name for line in inspection.modules}
    ]
    weights = sum(line.shape[0] * line.shape[1] for line in inspection.modules)
    assert inspection.bits_per_weight == pytest.approx(
        8 * sum(tensors[name].nbytes for name in linears) / weights
    )


def test_the_memory_plan_is_that_of_serving(folder: Path) -> None:
    outcome = inspect(folder).outcome
    assert isinstance(outcome, Serving)
    served = LLM(folder).memory_plan
    assert outcome.memory.needs == served.needs
    assert outcome.memory.limits.max_model_len == served.limits.max_model_len


def test_every_expert_has_a_line_with_what_decided_it() -> None:
    inspection = inspect(GOLDEN / "qwen3_moe-rules")
    assert inspection.is_servable
    lines = {line.name.removeprefix("model.layers."): line for line in inspection.modules}
    assert len(lines) == 35
    assert lines["0.mlp.experts.1.down_proj"].spec == QuantSpec(8, 32)
    assert "experts" in lines["0.mlp.experts.1.down_proj"].decided_by
    assert lines["0.mlp.experts.0.gate_proj"].spec == QuantSpec(4, 16, sym=False)
    assert {lines[f"1.mlp.experts.3.{each}_proj"].spec for each in ("gate", "down")} == {DENSE}
    assert lines["0.mlp.gate"].shape == (4, 64)
    assert all(line.verdicts for line in inspection.modules)


def test_an_unknown_architecture_is_described_and_unservable(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "mixtral-w4-g32", folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["JambaForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    inspection = inspect(folder)
    assert isinstance(inspection.outcome, Unservable)
    assert "JambaForCausalLM" in inspection.outcome.reason
    assert len(inspection.modules) == 35


def test_a_missing_tensor_is_unservable(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    outcome = inspect(folder).outcome
    assert isinstance(outcome, Unservable)
    assert "model.norm.weight: missing" in outcome.reason


def test_conflicts_are_shown() -> None:
    inspection = inspect(GOLDEN / "wild-v2-zeros-labelled-gptq")
    assert len(inspection.conflicts) == 14
    assert "conflicts (14)" in to_text(inspection)


@pytest.mark.parametrize(
    "name", ["llama-w3-g32-sym", "wild-g_idx-permuted-flag-false", "mixtral-w4-g32"]
)
def test_text_and_json_tell_the_same(name: str) -> None:
    inspection = inspect(GOLDEN / name)
    text, data = to_text(inspection), to_json(inspection)
    assert json.loads(json.dumps(data)) == data
    assert data["servable"] == inspection.is_servable
    assert data["conflicts"] == list(inspection.conflicts)
    for module in data["modules"]:
        assert module["name"] in text
    assert ("unservable:" in text) is not data["servable"]


def test_the_command_prints_json_and_its_status_says_whether_it_can_be_served(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["inspect", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["servable"] is True
    (folder / "config.json").write_text('{"architectures": ["JambaForCausalLM"]}')
    assert cli.run(["inspect", str(folder)]) == 1
    assert "unservable: " in capsys.readouterr().out
