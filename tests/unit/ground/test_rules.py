"""`dynamic` behaves as GPTQModel's: start-anchored PCRE2, negatives first, first match decides."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrazzo.errors import RuleError
from terrazzo.idle_rules import idle_rules
from terrazzo.rules import BASE, HEAD_SWITCH, Rule, RuleSet, layer_relative, resolve
from terrazzo.spec import DENSE, Dense, QuantSpec

DOWN = "model.layers.0.mlp.down_proj"
GATE = "model.layers.18.mlp.gate_proj"
OUT = "model.layers.3.self_attn.o_proj"
BASE_SPEC = QuantSpec()


def decide(dynamic: dict[str, object], name: str) -> QuantSpec | Dense:
    return resolve(RuleSet.parse(dynamic, BASE_SPEC), [name])[name].spec


def test_no_match_gives_the_base_config() -> None:
    plan = resolve(RuleSet.parse({"+:.*up_proj": {"bits": 8}}, BASE_SPEC), [DOWN])
    assert plan[DOWN].spec == BASE_SPEC
    assert plan[DOWN].decided_by is BASE


def test_negative_rules_go_first_wherever_they_stand() -> None:
    dynamic = {r"+:.*layers\.0\..*": {"bits": 8}, "-:.*down_proj": {}}
    plan = resolve(RuleSet.parse(dynamic, BASE_SPEC), [DOWN])
    assert plan[DOWN].spec is DENSE
    assert str(plan[DOWN].decided_by) == "-:.*down_proj"


def test_an_empty_positive_rule_shields_from_later_rules() -> None:
    assert decide({"+:.*o_proj": {}, ".*": {"bits": 8}}, OUT) == BASE_SPEC


def test_the_first_match_decides_and_nothing_is_merged() -> None:
    dynamic: dict[str, object] = {".*down_proj": {"bits": 8}, ".*": {"group_size": 32}}
    assert decide(dynamic, DOWN) == replace(BASE_SPEC, bits=8)


def test_patterns_are_anchored_at_the_start_only() -> None:
    assert decide({r"model\.layers\.0": {"bits": 8}}, DOWN) == replace(BASE_SPEC, bits=8)
    assert decide({r"layers\.0": {"bits": 8}}, DOWN) == BASE_SPEC
    assert decide({"down_proj": {"bits": 8}}, DOWN) == BASE_SPEC


def test_a_pattern_without_prefix_is_positive() -> None:
    rule = {r".*\.18\..*gate.*": {"bits": 8}}
    assert decide(rule, GATE) == replace(BASE_SPEC, bits=8)
    assert decide(rule, GATE.replace("gate_proj", "up_proj")) == BASE_SPEC


def test_negative_patterns_also_see_the_layer_relative_name() -> None:
    assert decide({r"-:mlp\.down_proj": {}}, DOWN) is DENSE
    assert decide({r"mlp\.down_proj": {"bits": 8}}, DOWN) == BASE_SPEC


def test_a_dash_without_colon_is_a_positive_rule_that_goes_first() -> None:
    rules = RuleSet.parse({".*": {"bits": 8}, "-?model": {"bits": 2}}, BASE_SPEC)
    assert [rule.key for rule in rules.rules] == ["-?model", ".*"]
    assert resolve(rules, [DOWN])[DOWN].spec == replace(BASE_SPEC, bits=2)


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [
        (r".*\.(?<layer>[[:digit:]])\.mlp", True),
        (r"\Qmodel.layers\E", True),
        (r"model\.layers\.\d++\.", True),
        (r"(?i)MODEL", True),
        (r"(?|a|m)odel", True),
        (r"(?(DEFINE)(?<n>\d+))model\.layers\.(?&n)\.", True),
        (r"\p{Ll}+\.", True),
        (r"model.*\z", True),
        (r".*\K", False),
        (r"model\.layers\.(?!0)", False),
    ],
)
def test_pcre2_syntax_means_what_gptqmodel_makes_of_it(pattern: str, matches: bool) -> None:
    expected = replace(BASE_SPEC, bits=8) if matches else BASE_SPEC
    assert decide({pattern: {"bits": 8}}, DOWN) == expected


@pytest.mark.parametrize("pattern", ["(", "*a", r"(?<=a+)b", "(?<n", "[z-a]"])
def test_a_pattern_that_is_not_pcre2_is_refused_by_name(pattern: str) -> None:
    with pytest.raises(RuleError, match="is not a PCRE2 pattern") as caught:
        RuleSet.parse({f"+:{pattern}": {"bits": 8}}, BASE_SPEC)
    assert repr(f"+:{pattern}") in str(caught.value)


def test_catastrophic_backtracking_is_an_error_not_a_hang() -> None:
    rules = RuleSet.parse({r"(a+)+$": {"bits": 8}}, BASE_SPEC)
    with pytest.raises(RuleError, match="PCRE2 gave up"):
        resolve(rules, ["a" * 64 + "b"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "its value is None"),
        ([], r"its value is \[\]"),
        ({"bits": "four"}, "bits is 'four'"),
        ({"bits": True}, "bits is True"),
        ({"bits": 9}, "bits is 9"),
        ({"group_size": 0}, "group_size is 0"),
        ({"group_size": 1.5}, r"group_size is 1\.5"),
        ({"sym": 1}, "sym is 1"),
        ({"desc_act": "yes"}, "desc_act is 'yes'"),
    ],
)
def test_an_illegal_value_names_the_rule(value: object, message: str) -> None:
    with pytest.raises(RuleError, match=message) as caught:
        RuleSet.parse({".*rule": value}, BASE_SPEC)
    assert "'.*rule'" in str(caught.value)


def test_numbers_written_as_text_are_numbers() -> None:
    assert decide({".*": {"bits": "8", "group_size": "-1"}}, DOWN) == replace(
        BASE_SPEC, bits=8, group_size=-1
    )


def test_a_negative_rule_may_have_null() -> None:
    assert decide({"-:.*down_proj": None}, DOWN) is DENSE


def test_the_head_needs_its_switch() -> None:
    dynamic: dict[str, object] = {"lm_head": {"bits": 8}}
    off = resolve(RuleSet.parse(dynamic, BASE_SPEC), ["lm_head"])["lm_head"]
    assert off.spec is DENSE
    assert off.decided_by is HEAD_SWITCH
    on = resolve(RuleSet.parse(dynamic, BASE_SPEC, lm_head=True), ["lm_head"])["lm_head"]
    assert on.spec == replace(BASE_SPEC, bits=8)


def test_options_of_the_quantizer_are_kept_apart() -> None:
    rule = Rule.parse("+:.*", {"bits": 3, "mse": 2.4})
    assert rule.override == {"bits": 3}
    assert rule.options == {"mse": 2.4}


def test_dynamic_survives_the_round_trip() -> None:
    dynamic: dict[str, object] = {"-:.*o_proj": {}, "+:.*": {"bits": 3, "sym": False, "mse": 2.4}}
    rules = RuleSet.parse(dynamic, BASE_SPEC)
    assert rules.to_dynamic() == dynamic
    assert list(rules.to_dynamic()) == list(dynamic)
    assert RuleSet.parse(rules.to_dynamic(), BASE_SPEC) == rules


def test_dead_and_shadowed_rules_are_reported() -> None:
    dynamic: dict[str, object] = {
        "down_proj": {"bits": 8},
        ".*mlp.*": {"bits": 8},
        ".*down_proj": {"bits": 3},
        ".*": {"bits": 2},
    }
    idle = idle_rules(RuleSet.parse(dynamic, BASE_SPEC), [DOWN, GATE, OUT])
    assert [str(rule) for rule in idle] == [
        "rule 'down_proj' matches no module",
        "rule '.*down_proj' decides nothing: its matches are taken by '.*mlp.*'",
    ]


def test_layer_relative_names() -> None:
    assert layer_relative(DOWN) == "mlp.down_proj"
    assert layer_relative("model.language_model.layers.2.self_attn.q_proj") == "self_attn.q_proj"
    assert layer_relative("lm_head") == "lm_head"
    assert layer_relative("model.layers.norm") == "model.layers.norm"


SPELLED = [
    r"^model\.layers\.1\.mlp\.up_proj$",
    r"model\.layers\.1\.mlp\.up_proj$",
    r"^mlp\.up_proj$",
]
LOOSE = [".*up_proj", r"model\.layers\.1", "lm_head", "mlp", r"^model\.layers\.1\.mlp\.up_proj$|x"]
ASKED = ["model.layers.1.mlp.up_proj", "model.layers.11.mlp.up_proj", "mlp.up_proj", "lm_head", "x"]


@given(
    st.lists(
        st.tuples(st.sampled_from(["", "+:", "-:"]), st.sampled_from(SPELLED + LOOSE)), unique=True
    )
)
def test_finding_spelled_out_names_first_changes_no_answer(keys: list[tuple[str, str]]) -> None:
    rules = RuleSet.parse({"".join(key): {} for key in keys}, BASE_SPEC, lm_head=True)
    for name in ASKED:
        first = next((rule for rule in rules.rules if rule.matches(name)), BASE)
        assert rules.resolve_name(name).decided_by == first
