"""Public bug reports about GPTQ checkpoints with rules, one test each, named by tracker and number.

Where a report is about another engine, its behaviour is predicted; where Terrazzo could have the
same fault, it is shown not to. docs/compatibility.md lists all of them.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import packed_module, random_affine
from helpers.dialects import BASE, HIDDEN, fabricate, outcome, predict, reasons, shapes, written
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.dialects.convert import convert
from terrazzo.dialects.engines import ENGINES, engine_named
from terrazzo.dialects.prediction import Outcome
from terrazzo.dialects.subject import Subject
from terrazzo.rules import RuleSet, resolve
from terrazzo.spec import DENSE, QuantSpec

GOLDEN = Path(__file__).parents[2] / "golden"
LOADS, REFUSES, WRONG = Outcome.LOADS, Outcome.REFUSES, Outcome.SILENTLY_WRONG
QKV = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
EXPERT = "model.layers.0.mlp.experts.1.up_proj"
ONE_DENSE_EXPERT = {r"-:.*experts\.1\.up_proj": {}}


def moe(
    tmp_path: Path, dynamic: dict[str, dict[str, object]], base: QuantSpec = BASE
) -> Checkpoint:
    return Checkpoint(fabricate(tmp_path / "moe", dynamic, base, shapes(1, experts=2)))


def loads_after_conversion(folder: Path, engine: str) -> bool:
    out = folder.parent / f"for-{engine}"
    convert(folder, out, engine_named(engine))
    return ENGINES[engine].predict(Subject.of(Checkpoint(out))).outcome is LOADS


def test_gptqmodel_1455_vllm_7086_experts_are_decided_one_by_one(tmp_path: Path) -> None:
    checkpoint = moe(tmp_path, ONE_DENSE_EXPERT)
    assert checkpoint.plan[EXPERT].spec is DENSE
    assert checkpoint.conflicts == ()
    assert "KeyError" in reasons("vllm", Subject.of(checkpoint))[EXPERT]


def test_gptqmodel_1485_vllm_15665_a_rule_for_one_of_q_k_v(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "in", {".*q_proj": {"bits": 8}})
    found = reasons("vllm", Subject.of(Checkpoint(folder)))
    assert set(found) == set(QKV)
    assert "AssertionError on shapes: q_proj has 8 bits on disk, 4 by config" in found[QKV[0]]
    assert loads_after_conversion(folder, "vllm")


def test_vllm_50214_rules_on_shards_of_a_fused_name(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "in", {r".*\.(q|k|v)_proj": {"group_size": 32}})
    checkpoint = Checkpoint(folder)
    assert {checkpoint.plan[name].spec for name in QKV} == {QuantSpec(4, 32)}
    assert "asked for 'model.layers.0.self_attn.qkv_proj'" in str(
        predict("vllm", Subject.of(checkpoint))
    )
    assert loads_after_conversion(folder, "vllm")
    assert loads_after_conversion(folder, "sglang")


def test_vllm_19395_a_rule_for_experts(tmp_path: Path) -> None:
    checkpoint = moe(tmp_path, {r".*\.mlp\.experts": {"bits": 8}})
    assert checkpoint.plan[EXPERT].spec == QuantSpec(8, 128)
    assert outcome("vllm", Subject.of(checkpoint)) is LOADS
    assert outcome("sglang", Subject.of(checkpoint)) is REFUSES
    assert loads_after_conversion(checkpoint.folder, "sglang")


def test_vllm_42022_41955_26953_26558_other_bits_in_experts_of_a_fallback() -> None:
    """Sizes that Marlin lacks: the fallback takes the base config and none of the rules."""
    named = {k: (n, 192 if inner == HIDDEN else inner) for k, (n, inner) in shapes(1, 1).items()}
    subject = written({r".*\.experts": {"bits": 8}}, QuantSpec(4, 64), named)
    assert outcome("vllm", subject) is REFUSES
    widths = {resolution.spec for resolution in resolve(subject.rules, named).values()}
    assert QuantSpec(8, 64) in widths


def test_vllm_49539_39475_36954_28274_dense_experts_under_a_quantized_config(
    tmp_path: Path,
) -> None:
    """The config has no word on it: bf16 experts of a drafter, or of a whole model."""
    checkpoint = moe(tmp_path, {r"-:.*\.experts\..*": {}})
    (checkpoint.folder / "quantize_config.json").unlink()
    config = json.loads((checkpoint.folder / "config.json").read_text())
    config["quantization_config"]["dynamic"] = {}
    (checkpoint.folder / "config.json").write_text(json.dumps(config))
    silent = Checkpoint(checkpoint.folder)
    assert silent.plan[EXPERT].spec is DENSE
    assert {c.field for c in silent.conflicts} == {"quantized"}
    assert outcome("vllm", Subject.of(silent)) is REFUSES
    assert outcome("sglang", Subject.of(silent)) is WRONG


def test_gptqmodel_1680_a_few_experts_were_never_quantized(tmp_path: Path) -> None:
    checkpoint = moe(tmp_path, ONE_DENSE_EXPERT)
    weight = checkpoint.tensor(f"{EXPERT}.weight").float()
    assert torch.equal(checkpoint.dequantize(EXPERT), weight)
    assert len(checkpoint.plan.quantized) == len(checkpoint.plan) - 3


@pytest.mark.parametrize("key", [r"-:.*\.mlp\.down_proj", r"-:mlp\.down_proj"])
def test_gptqmodel_904_905_skipped_modules_stay_dense(key: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(fabricate(tmp_path / "in", {key: {}}))
    name = "model.layers.0.mlp.down_proj"
    assert checkpoint.plan[name].spec is DENSE
    assert checkpoint.dequantize(name).count_nonzero() > 0
    assert "built quantized" in reasons("transformers", Subject.of(checkpoint))[name]


def test_gptqmodel_2934_dense_by_full_name_not_by_suffix(tmp_path: Path) -> None:
    """A dense q_proj in layer 1 is no reason for one in layer 0, nor the other way round."""
    folder = fabricate(tmp_path / "in", {r"-:.*layers\.1\.self_attn": {}}, named=shapes(2))
    dense = Checkpoint(folder).plan.dense
    assert QKV[0] not in dense
    assert QKV[0].replace("0", "1") in dense


@pytest.mark.parametrize("flag", [True, False])
def test_sglang_35358_34904_28130_vllm_52543_a_quantized_head(flag: bool, tmp_path: Path) -> None:
    """The tensors decide; SGLang computes with an unset head where the flag is missing."""
    dynamic = {"lm_head": {"bits": 8, "group_size": 32}}
    folder = fabricate(tmp_path / "in", dynamic, lm_head=True)
    for file in ("config.json", "quantize_config.json"):
        text = (
            (folder / file)
            .read_text()
            .replace('"lm_head": true', f'"lm_head": {str(flag).lower()}')
        )
        (folder / file).write_text(text)
    checkpoint = Checkpoint(folder)
    assert checkpoint.plan["lm_head"].spec == QuantSpec(8, 32)
    assert outcome("sglang", Subject.of(checkpoint)) is (LOADS if flag else WRONG)
    assert loads_after_conversion(folder, "sglang")


def test_vllm_52715_tgi_1358_groups_of_whole_channels(tmp_path: Path) -> None:
    checkpoint = moe(tmp_path, {}, QuantSpec(4, -1))
    assert checkpoint.plan[EXPERT].spec == QuantSpec(4, -1)
    assert checkpoint.quant_tensor(EXPERT).num_groups == 1
    assert outcome("vllm", Subject.of(checkpoint)) is LOADS


@pytest.mark.parametrize("inner", [704, 448, 192, 896])
def test_vllm_51645_autoround_643_tgi_2639_groups_that_do_not_divide(
    inner: int, tmp_path: Path
) -> None:
    """The last group is short: its scales are one row more than rounding down allocates."""
    name = "model.layers.0.mlp.down_proj"
    folder = fabricate(tmp_path / "in", {}, named={**shapes(1), name: (HIDDEN, inner)})
    checkpoint = Checkpoint(folder)
    assert checkpoint.quant_tensor(name).num_groups == -(-inner // 128)
    assert checkpoint.conflicts == ()
    assert (outcome("vllm", Subject.of(checkpoint)) is LOADS) == (inner % 128 == 0)
    assert loads_after_conversion(folder, "vllm")


def test_vllm_10169_28663_25455_gptqmodel_2221_towers_without_an_ignore_list(
    tmp_path: Path,
) -> None:
    folder = fabricate(tmp_path / "in", {})
    tower = "model.visual.blocks.0.attn.qkv"
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, f"{tower}.weight": torch.ones(64, 64)}, folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    assert checkpoint.plan[tower].spec is DENSE
    assert checkpoint.conflicts == ()
    assert all(outcome(engine, Subject.of(checkpoint)) is LOADS for engine in ENGINES)


def test_vllm_43967_44072_a_list_of_names_that_are_fused_on_disk() -> None:
    """GLM keeps gate and up in one tensor; vLLM looks for its parts, and finds neither."""
    named = {"model.layers.0.mlp.gate_up_proj": (1024, HIDDEN)}
    subject = written({}, named=named)
    assert "no module or parameter named" in str(predict("vllm", subject))
    phi = replace(subject, architecture="Phi3ForCausalLM")
    assert outcome("vllm", phi) is LOADS
    assert outcome("transformers", subject) is LOADS


def test_vllm_22017_23994_autoround_586_a_quantized_router(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "in", {}, named=shapes(1, experts=2))
    name = "model.layers.0.mlp.gate"
    tensors = load_file(folder / "model.safetensors")
    del tensors[f"{name}.weight"]
    packed = packed_module(random_affine(BASE, 8, HIDDEN), 4, module=name)
    save_file({**tensors, **packed}, folder / "model.safetensors")
    checkpoint = Checkpoint(folder)
    assert checkpoint.plan[name].spec == BASE
    assert outcome("vllm", Subject.of(checkpoint)) is REFUSES


def test_vllm_40358_a_bias_goes_with_its_quantized_module(tmp_path: Path) -> None:
    checkpoint = moe(tmp_path, {})
    file = checkpoint.folder / "model.safetensors"
    save_file({**load_file(file), f"{EXPERT}.bias": torch.ones(512)}, file)
    out = tmp_path / "out"
    convert(checkpoint.folder, out, engine_named("gptqmodel"))
    assert torch.equal(Checkpoint(out).tensor(f"{EXPERT}.bias"), torch.ones(512))


def test_vllm_21802_autoround_names_its_own_method(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "in", {})
    text = (folder / "quantize_config.json").read_text()
    (folder / "quantize_config.json").write_text(text.replace('"gptq"', '"auto-round"', 1))
    checkpoint = Checkpoint(folder)
    assert checkpoint.plan.quantized == Checkpoint(fabricate(tmp_path / "plain", {})).plan.quantized


def test_gptqmodel_2987_thousands_of_literal_rules() -> None:
    """The first match decides, however many there are, and in a time that nobody notices."""
    names = [f"model.layers.{layer}.mlp.up_proj" for layer in range(600)]
    literal = {"^" + name.replace(".", r"\.") + "$": {"bits": 8} for name in names[1:]}
    rules = RuleSet.parse({**literal, ".*": {"bits": 3}, "^" + names[0]: {"bits": 2}}, BASE)
    start = time.perf_counter()
    plan = resolve(rules, names)
    assert time.perf_counter() - start < 5
    assert plan[names[0]].spec == replace(BASE, bits=3)
    assert {plan[name].spec for name in names[1:]} == {replace(BASE, bits=8)}


def test_optimum_1585_a_list_of_suffixes_leaves_modules_out() -> None:
    dynamic = {"-:.*self_attn": {}}
    subject = written(dynamic, named=shapes(1))
    assert outcome("transformers", subject) is WRONG
    kept = [["gate_proj", "up_proj"], ["mlp.down_proj"]]
    listed = written(dynamic, named=shapes(1), modules_in_block_to_quantize=kept)
    assert outcome("transformers", listed) is LOADS
