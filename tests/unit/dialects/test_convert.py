"""Conversion keeps every weight to the bit, and its result is what the engine loads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoints import packed_module, random_affine
from helpers.dialects import HIDDEN, INNER, fabricate, shapes
from terrazzo import LLM
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.dialects.convert import Conversion, convert
from terrazzo.dialects.engines import ENGINES, engine_named
from terrazzo.dialects.prediction import Outcome
from terrazzo.dialects.subject import Subject
from terrazzo.errors import ConfigError, UnsupportedError
from terrazzo.rules import RuleSet
from terrazzo.spec import DENSE, Format, QuantSpec

GOLDEN = Path(__file__).parents[2] / "golden"
BASE = QuantSpec(4, 64)
TOKENS = [3, 7, 1, 9, 4]

CONVERTIBLE = {
    "vllm": {
        "llama-w3-g32-planar-asym",
        "llama-w3-g64-asym-v1",
        "llama-w4-g32-asym-v2",
        "llama-w4-g32-desc_act-static",
        "llama-w5-g32-planar",
        "mistral-w8-g256",
        "qwen2-w2-g32-sym",
        "qwen3-mixed-2-to-8",
        "wild-autogptq-style",
        "wild-desc_act-flag-sequential-g_idx",
        "wild-w3-old-zero-words",
    },
    "sglang": {"mistral-w8-g256", "llama-w4-g128-sym"},
    "gptqmodel": {
        "llama-rules-shards",
        "qwen3_moe-rules",
        "wild-autogptq-style",
        "wild-g_idx-permuted-flag-false",
        "wild-sorted-rules",
        "wild-v2-zeros-labelled-gptq",
        "wild-w3-old-zero-words",
    },
    "transformers": {
        "llama-rules-positive-negative",
        "llama-rules-shards",
        "llama-w3-g32-planar-asym",
        "llama-w5-g32-planar",
        "qwen3-mixed-2-to-8",
        "wild-v2-zeros-labelled-gptq",
    },
}
PAIRS = [(engine, folder) for engine, folders in CONVERTIBLE.items() for folder in sorted(folders)]


def converted(folder: Path, out: Path, engine: str) -> Conversion:
    """Converts, and holds the result to every promise that does not depend on folding."""
    conversion = convert(folder, out, engine_named(engine))
    old, new = Checkpoint(folder), Checkpoint(out)
    assert set(old.plan) == set(new.plan)
    assert all(torch.equal(old.dequantize(name), new.dequantize(name)) for name in old.plan)
    assert new.conflicts == ()
    assert new.remarks == ()
    assert ENGINES[engine].predict(Subject.of(new)).outcome is Outcome.LOADS
    return conversion


@pytest.mark.parametrize(("engine", "folder"), PAIRS)
def test_golden_folders_convert_to_the_bit(engine: str, folder: str, tmp_path: Path) -> None:
    conversion = converted(GOLDEN / folder, tmp_path / "out", engine)
    assert conversion.after.outcome is Outcome.LOADS
    assert (tmp_path / "out" / "config.json").is_file()


@pytest.mark.parametrize(
    "dynamic",
    [
        {r".*\.(q|k|v)_proj": {"group_size": 32}},
        {r".*q_proj": {"bits": 8}, r".*k_proj": {"bits": 2}},
        {r".*v_proj": {"bits": 3, "sym": False}, r".*gate": {"bits": 6}},
        {r"-:self_attn.o_proj": {}, r"-:.*\.1\.mlp\.down_proj": {}},
        {r".*gate_proj": {"group_size": 256}, r".*o_proj": {"group_size": -1}},
        {r".*\.0\..*": {"bits": 8}, r"-:.*\.1\.self_attn\.(q|k|v)_proj": {}},
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_mixed_shards_become_equal(
    engine: str, dynamic: dict[str, dict[str, object]], tmp_path: Path
) -> None:
    planar = any(rule.get("bits") == 6 for rule in dynamic.values())
    label = Format.GPTQ_P if planar else Format.GPTQ
    folder = fabricate(tmp_path / "in", dynamic, named=shapes(2), checkpoint_format=label)
    conversion = converted(folder, tmp_path / "out", engine)
    assert conversion.changes


def test_rules_name_shards_and_fusions_and_stay_apart(tmp_path: Path) -> None:
    dynamic: dict[str, dict[str, object]] = {
        r"-:.*\.0\.self_attn\.o_proj": {},
        r"+:.*self_attn.*": {"group_size": 32},
        r".*\.1\.mlp\.(gate|up)": {"bits": 8},
    }
    folder = fabricate(tmp_path / "in", dynamic, named=shapes(2))
    converted(folder, tmp_path / "out", "vllm")
    fields = json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    rules = RuleSet.parse(fields["dynamic"], BASE)
    for name in (
        *shapes(2),
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.0.self_attn.qkv_proj",
    ):
        assert sum(rule.matches(name) for rule in rules.rules) <= 1
    fused = rules.resolve_name("model.layers.0.self_attn.qkv_proj")
    assert fused.spec == rules.resolve_name("model.layers.0.self_attn.q_proj").spec
    assert rules.resolve_name("model.layers.0.self_attn.o_proj").spec is DENSE


def test_a_short_last_group_is_cut_to_divide(tmp_path: Path) -> None:
    """704 inputs in groups of 128 and 192 in groups of 128: cut to 64, the scales repeated."""
    named = {**shapes(1), "model.layers.0.mlp.down_proj": (HIDDEN, 704)}
    named["model.layers.0.self_attn.o_proj"] = (HIDDEN, 192)
    folder = fabricate(tmp_path / "in", {}, QuantSpec(4, 128), named)
    conversion = converted(folder, tmp_path / "out", "vllm")
    assert conversion.before.outcome is Outcome.REFUSES
    plan = Checkpoint(tmp_path / "out").plan
    assert plan["model.layers.0.mlp.down_proj"].spec == QuantSpec(4, 64)
    assert plan["model.layers.0.self_attn.o_proj"].spec == QuantSpec(4, 64)


def test_zero_points_that_fit_cost_no_width(tmp_path: Path) -> None:
    """4-bit codes that stay within seven of their zero points need no eighth bit."""
    spec, name = QuantSpec(4, 64, sym=False), "model.layers.0.self_attn.o_proj"
    weight = random_affine(spec, HIDDEN, HIDDEN)
    near = replace(weight, zeros=torch.full_like(weight.zeros, 7), codes=weight.codes.clamp(max=14))
    folder = fabricate(tmp_path / "in", {}, spec)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {**tensors, **packed_module(near, 4, Format.GPTQ, name)}, folder / "model.safetensors"
    )
    converted(folder, tmp_path / "out", "vllm")
    plan = Checkpoint(tmp_path / "out").plan
    assert plan[name].spec == QuantSpec(4, 64)
    assert plan["model.layers.0.mlp.up_proj"].spec == QuantSpec(8, 64)


def test_act_order_of_down_proj_is_folded_into_gate_and_up(tmp_path: Path) -> None:
    source = GOLDEN / "llama-rules-shield-flags"
    conversion = convert(source, tmp_path / "out", engine_named("vllm"))
    assert any("folded into gate_proj and up_proj" in change for change in conversion.changes)
    old, new = Checkpoint(source), Checkpoint(tmp_path / "out")
    down = "model.layers.2.mlp.down_proj"
    assert old.plan.quantized[down].desc_act
    assert not new.plan.quantized[down].desc_act
    order = torch.argsort(old.quant_tensor(down).g_idx, stable=True)
    assert torch.equal(new.dequantize(down), old.dequantize(down)[:, order])
    for maker in ("gate_proj", "up_proj"):
        name = f"model.layers.2.mlp.{maker}"
        assert torch.equal(new.dequantize(name), old.dequantize(name)[order])


def test_folding_changes_no_logit(tmp_path: Path) -> None:
    source = GOLDEN / "llama-rules-shield-flags"
    convert(source, tmp_path / "out", engine_named("vllm"))
    old, new = LLM(source).logits(TOKENS), LLM(tmp_path / "out").logits(TOKENS)
    assert float((old - new).abs().max() / old.abs().max()) < 1e-5


def test_dense_gate_and_up_take_a_fold_too(tmp_path: Path) -> None:
    dynamic: dict[str, dict[str, object]] = {
        r"-:.*mlp\.(gate|up)_proj": {},
        r".*down_proj": {"desc_act": True},
    }
    folder = fabricate(tmp_path / "in", dynamic)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.bias"] = torch.arange(INNER).half()
    save_file(tensors, folder / "model.safetensors")
    convert(folder, tmp_path / "out", engine_named("vllm"))
    down = Checkpoint(folder).quant_tensor("model.layers.0.mlp.down_proj")
    order = torch.argsort(down.g_idx, stable=True)
    new = Checkpoint(tmp_path / "out")
    for suffix in ("gate_proj.weight", "up_proj.weight", "up_proj.bias"):
        name = f"model.layers.0.mlp.{suffix}"
        assert torch.equal(new.tensor(name), tensors[name][order])


@pytest.mark.parametrize(
    ("engine", "dynamic", "base", "reason"),
    [
        ("vllm", {"-:.*v_proj": {}}, BASE, "q_proj.*v_proj: some are dense"),
        ("vllm", {".*o_proj": {"desc_act": True}}, BASE, "o_proj: its groups are in the order"),
        ("vllm", {".*q_proj": {"desc_act": True}}, BASE, "can be folded .* only for down_proj"),
        ("vllm", {".*up_proj": {"group_size": 16}}, BASE, "up_proj: no group size .* divides 16"),
        ("vllm", {".*up_proj": {"bits": 8, "sym": False}}, BASE, "no width .* holds its codes"),
        ("sglang", {".*q_proj": {"desc_act": True}}, BASE, "keeps one g_idx"),
        (
            "transformers",
            {".*q_proj": {"desc_act": True, "group_size": 32}},
            BASE,
            r"groups of 32, 64 in the order",
        ),
        ("gptqmodel", {}, QuantSpec(4, 96, desc_act=True), "groups of 96 in the order"),
    ],
)
def test_what_cannot_be_written_is_listed_with_its_reason(
    engine: str,
    dynamic: dict[str, dict[str, object]],
    base: QuantSpec,
    reason: str,
    tmp_path: Path,
) -> None:
    folder = fabricate(tmp_path / "in", dynamic, base)
    with pytest.raises(UnsupportedError, match=reason):
        convert(folder, tmp_path / "out", engine_named(engine))
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    with pytest.raises(ConfigError, match="already there"):
        convert(GOLDEN / "llama-w4-g128-sym", tmp_path / "out", engine_named("vllm"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_experts_of_a_layer_become_equal(tmp_path: Path) -> None:
    dynamic: dict[str, dict[str, object]] = {r".*experts\.1\.down_proj": {"bits": 8}}
    folder = fabricate(tmp_path / "in", dynamic, named=shapes(1, experts=2), base=BASE)
    converted(folder, tmp_path / "out", "vllm")
    converted(folder, tmp_path / "out2", "sglang")


def test_a_converted_folder_keeps_the_rest(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "in", {})
    (folder / "tokenizer.json").write_text("{}")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(4)}, folder / "model.safetensors")
    converted(folder, tmp_path / "out", "vllm")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"
    assert torch.equal(Checkpoint(tmp_path / "out").tensor("model.norm.weight"), torch.ones(4))
