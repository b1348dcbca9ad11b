"""A tiny model end to end: what is written is what the rules say and what was computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.tiny_llama import CONFIG, write_text, write_tiny_llama
from terrazzo import quantize
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.errors import ConfigError, QuantizationError, RuleError, UnsupportedError
from terrazzo.models.loader import load
from terrazzo.nn.attention import CausalContext
from terrazzo.quantization.job import open_job
from terrazzo.quantization.options import CalibrationOptions
from terrazzo.quantization.report import QuantizationReport
from terrazzo.rules import LM_HEAD, RuleSet
from terrazzo.spec import DENSE, Format, QuantSpec

BASE = QuantSpec(bits=8, group_size=32)
MIXED: Mapping[str, object] = {
    r"-:.*\.1\.self_attn\.o_proj": {},
    r".*\.v_proj": {"bits": 8, "sym": False},
    r".*\.q_proj": {"group_size": -1},
    r".*\.0\.mlp\.down_proj": {"bits": 8, "group_size": 40},
    r".*\.k_proj": {"desc_act": True, "damp_percent": 0.1},
}
IDS = torch.randint(320, (48,), generator=torch.Generator().manual_seed(3))


def text_options(folder: Path) -> CalibrationOptions:
    text = write_text(folder / "text.txt")
    return CalibrationOptions(text, num_tokens=1024, sequence_length=32)


def run(model: Path, out: Path, rules: RuleSet, **more: Any) -> QuantizationReport:
    return quantize(model, out, rules=rules, calibration=text_options(model.parent), **more)


def logits(folder: Path) -> Tensor:
    decoder = load(Checkpoint(folder))
    return decoder.logits(decoder(IDS, CausalContext(1, len(IDS))))


def distance(folder: Path, other: Path) -> float:
    """Relative, of the logits."""
    expected = logits(other)
    return float((logits(folder) - expected).norm() / expected.norm())


def digest(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def mixed(dense: Path) -> Path:
    out = dense.parent / "mixed"
    run(dense, out, RuleSet.parse(MIXED, BASE, lm_head=True))
    return out


def test_the_folder_is_what_the_rules_say(mixed: Path) -> None:
    checkpoint = Checkpoint(mixed)
    assert checkpoint.conflicts == ()
    layer = "model.layers.{}.{}".format
    specs = {name: resolution.spec for name, resolution in checkpoint.plan.items()}
    assert specs[layer(1, "self_attn.o_proj")] == DENSE
    assert specs[layer(0, "self_attn.o_proj")] == BASE
    assert specs[layer(0, "self_attn.v_proj")] == QuantSpec(8, 32, sym=False)
    assert specs[layer(0, "self_attn.q_proj")] == QuantSpec(8, -1)
    assert specs[layer(0, "mlp.down_proj")] == QuantSpec(8, 40)
    assert specs[layer(0, "self_attn.k_proj")] == QuantSpec(8, 32, desc_act=True)
    assert specs[LM_HEAD] == QuantSpec(8, 32)


def test_logits_are_close_to_those_of_the_dense_model(dense: Path, mixed: Path) -> None:
    assert 0 < distance(mixed, dense) < 0.02


def test_logits_are_those_of_the_dequantized_weights(
    dense: Path, mixed: Path, tmp_path: Path
) -> None:
    checkpoint = Checkpoint(mixed)
    tensors = {
        name: tensor.float() for name, tensor in load_file(dense / "model.safetensors").items()
    }
    for name in checkpoint.plan.quantized:
        tensors[f"{name}.weight"] = checkpoint.dequantize(name)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(logits(mixed), logits(tmp_path), rtol=1e-5, atol=1e-5)


def test_dense_tensors_and_companions_go_along_unchanged(dense: Path, mixed: Path) -> None:
    before, after = (load_file(folder / "model.safetensors") for folder in (dense, mixed))
    kept = [name for name in before if name in after]
    assert "model.layers.1.self_attn.o_proj.weight" in kept
    assert "model.embed_tokens.weight" in kept
    assert "lm_head.weight" not in after
    for name in kept:
        assert after[name].dtype is before[name].dtype
        assert torch.equal(after[name], before[name])
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (mixed / file).read_bytes() == (dense / file).read_bytes()


def test_the_manifest_holds_what_repeats_the_run(mixed: Path) -> None:
    manifest = json.loads((mixed / "terrazzo.json").read_text())
    assert manifest["calibration"]["source"] == "text.txt"
    assert manifest["calibration"]["num_tokens"] == 1024
    assert len(manifest["calibration"]["sha256"]) == 64
    assert manifest["gptq"] == {"damp": 0.01, "search": "hessian", "block_size": 128}
    assert set(manifest["losses"]) == set(Checkpoint(mixed).plan.quantized)


def test_every_loss_is_below_that_of_rounding(dense: Path, tmp_path: Path) -> None:
    report = run(dense, tmp_path / "out", RuleSet(QuantSpec(4, 32)))
    assert [module.name for module in report.modules][:2] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.k_proj",
    ]
    assert len(report.modules) == 14
    for module in report.modules:
        assert 0 < module.loss < module.rtn_loss
        assert module.log == ()


@pytest.mark.parametrize(
    ("checkpoint_format", "spec", "written"),
    [
        (Format.GPTQ_V2, QuantSpec(3, 32, sym=False), Format.GPTQ_V2),
        (Format.GPTQ, QuantSpec(4, 32, sym=False), Format.GPTQ_V2),
        (Format.GPTQ_P, QuantSpec(3, 32), Format.GPTQ_P),
        (Format.GPTQ, QuantSpec(6, 32, sym=False), Format.GPTQ_P),
    ],
)
def test_every_format_reads_back(
    checkpoint_format: Format, spec: QuantSpec, written: Format, dense: Path, tmp_path: Path
) -> None:
    run(dense, tmp_path / "out", RuleSet(spec), checkpoint_format=checkpoint_format)
    checkpoint = Checkpoint(tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["checkpoint_format"] == written.value
    assert checkpoint.conflicts == ()
    assert set(checkpoint.plan.quantized.values()) == {spec}
    assert distance(tmp_path / "out", dense) < 0.5


def test_a_head_that_shares_the_embedding_gets_its_own_weights(tmp_path: Path) -> None:
    tied = write_tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    rules = RuleSet.parse({"lm_head": {"bits": 8, "group_size": 32}}, BASE, lm_head=True)
    assert any("embedding" in remark for remark in open_job(tied, rules).remarks)
    run(tied, tmp_path / "out", rules)
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.model_config["tie_word_embeddings"] is False
    assert "lm_head.weight" not in checkpoint.tensor_names
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    assert embedding.dtype is torch.float16
    error = checkpoint.dequantize(LM_HEAD) - embedding.float()
    assert 0 < float(error.norm() / embedding.float().norm()) < 0.02
    assert distance(tmp_path / "out", tied) < 0.02


def test_a_head_that_stays_dense_stays_tied(tmp_path: Path) -> None:
    tied = write_tiny_llama(tmp_path / "model", tie_word_embeddings=True)
    run(tied, tmp_path / "out", RuleSet(BASE))
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.model_config["tie_word_embeddings"] is True
    assert not any(name.startswith("lm_head") for name in checkpoint.tensor_names)


def test_a_head_no_rule_speaks_of_gets_the_rule_of_gptqmodel(dense: Path) -> None:
    job = open_job(dense, RuleSet(QuantSpec(4, 64), lm_head=True))
    assert job.plan[LM_HEAD].spec == QuantSpec(8, 32)
    assert job.rules.rules[-1].key == "lm_head"
    assert any("no rule speaks of the head" in remark for remark in job.remarks)
    broad = open_job(dense, RuleSet.parse({".*": {"bits": 8}}, QuantSpec(4, 64), lm_head=True))
    assert broad.plan[LM_HEAD].spec == QuantSpec(8, 64)


def test_biases_and_bfloat16_survive(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model", torch.bfloat16, attention_bias=True, mlp_bias=True)
    run(model, tmp_path / "out", RuleSet(BASE))
    before, after = (
        load_file(folder / "model.safetensors") for folder in (model, tmp_path / "out")
    )
    name = "model.layers.0.self_attn.q_proj.bias"
    assert torch.equal(before[name], after[name])
    assert after["model.layers.0.self_attn.q_proj.scales"].dtype is torch.float16
    assert distance(tmp_path / "out", model) < 0.02


def test_the_same_run_gives_the_same_bytes(dense: Path, mixed: Path, tmp_path: Path) -> None:
    run(dense, tmp_path / "again", RuleSet.parse(MIXED, BASE, lm_head=True))
    assert digest(tmp_path / "again") == digest(mixed)


class Interrupting:
    """Progress that stops the run at a module, as Ctrl-C does."""

    def begin(self, work: float) -> None: ...

    def doing(self, name: str) -> None:
        if name == "model.layers.1.mlp.up_proj":
            raise KeyboardInterrupt

    def advance(self, work: float) -> None: ...


def test_an_interrupted_run_leaves_nothing(dense: Path, tmp_path: Path) -> None:
    out = tmp_path / "work" / "out"
    with pytest.raises(KeyboardInterrupt):
        run(dense, out, RuleSet(BASE), progress=Interrupting())
    assert list((tmp_path / "work").iterdir()) == []


class Counting:
    """Progress that adds up."""

    def __init__(self) -> None:
        self.total = self.done = 0.0
        self.names: list[str] = []

    def begin(self, work: float) -> None:
        self.total = work

    def doing(self, name: str) -> None:
        self.names.append(name)

    def advance(self, work: float) -> None:
        self.done += work


def test_progress_adds_up_to_what_was_announced(dense: Path, tmp_path: Path) -> None:
    counting = Counting()
    rules = RuleSet.parse(MIXED, BASE, lm_head=True)
    report = run(dense, tmp_path / "out", rules, progress=counting)
    assert counting.done == pytest.approx(counting.total)
    assert sorted(counting.names) == sorted(module.name for module in report.modules)


def test_remarks_name_idle_rules_and_unused_options(dense: Path) -> None:
    rules = {".*nowhere": {"bits": 8}, ".*": {"mse": 2.4}, ".*q_proj": {"bits": 8}}
    remarks = open_job(dense, RuleSet.parse(rules, BASE)).remarks
    assert "rule '.*nowhere' matches no module" in remarks
    assert "rule '.*q_proj' decides nothing: its matches are taken by '.*'" in remarks
    assert "rule '.*': mse kept in the config, not used" in remarks


def test_refusals_before_anything_is_computed(dense: Path, mixed: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="14 modules are already quantized"):
        run(mixed, tmp_path / "out", RuleSet(BASE))
    with pytest.raises(ConfigError, match="every linear stays dense"):
        run(dense, tmp_path / "out", RuleSet.parse({"-:.*": {}}, BASE))
    with pytest.raises(RuleError, match="damp_percent is 7"):
        run(dense, tmp_path / "out", RuleSet.parse({".*": {"damp_percent": 7}}, BASE))
    with pytest.raises(RuleError, match="pack_dtype is 'int16'; Terrazzo writes words of int32"):
        run(dense, tmp_path / "out", RuleSet.parse({".*": {"pack_dtype": "int16"}}, BASE))
    with pytest.raises(ConfigError, match="already there"):
        run(dense, mixed, RuleSet(BASE))
    options = CalibrationOptions(sequence_length=65)
    with pytest.raises(ConfigError, match="sees at most 64 positions"):
        quantize(dense, tmp_path / "out", rules=RuleSet(BASE), calibration=options)
    assert not (tmp_path / "out").exists()


def test_bit_planes_need_multiples_of_32(tmp_path: Path) -> None:
    odd = write_tiny_llama(tmp_path / "model", intermediate_size=100)
    with pytest.raises(UnsupportedError, match=r"gate_proj: 5 bits in format gptq_p .* not 100"):
        open_job(odd, RuleSet(QuantSpec(5, 32)))
    run(odd, tmp_path / "out", RuleSet(QuantSpec(3, 32)))
    assert Checkpoint(tmp_path / "out").conflicts == ()


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    small = write_tiny_llama(tmp_path / "model", vocab_size=200)
    with pytest.raises(ConfigError, match="the model knows 200"):
        run(small, tmp_path / "out", RuleSet(BASE))


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    model = write_tiny_llama(tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = float("nan")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(QuantizationError, match=r"0\.self_attn\.o_proj: the weight holds 1"):
        run(model, tmp_path / "out", RuleSet(BASE))
    tensors["model.layers.0.self_attn.o_proj.weight"][0, 0] = 0
    tensors["model.embed_tokens.weight"][:] = float("inf")
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(QuantizationError, match=r"input of model\.layers\.0\.self_attn\.q_proj, "):
        run(model, tmp_path / "out", RuleSet(BASE))
    assert not (tmp_path / "out").exists()
