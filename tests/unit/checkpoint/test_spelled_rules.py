"""Rules for any name of a text tower, on tensors of any name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.checkpoints import Configs, config_of, packed_module, random_affine, write_folder
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.checkpoint.spelled_rules import respelled
from terrazzo.dialects.subject import Subject
from terrazzo.idle_rules import idle_rules
from terrazzo.rules import RuleSet
from terrazzo.spec import QuantSpec
from terrazzo.spellings import TOWERS, Spelling

EIGHT = QuantSpec(8, 32)
BASE = QuantSpec(4, 32)
VISION = {"vision_config": {}}
NINE = [(written, stored) for written in TOWERS for stored in TOWERS]
IDS = [f"{written.name}-on-{stored.name}".lower() for written, stored in NINE]


def down(spelling: Spelling, layer: int) -> str:
    return f"{spelling.value}.{layer}.mlp.down_proj"


def pattern(spelling: Spelling, layer: int) -> str:
    return rf"{re.escape(spelling.value)}\.{layer}\."


def picture_folder(folder: Path, stored: Spelling, dynamic: dict[str, object]) -> Path:
    """Layer 0 with 8 bits, layer 1 dense, layer 2 with the base; the head has 8 bits."""
    tensors = {
        **packed_module(random_affine(EIGHT, 32, 64), 8, module=down(stored, 0)),
        f"{down(stored, 1)}.weight": random_affine(EIGHT, 32, 64).dequantized,
        **packed_module(random_affine(BASE, 32, 64), 4, module=down(stored, 2)),
        **packed_module(random_affine(EIGHT, 64, 32), 8, module=stored.of("lm_head")),
        "vision_tower.layers.0.up_proj.weight": random_affine(EIGHT, 32, 64).dequantized,
    }
    configs = config_of(BASE, dynamic=dynamic, lm_head=True)
    return write_folder(folder, tensors, Configs(configs.quantization, model=VISION))


@pytest.mark.parametrize(("written", "stored"), NINE, ids=IDS)
def test_a_checkpoint_is_what_rules_of_any_spelling_say(
    written: Spelling, stored: Spelling, tmp_path: Path
) -> None:
    dynamic: dict[str, object] = {
        f"+:{pattern(written, 0)}": {"bits": 8},
        f"-:{pattern(written, 1)}": {},
        re.escape(written.of("lm_head")): {"bits": 8},
    }
    checkpoint = Checkpoint(picture_folder(tmp_path, stored, dynamic))
    assert checkpoint.conflicts == ()
    assert checkpoint.plan.quantized == {
        down(stored, 0): EIGHT,
        down(stored, 2): BASE,
        stored.of("lm_head"): EIGHT,
    }
    decided = {name: str(each.decided_by) for name, each in checkpoint.plan.items()}
    suffix = "" if written is stored else f" (as {written.value})"
    assert decided[down(stored, 0)] == f"+:{pattern(written, 0)}{suffix}"
    assert decided[down(stored, 1)] == f"-:{pattern(written, 1)}{suffix}"
    assert decided[down(stored, 2)] == "base config"
    told = [f"rule '+:{pattern(written, 0)}' is written for {written.value}".replace("\\", "\\\\")]
    assert [r.split(",")[0] for r in checkpoint.remarks if "+:" in r] == told[: written != stored]
    assert idle_rules(checkpoint.rules, list(checkpoint.plan)) == ()


def test_a_stored_name_wins_over_a_spelling() -> None:
    stored = [down(Spelling.INSIDE, layer) for layer in (0, 1)]
    dynamic: dict[str, object] = {pattern(Spelling.ALONE, 0): {"bits": 8}, r".*\.0\.": {"bits": 3}}
    rules = respelled(RuleSet.parse(dynamic, BASE), VISION, stored)
    assert rules.resolve_name(stored[0]).spec == QuantSpec(3, 32)
    (idle,) = idle_rules(rules, stored)
    assert "its matches are taken by '.*\\\\.0\\\\.'" in str(idle)


def test_a_rule_that_matches_any_stored_name_keeps_its_meaning() -> None:
    """Otherwise what speaks of all but the tower would speak of it by its other names."""
    stored = [down(Spelling.INSIDE, 0), "model.visual.blocks.0.mlp.up_proj"]
    dynamic: dict[str, object] = {r"(?!model\.language_model\.)": {"bits": 8}}
    rules = respelled(RuleSet.parse(dynamic, BASE), VISION, stored)
    assert rules.resolve_name(stored[0]).spec == BASE
    assert rules.resolve_name(stored[1]).spec == EIGHT


def test_thousands_of_literal_rules_of_another_spelling() -> None:
    stored = [down(Spelling.INSIDE, layer) for layer in range(3000)]
    dynamic: dict[str, object] = {
        f"^{re.escape(down(Spelling.ALONE, layer))}$": {"bits": 8} for layer in range(3000)
    }
    rules = respelled(RuleSet.parse(dynamic, BASE), VISION, stored)
    assert {rules.resolve_name(name).spec for name in stored} == {QuantSpec(8, 32)}


@pytest.mark.parametrize("written", [Spelling.INSIDE, Spelling.OUTSIDE])
def test_a_model_without_towers_reads_rules_as_gptqmodel_does(written: Spelling) -> None:
    dynamic: dict[str, object] = {pattern(written, 0): {"bits": 8}}
    rules = RuleSet.parse(dynamic, BASE)
    names = [down(Spelling.ALONE, 0)]
    assert respelled(rules, {"model_type": "llama"}, names) is rules
    assert rules.resolve_name(names[0]).spec == BASE
    towers = respelled(rules, {"text_config": {}}, names)
    assert towers.resolve_name(names[0]).spec == QuantSpec(8, 32)


def test_predictions_know_that_other_engines_see_stored_names_only(tmp_path: Path) -> None:
    dynamic: dict[str, object] = {pattern(Spelling.ALONE, 0): {"bits": 8}}
    folder = picture_folder(tmp_path, Spelling.INSIDE, dynamic)
    subject = Subject.of(Checkpoint(folder))
    assert subject.rules.resolve_name(down(Spelling.INSIDE, 0)).spec == BASE
