"""Rules as users write them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from terrazzo.errors import ConfigError, MissingFileError, RuleError
from terrazzo.quantization.rules_file import read_rules
from terrazzo.rules import RuleSet
from terrazzo.spec import DEFAULT_SPEC, QuantSpec

DYNAMIC: dict[str, object] = {"+:.*v_proj": {"bits": 8}, "-:.*o_proj": {}}


def test_a_config_and_the_content_of_dynamic() -> None:
    config = {"bits": 3, "group_size": -1, "sym": False, "lm_head": True, "dynamic": DYNAMIC}
    base = QuantSpec(3, -1, sym=False)
    assert read_rules(json.dumps(config)) == RuleSet.parse(DYNAMIC, base, lm_head=True)
    assert read_rules(json.dumps(DYNAMIC)) == RuleSet.parse(DYNAMIC, DEFAULT_SPEC)
    assert read_rules("{}") == RuleSet()


def test_lm_head_is_a_switch_or_a_rule() -> None:
    assert read_rules('{"lm_head": true}').lm_head
    assert [rule.key for rule in read_rules('{"lm_head": {"bits": 8}}').rules] == ["lm_head"]


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "rules.json"
    file.write_text(json.dumps({"dynamic": DYNAMIC}))
    assert read_rules(str(file)) == RuleSet.parse(DYNAMIC)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "rules: not JSON"),
        ('{"+:.*v": {"bits": 8}, "+:.*v": {"bits": 3}}', r"key '\+:\.\*v' occurs twice"),
        ('{"bits": "4"}', "rules: bits is '4'; legal is a whole number"),
        ('{"sym": 1}', "rules: sym is 1; legal is true or false"),
        ('{"bits": 4, "grup_size": 64}', "'grup_size' is not a field here; legal are bits, "),
        ('{"bits": 4, "dynamic": []}', r"rules: dynamic is \[\]; legal is an object"),
        ('{"bits": 9}', "bits is 9; legal values are"),
        ('{"dynamic": {"(": {}}}', r"'\(' is not a PCRE2 pattern"),
    ],
)
def test_faults_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_rules(text)


def test_what_is_neither_file_nor_json(tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"rules nowhere\.json is neither a file nor JSON"):
        read_rules("nowhere.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"list\.json: list; legal is an object"):
        read_rules(str(tmp_path / "list.json"))
    with pytest.raises(RuleError):
        read_rules('{"x": {"bits": "four"}}')
