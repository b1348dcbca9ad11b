"""Rule lookup of vLLM and SGLang, on vectors where it differs from GPTQModel's."""

from __future__ import annotations

from typing import Any

import pytest

from terrazzo.dialects import sglang, vllm
from terrazzo.dialects.lookup import SKIP, Matcher, Skip, base_spec, overridden
from terrazzo.dialects.prediction import Refusal
from terrazzo.spec import QuantSpec

BASE = QuantSpec(4, 128)
EIGHT = QuantSpec(8, 128)
DOWN = "model.layers.0.mlp.down_proj"
EXPERTS = "model.layers.3.mlp.experts"
FIELDS = {"bits": 4, "group_size": 128, "desc_act": False, "sym": True, "quant_method": "gptq"}


@pytest.mark.parametrize("matches", [vllm.matches, sglang.matches])
@pytest.mark.parametrize(
    ("dynamic", "name", "expected"),
    [
        ({r"+:.*layers\.0\..*": {"bits": 8}, "-:.*down_proj": {}}, DOWN, EIGHT),
        ({"-:.*down_proj": {}, r"+:.*layers\.0\..*": {"bits": 8}}, DOWN, SKIP),
        ({"+:.*down_proj": {}, ".*": {"bits": 8}}, DOWN, BASE),
        ({"-:.*down_proj": None}, DOWN, SKIP),
        ({r"-:mlp\.down_proj": {}}, DOWN, BASE),
        ({r".*\.0\..*gate.*": {"bits": 8}}, "model.layers.0.mlp.gate_up_proj", EIGHT),
        ({r".*\.q_proj": {"bits": 8}}, "model.layers.0.self_attn.qkv_proj", BASE),
        ({".*v_proj": {"bits": 8}}, "model.layers.0.self_attn.qkv_proj", EIGHT),
        ({".*(q|k|v)_proj": {"bits": 8}}, "model.layers.0.self_attn.qkv_proj", EIGHT),
        ({r".*\.(q|k|v)_proj": {"bits": 8}}, "model.layers.0.self_attn.qkv_proj", BASE),
        ({"-:.*down.*": {}, r"-:.*\.experts\..*": {}}, EXPERTS, BASE),
        ({"lm_head": {"bits": 8}}, "language_model.lm_head", BASE),
        ({".*": {"bits": "8"}}, DOWN, BASE),
    ],
)
def test_the_first_key_in_file_order_decides(
    matches: Matcher, dynamic: dict[str, Any], name: str, expected: QuantSpec | Skip
) -> None:
    assert overridden(BASE, dynamic, name, matches) == expected


@pytest.mark.parametrize(
    ("pattern", "in_vllm", "in_sglang"),
    [
        (r"model\.layers\.\d++\.", True, True),
        (r"(?<n>m)odel", True, "error"),
        (r"\p{Ll}+", True, "error"),
        (r".*\.[[:digit:]]\.mlp", True, False),
        (r"\Qmodel\E", "error", "error"),
        (r".*\K", True, "error"),
        (r"model(?<=l+)", True, "error"),
        ("(", "error", "error"),
    ],
)
def test_pattern_engines(pattern: str, in_vllm: bool | str, in_sglang: bool | str) -> None:
    for matches, expected in ((vllm.matches, in_vllm), (sglang.matches, in_sglang)):
        if expected == "error":
            with pytest.raises(Refusal, match="for the pattern"):
                matches(pattern, DOWN)
        else:
            assert matches(pattern, DOWN) is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": "4"}, "is not a number"),
        ({"quant_method": "gptqmodel"}, "not 'gptq'"),
        ({"group_size": 0}, "group_size is 0"),
    ],
)
def test_a_base_config_that_no_engine_takes(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        base_spec({**FIELDS, **changes})


def test_a_missing_field_of_the_base_config() -> None:
    for missing in ("bits", "group_size", "desc_act", "sym"):
        with pytest.raises(Refusal, match=missing):
            base_spec({key: value for key, value in FIELDS.items() if key != missing})
