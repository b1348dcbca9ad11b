"""Damaged and foreign folders: one clear error each, nothing half-opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import (
    CheckpointError,
    ConfigError,
    MissingFileError,
    RuleError,
    TensorError,
    TerrazzoError,
    UnsupportedError,
)
from terrazzo.spec import QuantSpec

GOLDEN = Path(__file__).parents[2] / "golden" / "llama-w4-g128-sym"
MODULE = "model.layers.0.mlp.down_proj"
Tensors = dict[str, Tensor]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    ignored = shutil.ignore_patterns("golden.*")
    return Path(shutil.copytree(GOLDEN, tmp_path / "model", ignore=ignored))


def edit_tensors(folder: Path, edit: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def edit_json(file: Path, **fields: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def refusal(folder: Path, kind: type[TerrazzoError]) -> str:
    with pytest.raises(kind) as caught:
        Checkpoint(folder)
    assert type(caught.value) is kind
    return str(caught.value)


def test_a_missing_folder(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere", MissingFileError)


def test_a_folder_without_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "config.json: not there" in refusal(folder, MissingFileError)


@pytest.mark.parametrize("text", ["{", "[1, 2]", '"x"', "\x00", "{'bits': 4}"])
@pytest.mark.parametrize("file", ["config.json", "quantize_config.json"])
def test_malformed_json(folder: Path, file: str, text: str) -> None:
    (folder / file).write_text(text)
    assert file in refusal(folder, ConfigError)


def test_a_truncated_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    message = refusal(folder, CheckpointError)
    assert "model.safetensors" in message
    assert str(file.stat().st_size) in message


@pytest.mark.parametrize("content", [b"", b"\xff" * 64, b"\x08\x00\x00\x00\x00\x00\x00\x00{}"])
def test_a_file_that_is_no_safetensors(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    assert "not a whole safetensors file" in refusal(folder, CheckpointError)


def test_pickled_weights_are_never_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "pickled weights" in refusal(folder, UnsupportedError)


def test_no_weights_at_all(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no model.safetensors" in refusal(folder, MissingFileError)


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_a_missing_shard(folder: Path) -> None:
    write_index(folder, {"a": "model-00002-of-00002.safetensors"})
    assert "model-00002-of-00002.safetensors: not there" in refusal(folder, MissingFileError)


def test_an_index_that_promises_too_much(folder: Path) -> None:
    write_index(folder, {"a": "model-00001-of-00001.safetensors"})
    assert "lacks 1 tensors" in refusal(folder, CheckpointError)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/etc/passwd", "x/y.safetensors", 3])
def test_an_index_that_points_elsewhere(folder: Path, shard: object) -> None:
    write_index(folder, {"a": shard})
    assert "same folder" in refusal(folder, CheckpointError)


@pytest.mark.parametrize("weight_map", [None, [], {}])
def test_an_index_without_map(folder: Path, weight_map: object) -> None:
    write_index(folder, weight_map)
    assert "weight_map" in refusal(folder, CheckpointError)


@pytest.mark.parametrize("suffix", ["qzeros", "scales"])
def test_a_module_that_lacks_a_tensor(folder: Path, suffix: str) -> None:
    edit_tensors(folder, lambda tensors: tensors.pop(f"{MODULE}.{suffix}"))
    assert f"{MODULE}: has .qweight but no .{suffix}" in refusal(folder, TensorError)


@pytest.mark.parametrize(
    ("suffix", "replacement", "message"),
    [
        ("qweight", torch.zeros(7, 128, dtype=torch.int32), "no bit width fits"),
        ("qweight", torch.zeros(32, 64, dtype=torch.int32), "disagree"),
        ("qweight", torch.zeros(32, 128), "legal is 2-D"),
        ("qzeros", torch.zeros(2, 3, dtype=torch.int32), "no bit width fits"),
        ("qzeros", torch.zeros(1, 16, dtype=torch.int32), "disagree"),
        ("scales", torch.ones(2, 128, dtype=torch.int32), "legal is 2-D"),
        ("g_idx", torch.zeros(256, dtype=torch.int32), "does not number"),
        ("g_idx", torch.full((256,), 9, dtype=torch.int32), "does not number"),
        ("g_idx", torch.full((256,), -9, dtype=torch.int32), "does not number"),
        ("g_idx", torch.zeros(256), "legal is 1-D"),
    ],
)
def test_tensors_that_contradict_each_other(
    folder: Path, suffix: str, replacement: Tensor, message: str
) -> None:
    edit_tensors(folder, lambda tensors: tensors.update({f"{MODULE}.{suffix}": replacement}))
    refused = refusal(folder, TensorError)
    assert MODULE in refused
    assert message in refused


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"bits": "many"}, ConfigError, "bits is 'many'"),
        ({"bits": 12}, ConfigError, "bits is 12"),
        ({"group_size": 0}, ConfigError, "group_size is 0"),
        ({"sym": "yes"}, ConfigError, "sym is 'yes'"),
        ({"dynamic": []}, ConfigError, "dynamic is"),
        ({"dynamic": {"(": {}}}, RuleError, "not a PCRE2 pattern"),
        ({"dynamic": {".*": 4}}, RuleError, "its value is 4"),
        ({"quant_method": "awq"}, UnsupportedError, "quant_method is 'awq'"),
        ({"format": "marlin"}, UnsupportedError, "marlin format"),
        ({"format": "bitblas"}, UnsupportedError, "bitblas format"),
        ({"format": "exl2"}, UnsupportedError, "checkpoint_format is 'exl2'"),
        ({"is_marlin_format": True}, UnsupportedError, "marlin format"),
        ({"pack_dtype": "float"}, ConfigError, "pack_dtype is 'float'"),
    ],
)
def test_illegal_and_foreign_configs_name_the_field(
    folder: Path, fields: dict[str, Any], kind: type[TerrazzoError], message: str
) -> None:
    edit_json(folder / "quantize_config.json", **fields)
    refused = refusal(folder, kind)
    assert message in refused
    assert "quantize_config.json" in refused


@pytest.mark.parametrize(
    "spelling",
    [
        {"w_bit": 4, "q_group_size": 128, "zero_point": False},
        {"wbits": "4", "group_size": "128", "sym": True, "checkpoint_format": "gptq"},
        {"bits": 4, "group_size": 128, "format": "gptq", "checkpoint_format": "gptq_v2"},
        {"bits": 4, "group_size": 128, "is_marlin_format": False, "method": "GPTQ"},
    ],
)
def test_every_spelling_of_the_same_config(folder: Path, spelling: dict[str, Any]) -> None:
    (folder / "quantize_config.json").write_text(json.dumps(spelling))
    edit_json(folder / "config.json", quantization_config=None)
    checkpoint = Checkpoint(folder)
    assert checkpoint.rules == Checkpoint(GOLDEN).rules
    assert checkpoint.plan.quantized == Checkpoint(GOLDEN).plan.quantized
    assert checkpoint.conflicts == ()


def test_files_that_disagree_are_remarked(folder: Path) -> None:
    edit_json(folder / "quantize_config.json", group_size=64)
    (remark,) = Checkpoint(folder).remarks
    assert "group_size is 64 in quantize_config.json and 128 in config.json" in remark


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"bits": 8}, "bits: 8 by base config, but the tensors hold 4"),
        ({"group_size": 64}, "group_size: 64 by base config, but the tensors hold 128"),
        (
            {"dynamic": {"-:.*down_proj": {}}},
            "quantized: dense by -:.*down_proj, but 4-bit g128 sym on disk",
        ),
    ],
)
def test_a_config_that_disagrees_with_the_tensors_loses_aloud(
    folder: Path, fields: dict[str, Any], said: str
) -> None:
    edit_json(folder / "quantize_config.json", **fields)
    checkpoint = Checkpoint(folder)
    assert checkpoint.plan[MODULE].spec == QuantSpec(4, 128)
    messages = {conflict.module: str(conflict) for conflict in checkpoint.conflicts}
    assert said in messages[MODULE]
    assert "Using the tensors" in messages[MODULE]


def test_a_dense_module_that_should_be_quantized_is_a_conflict(folder: Path) -> None:
    def densify(tensors: Tensors) -> None:
        for suffix in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{MODULE}.{suffix}"]
        tensors[f"{MODULE}.weight"] = torch.zeros(128, 256)

    edit_tensors(folder, densify)
    (conflict,) = Checkpoint(folder).conflicts
    assert (conflict.module, conflict.field) == (MODULE, "quantized")
    assert "dense on disk" in str(conflict)


def test_without_g_idx_groups_are_sequential(folder: Path) -> None:
    def forget(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("g_idx")]:
            del tensors[name]

    expected = {
        name: Checkpoint(GOLDEN).dequantize(name) for name in Checkpoint(GOLDEN).plan.quantized
    }
    edit_tensors(folder, forget)
    checkpoint = Checkpoint(folder)
    assert set(checkpoint.plan.quantized) == set(expected)
    assert all(torch.equal(checkpoint.dequantize(name), w) for name, w in expected.items())


def test_asking_for_what_is_not_there(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    with pytest.raises(TensorError, match="'nothing'"):
        checkpoint.tensor("nothing")
    with pytest.raises(TensorError, match="not quantized"):
        checkpoint.quant_tensor("lm_head")
    with pytest.raises(TensorError, match=r"nothing\.weight"):
        checkpoint.dequantize("nothing")
