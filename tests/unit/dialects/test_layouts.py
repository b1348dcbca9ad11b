"""Fused linears and experts, cut and joined as an engine wants them, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.dialects import HIDDEN, INNER, LAYER, fabricate, outcome, reasons, shapes
from terrazzo import LLM
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.dialects.convert import Conversion, convert
from terrazzo.dialects.engines import ENGINES, engine_named
from terrazzo.dialects.prediction import Outcome
from terrazzo.dialects.subject import Subject
from terrazzo.dialects.units import FUSIONS
from terrazzo.errors import UnsupportedError
from terrazzo.spec import DENSE, Name, QuantSpec

PHI3 = Path(__file__).parents[2] / "golden" / "wild-fused-on-disk-phi3"
BASE = QuantSpec(4, 64)
ATTENTION, MLP = "model.layers.0.self_attn", "model.layers.0.mlp"
GATE_UP, PARTS = f"{MLP}.gate_up_proj", (f"{MLP}.gate_proj", f"{MLP}.up_proj")
DOWN = f"{MLP}.down_proj"
EXPERT = (MLP + ".experts.{}.{}_proj").format
PROJECTIONS = ("gate", "up", "down")


def fused_shapes() -> dict[Name, tuple[int, int]]:
    """As GLM stores them."""
    attention = {f"{ATTENTION}.{c.rpartition('.')[2]}": shape for c, shape in LAYER.items()}
    return {**attention, GATE_UP: (2 * INNER, HIDDEN), DOWN: (HIDDEN, INNER)}


def as_architecture(folder: Path, architecture: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
    return folder


def converted(folder: Path, out: Path, engine: str) -> Conversion:
    """Converts; the result is what the engine loads, and every part keeps its value."""
    conversion = convert(folder, out, engine_named(engine))
    old, new = Checkpoint(folder), Checkpoint(out)
    assert new.conflicts == ()
    assert ENGINES[engine].predict(Subject.of(new)).outcome is Outcome.LOADS
    mine, theirs = by_parts(old), by_parts(new)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    return conversion


def by_parts(checkpoint: Checkpoint) -> dict[Name, torch.Tensor]:
    """float32 weights, those of gate and up apart, those of q, k and v together."""
    weights = {}
    for name in checkpoint.plan:
        weight_NK, (parent, _, leaf) = checkpoint.dequantize(name), name.rpartition(".")
        if leaf == "gate_up_proj":
            halves = zip(FUSIONS["gate_up_proj"], weight_NK.chunk(2), strict=True)
            weights |= {f"{parent}.{part}": half for part, half in halves}
        elif leaf == "q_proj":
            parts = [checkpoint.dequantize(f"{parent}.{part}") for part in FUSIONS["qkv_proj"]]
            weights[f"{parent}.qkv_proj"] = torch.cat(parts)
        elif leaf not in FUSIONS["qkv_proj"]:
            weights[name] = weight_NK
    return weights


def test_phi3_goes_to_gptqmodel_in_parts_and_back_to_one_module(tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    conversion = converted(PHI3, there, "gptqmodel")
    assert conversion.before.outcome is Outcome.REFUSES
    assert f"{GATE_UP}: cut into its parts" in conversion.changes
    assert set(PARTS) < set(Checkpoint(there).plan)
    assert f"{ATTENTION}.qkv_proj" in Checkpoint(there).plan
    conversion = converted(there, back, "vllm")
    assert f"{GATE_UP}: joined from gate_proj, up_proj" in conversion.changes
    assert list(Checkpoint(back).plan) == list(Checkpoint(PHI3).plan)
    stored, original = load_file(back / "model.safetensors"), load_file(PHI3 / "model.safetensors")
    assert all(torch.equal(stored[name], original[name]) for name in original)
    logits = LLM(PHI3).logits([3, 7, 1, 9, 4])
    for folder in (there, back):
        torch.testing.assert_close(LLM(folder).logits([3, 7, 1, 9, 4]), logits)


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_phi3_stays_as_it_is_where_it_is_one_module(engine: str, tmp_path: Path) -> None:
    conversion = converted(PHI3, tmp_path / "out", engine)
    assert not [change for change in conversion.changes if "_proj" in change]
    assert list(Checkpoint(tmp_path / "out").plan) == list(Checkpoint(PHI3).plan)


@pytest.mark.parametrize("engine", ["vllm", "gptqmodel"])
@pytest.mark.parametrize("dynamic", [{}, {".*gate_up": {"bits": 8}}, {"-:.*gate_up": {}}])
def test_glm_goes_in_parts(engine: str, dynamic: dict[str, object], tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "in", dynamic, BASE, fused_shapes())
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{GATE_UP}.bias"] = torch.arange(2 * INNER).half()
    save_file(tensors, folder / "model.safetensors")
    converted(as_architecture(folder, "GlmForCausalLM"), tmp_path / "out", engine)
    new = Checkpoint(tmp_path / "out")
    biases = [new.tensor(f"{part}.bias") for part in PARTS]
    assert torch.equal(torch.cat(biases), tensors[f"{GATE_UP}.bias"])
    assert GATE_UP not in new.plan


def test_glm_in_parts_is_one_module_again_for_transformers(tmp_path: Path) -> None:
    named = {**fused_shapes(), **dict.fromkeys(PARTS, (INNER, HIDDEN))}
    del named[GATE_UP]
    dynamic = {r".*up_proj": {"bits": 8}, r".*q_proj": {"group_size": 32}}
    folder = as_architecture(fabricate(tmp_path / "in", dynamic, BASE, named), "Glm4ForCausalLM")
    assert "one gate_up_proj" in reasons("transformers", Subject.of(Checkpoint(folder)))[PARTS[0]]
    converted(folder, tmp_path / "out", "transformers")
    assert Checkpoint(tmp_path / "out").plan[GATE_UP].spec == QuantSpec(8, 32)


def test_parts_that_differ_become_alike_before_they_are_joined(tmp_path: Path) -> None:
    dynamic = {r".*k_proj": {"bits": 8}, r".*v_proj": {"group_size": 32}, ".*up": {"bits": 2}}
    folder = fabricate(tmp_path / "in", dynamic, BASE, shapes(1))
    as_architecture(folder, "Phi3ForCausalLM")
    assert outcome("vllm", Subject.of(Checkpoint(folder))) is Outcome.REFUSES
    for engine, gate_up in (("vllm", GATE_UP), ("gptqmodel", PARTS[1])):
        converted(folder, tmp_path / engine, engine)
        plan = Checkpoint(tmp_path / engine).plan
        assert plan[f"{ATTENTION}.qkv_proj"].spec == QuantSpec(8, 32)
        assert gate_up in plan


def test_act_order_behind_a_fused_gate_and_up_is_folded_into_it(tmp_path: Path) -> None:
    dynamic = {r".*down_proj": {"desc_act": True}}
    folder = fabricate(tmp_path / "in", dynamic, BASE, fused_shapes())
    as_architecture(folder, "Phi3ForCausalLM")
    convert(folder, tmp_path / "out", engine_named("vllm"))
    old, new = Checkpoint(folder), Checkpoint(tmp_path / "out")
    order = torch.argsort(old.quant_tensor(DOWN).g_idx, stable=True)
    both = torch.cat([order, order + INNER])
    assert torch.equal(new.dequantize(GATE_UP), old.dequantize(GATE_UP)[both])
    assert torch.equal(new.dequantize(DOWN), old.dequantize(DOWN)[:, order])


@pytest.mark.parametrize(
    ("dynamic", "reason"),
    [
        ({"-:.*v_proj": {}}, "qkv_proj: some of its parts are dense"),
        ({".*q_proj": {"desc_act": True}}, "qkv_proj: .* different orders of activation"),
    ],
)
def test_parts_that_cannot_stand_side_by_side(
    dynamic: dict[str, object], reason: str, tmp_path: Path
) -> None:
    folder = fabricate(tmp_path / "in", dynamic, BASE, shapes(1))
    as_architecture(folder, "Phi3ForCausalLM")
    with pytest.raises(UnsupportedError, match=reason):
        convert(folder, tmp_path / "out", engine_named("gptqmodel"))


def test_a_bias_of_one_part_alone_cannot_be_joined(tmp_path: Path) -> None:
    folder = as_architecture(fabricate(tmp_path / "in", {}, BASE, shapes(1)), "Phi3ForCausalLM")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, f"{PARTS[1]}.bias": torch.ones(INNER)}, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match="gate_up_proj: some of its parts have a bias"):
        convert(folder, tmp_path / "out", engine_named("vllm"))


@pytest.mark.parametrize("engine", ["vllm", "gptqmodel", "transformers"])
def test_dense_experts_in_two_tensors_are_written_one_by_one(engine: str, tmp_path: Path) -> None:
    dynamic = {r"-:.*\.experts\.": {}}
    folder = fabricate(tmp_path / "in", dynamic, BASE, shapes(1, experts=2))
    tensors = load_file(folder / "model.safetensors")
    weights = [
        [tensors.pop(f"{EXPERT(expert, part)}.weight") for part in PROJECTIONS] for expert in (0, 1)
    ]
    stacks = [(torch.cat([gate, up]), down) for gate, up, down in weights]
    tensors[f"{MLP}.experts.gate_up_proj"] = torch.stack([gate_up for gate_up, _ in stacks])
    tensors[f"{MLP}.experts.down_proj"] = torch.stack([down for _, down in stacks])
    save_file(tensors, folder / "model.safetensors")
    converted(folder, tmp_path / "out", engine)
    new = Checkpoint(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    for expert in (0, 1):
        for part, weight in zip(PROJECTIONS, weights[expert], strict=True):
            assert new.plan[EXPERT(expert, part)].spec == DENSE
            assert torch.equal(stored[f"{EXPERT(expert, part)}.weight"], weight)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_mixtral_goes_by_its_older_names_and_back(engine: str, tmp_path: Path) -> None:
    dynamic = {r".*experts\.1\.down_proj": {"bits": 8}}
    folder = fabricate(tmp_path / "in", dynamic, BASE, shapes(1, experts=2))
    as_architecture(folder, "MixtralForCausalLM")
    convert(folder, tmp_path / "out", engine_named(engine))
    convert(tmp_path / "out", tmp_path / "back", engine_named("gptqmodel"))
    old, new, back = (Checkpoint(tmp_path / each) for each in ("in", "out", "back"))
    assert old.plan.keys() == back.plan.keys()
    assert new.conflicts == back.conflicts == ()
    assert "model.layers.0.block_sparse_moe.gate" in new.plan
    older = {"gate": "w1", "up": "w3", "down": "w2"}
    for expert in (0, 1):
        for part, name in older.items():
            renamed = f"model.layers.0.block_sparse_moe.experts.{expert}.{name}"
            weight = old.dequantize(EXPERT(expert, part))
            assert torch.equal(new.dequantize(renamed), weight)
            assert torch.equal(back.dequantize(EXPERT(expert, part)), weight)
    assert outcome(engine, Subject.of(new)) is Outcome.LOADS


def test_sglang_skips_experts_of_mixtral_by_their_newer_names(tmp_path: Path) -> None:
    folder = fabricate(tmp_path / "in", {}, BASE, shapes(1, experts=2))
    as_architecture(folder, "MixtralForCausalLM")
    found = reasons("sglang", Subject.of(Checkpoint(folder)))
    assert found.keys() == {EXPERT(e, part) for e in (0, 1) for part in PROJECTIONS}
    assert "block_sparse_moe" in found[EXPERT(0, "up")]
