"""The command: the plan before, the losses after, and options laid over rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny_llama import write_text, write_tiny_llama
from helpers.towers import write_picture_model
from terrazzo import cli
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.cli.quantize import FromRules, Head, with_options
from terrazzo.cli.quantize_progress import Bar
from terrazzo.models.loader import open_source
from terrazzo.rules import RuleSet
from terrazzo.spec import DENSE, QuantSpec
from terrazzo.spellings import TOWERS, Spelling

RULES = {"bits": 4, "group_size": 32, "dynamic": {r"-:.*\.1\.mlp": {}, ".*nowhere": {"bits": 2}}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_text(tmp_path / "text.txt")
    return write_tiny_llama(tmp_path / "model")


def arguments(model: Path, *more: str) -> list[str]:
    text = ("--calibration", str(model.parent / "text.txt"), "--calibration-tokens", "512")
    length = ("--sequence-length", "32")
    return ["quantize", str(model), str(model.parent / "out"), *text, *length, *more]


def test_a_run_prints_plan_losses_sizes_and_the_next_step(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = model.parent / "rules.json"
    rules.write_text(json.dumps(RULES))
    assert cli.run(arguments(model, "--rules", str(rules), "--bits", "8", "--no-sym")) == 0
    out, err = capsys.readouterr()
    assert [line.split()[-1] for line in err.splitlines()] == ["model.layers.0", "model.layers.1"]
    assert "LlamaForCausalLM, 2 layers, 15 linears; writing format gptq" in out
    assert "11 x 8-bit g32 asym  base config" in out
    assert "3 x dense           -:.*\\.1\\.mlp" in out
    assert "note: rule '.*nowhere' matches no module" in out
    assert "self_attn.q_proj" in out
    assert out.endswith(f"next: terrazzo inspect {model.parent / 'out'}\n")
    plan = Checkpoint(model.parent / "out").plan
    assert plan["model.layers.1.mlp.up_proj"].spec == DENSE
    assert plan["model.layers.0.mlp.up_proj"].spec == QuantSpec(8, 32, sym=False)


def test_a_dry_run_writes_nothing(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(arguments(model, "--dry-run", "--format", "gptq_p")) == 0
    assert "writing format gptq_p" in capsys.readouterr().out
    assert not (model.parent / "out").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--bits", "9"], "bits is 9; legal values are"),
        (["--damp", "3"], "damp is 3.0; legal is"),
        (["--seed", "-1"], "calibration seed is -1; legal is 0 or more"),
        (["--rules", "{"], "rules: not JSON"),
    ],
)
def test_faults_are_one_message(
    model: Path, more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments(model, *more)) == 2
    assert message in capsys.readouterr().err


def test_only_given_options_change_the_rules() -> None:
    rules = RuleSet.parse({".*v_proj": {"bits": 8}}, QuantSpec(3, 64), lm_head=True)
    none = FromRules.FROM_RULES
    assert with_options(rules, none, none, none, none, Head.FROM_RULES) == rules
    changed = with_options(rules, 4, none, False, True, Head.DENSE)
    assert changed.base == QuantSpec(4, 64, sym=False, desc_act=True)
    assert changed.rules == rules.rules
    assert not changed.lm_head


def test_the_bar_tells_what_it_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with Bar() as bar:
        bar.begin(8.0)
        bar.doing("model.layers.0.mlp.up_proj")
        bar.advance(2.0)
    err = capsys.readouterr().err
    assert "25.0%" in err
    assert "model.layers.0.mlp.up_proj" in err


@pytest.mark.parametrize("stored", TOWERS, ids=lambda each: each.name.lower())
@pytest.mark.parametrize("written", TOWERS, ids=lambda each: each.name.lower())
def test_rules_for_any_name_of_a_text_tower(
    written: Spelling, stored: Spelling, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_picture_model(tmp_path / "model", stored)
    layers, head = written.value.replace(".", r"\."), written.of("lm_head").replace(".", r"\.")
    rules = {rf"-:{layers}\.0\.": {}, rf"{layers}\.1\.mlp": {"bits": 8}, head: {"bits": 3}}
    write_text(tmp_path / "text.txt")
    given = ("--rules", json.dumps(rules), "--lm-head", "quantize", "--group-size", "32")
    assert cli.run(arguments(model, *given)) == 0
    out = capsys.readouterr().out
    assert ("(as " in out) == (written is not stored)
    assert "note: vision_tower.*: written as it is, 1 tensors of an encoder" in out
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.conflicts == ()
    specs = {name: each.bits for name, each in checkpoint.plan.quantized.items()}
    assert len(specs) == 8
    assert specs[f"{stored.value}.1.self_attn.q_proj"] == 4
    assert specs[f"{stored.value}.1.mlp.up_proj"] == 8
    assert specs[stored.of("lm_head")] == 3
    assert checkpoint.plan["vision_tower.layers.0.feed_forward.up_proj"].spec == DENSE
    assert "ignored" in str(open_source(checkpoint).report.ignored[0])
