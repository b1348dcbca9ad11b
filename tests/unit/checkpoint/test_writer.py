"""What is written reads back as it was, in every format, and a failure leaves nothing behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.description import MANIFEST_FILE, Description
from terrazzo.checkpoint.writer import CheckpointWriter
from terrazzo.errors import ConfigError
from terrazzo.packing import QuantTensor, dequantize, pack, sequential_groups
from terrazzo.rules import RuleSet, resolve
from terrazzo.spec import Format, QuantSpec

MODULE = "model.layers.0.mlp.down_proj"


def random_weight(spec: QuantSpec, out_features: int, in_features: int, seed: int) -> QuantTensor:
    generator = torch.Generator().manual_seed(seed)

    def codes(rows: int) -> Tensor:
        size = (rows, out_features)
        return torch.randint(0, spec.max_code + 1, size, dtype=torch.uint8, generator=generator)

    groups = spec.num_groups(in_features)
    zeros = torch.full((groups, out_features), spec.mid_code, dtype=torch.uint8)
    g_idx = sequential_groups(in_features, spec.group_of(in_features))
    if spec.desc_act:
        g_idx = g_idx.flip(0).contiguous()
    return QuantTensor(
        spec,
        pack(codes(in_features), spec.bits),
        torch.randn((groups, out_features), generator=generator).to(torch.float16),
        zeros if spec.sym else codes(groups),
        g_idx,
    )


def write(out: Path, weight: QuantTensor, checkpoint_format: Format, **options: Any) -> RuleSet:
    rules = RuleSet.parse({"-:.*o_proj": {}, ".*down_proj": {"mse": 2.4}}, weight.spec)
    with CheckpointWriter(out, checkpoint_format, **options) as writer:
        writer.add_quantized(MODULE, weight)
        writer.add_tensor("model.norm.weight", torch.arange(4, dtype=torch.bfloat16))
        writer.commit(Description({"hidden_size": 4}, rules, resolve(rules, [MODULE])))
    return rules


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    bits=st.sampled_from([2, 3, 4, 5, 6, 7, 8]),
    group_size=st.sampled_from([-1, 16, 32, 40, 128]),
    sym=st.booleans(),
    desc_act=st.booleans(),
    checkpoint_format=st.sampled_from(list(Format)),
    seed=st.integers(0, 1000),
)
def test_every_spec_and_format_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    bits: int,
    group_size: int,
    sym: bool,
    desc_act: bool,
    checkpoint_format: Format,
    seed: int,
) -> None:
    spec = QuantSpec(bits, group_size, sym, desc_act and group_size != -1 and group_size < 96)
    weight = random_weight(spec, 64, 96, seed)
    out = tmp_path_factory.mktemp("written") / "model"
    rules = write(out, weight, checkpoint_format)
    checkpoint = Checkpoint(out)
    assert checkpoint.rules == rules
    assert checkpoint.plan[MODULE].spec == spec
    assert checkpoint.conflicts == ()
    assert torch.equal(checkpoint.dequantize(MODULE), dequantize(weight))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("out_features", "in_features"), [(5, 100), (33, 7), (1, 1)])
def test_odd_sizes_read_back(
    tmp_path: Path, bits: int, out_features: int, in_features: int
) -> None:
    weight = random_weight(QuantSpec(bits, 32, sym=False), out_features, in_features, seed=bits)
    write(tmp_path / "model", weight, Format.GPTQ)
    read = Checkpoint(tmp_path / "model").dequantize(MODULE)
    assert torch.equal(read, dequantize(weight))


def test_both_configs_have_every_spelling_and_the_order_of_rules(tmp_path: Path) -> None:
    out = tmp_path / "model"
    write(out, random_weight(QuantSpec(), 32, 128, 0), Format.GPTQ)
    separate = json.loads((out / "quantize_config.json").read_text())
    embedded = json.loads((out / "config.json").read_text())["quantization_config"]
    assert embedded == separate
    assert list(embedded["dynamic"]) == list(separate["dynamic"]) == ["-:.*o_proj", ".*down_proj"]
    assert separate["quant_method"] == separate["method"] == "gptq"
    assert separate["checkpoint_format"] == separate["format"] == "gptq"
    assert separate["pack_dtype"] == "int32"
    manifest = json.loads((out / MANIFEST_FILE).read_text())
    assert manifest["modules"][MODULE]["decided_by"] == ".*down_proj"


def test_shards_are_bounded_and_indexed(tmp_path: Path) -> None:
    out = tmp_path / "model"
    weight = random_weight(QuantSpec(), 32, 128, 0)
    write(out, weight, Format.GPTQ, shard_bytes=1000)
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert len(shards) > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == shards
    checkpoint = Checkpoint(out)
    assert torch.equal(checkpoint.dequantize(MODULE), dequantize(weight))
    assert checkpoint.tensor("model.norm.weight").dtype == torch.bfloat16
    total = sum(checkpoint.num_bytes(name) for name in checkpoint.tensor_names)
    assert index["metadata"]["total_size"] == total


def test_everybody_may_read_what_was_written(tmp_path: Path) -> None:
    out = tmp_path / "model"
    write(out, random_weight(QuantSpec(), 32, 128, 0), Format.GPTQ)
    modes = {file.name: file.stat().st_mode & 0o444 for file in (out, *out.iterdir())}
    assert set(modes.values()) == {0o444}, modes


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with CheckpointWriter(tmp_path / "model", Format.GPTQ, shard_bytes=1) as writer:
            writer.add_tensor("a", torch.zeros(2))
            writer.add_tensor("b", torch.zeros(2))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_taken_folder_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep me")
    with pytest.raises(ConfigError, match="already there"):
        CheckpointWriter(tmp_path, Format.GPTQ)
    assert (tmp_path / "precious").read_text() == "keep me"


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write(tmp_path / "model", random_weight(QuantSpec(), 32, 128, 0), Format.GPTQ)
    assert MODULE in Checkpoint(tmp_path / "model").plan


def test_files_go_along(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    rules = RuleSet()
    with CheckpointWriter(tmp_path / "model", Format.GPTQ) as writer:
        writer.add_tensor("model.norm.weight", torch.ones(1))
        writer.copy_file(tmp_path / "tokenizer.json")
        writer.commit(Description({}, rules, resolve(rules, [])))
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"


def test_tensors_may_share_memory_and_change_afterwards(tmp_path: Path) -> None:
    rules = RuleSet()
    shared = torch.zeros(3)
    with CheckpointWriter(tmp_path / "model", Format.GPTQ) as writer:
        writer.add_tensor("a.weight", shared)
        writer.add_tensor("b.weight", shared)
        shared.fill_(7)
        writer.commit(Description({}, rules, resolve(rules, [])))
    checkpoint = Checkpoint(tmp_path / "model")
    assert torch.equal(checkpoint.tensor("a.weight"), torch.zeros(3))
    assert torch.equal(checkpoint.tensor("b.weight"), torch.zeros(3))
