"""Every `dynamic` that GPTQModel accepts decides every module as GPTQModel's own functions do.

GPTQModel drops a module when a rule is negative for its layer-relative name or for its full name,
and reads the fields of the rest by full name: that pair of look-ups is the oracle here.
"""

from __future__ import annotations

from typing import Any

import pytest
from gptqmodel import QuantizeConfig
from gptqmodel.quantization.config import dynamic_get
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from terrazzo.errors import RuleError
from terrazzo.rules import SPEC_FIELDS, RuleSet, layer_relative
from terrazzo.spec import DENSE, Dense, QuantSpec

BASE = QuantSpec()
LEAVES = [
    *(f"self_attn.{part}_proj" for part in "qkvo"),
    *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    *(f"mlp.experts.{expert}.{part}_proj" for expert in (0, 13) for part in ("gate", "down")),
    "mlp.gate",
]
NAMES = ["lm_head", *(f"model.layers.{i}.{leaf}" for i in (0, 1, 10, 31) for leaf in LEAVES)]

ATOMS = st.sampled_from(
    [
        *("model", "layers", "self_attn", "mlp", "experts", "lm_head", "q_proj", "v_proj"),
        *("gate", "up", "down_proj", "_proj", "0", "1", "10", "31", "13", "q", "o"),
        *(".", r"\.", ".*", ".+", ".*?", r"\d", r"\d+", r"\d++", "[0-9]", "[^0]", r"\w+", r"\W"),
        *("[[:digit:]]+", r"\h", r"\p{L}+", r"\Qself_attn.\E", "^", "$", r"\A", r"\z", r"\b"),
        *("(?:q|k|v)", "(q|k|v)_proj", "(?<n>[01])", "(?i)", "(?i:MODEL)", r"\K", "(?|(a)|(l))"),
        *("(?=model)", "(?!lm_head)", "(?<=model)", r"(?<!\.)", "(?>.*)", "(", ")", "[", "+", "?"),
        *("|", "{2}", r"\_", "-", "(?#c)", r"\x6d", "self_attn.q_proj", "mlp\\."),
    ]
)
RULE_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "bits": st.sampled_from([2, 3, 4, 8, "8", 5]),
        "group_size": st.sampled_from([-1, 16, 32, 64, 128]),
        "sym": st.booleans(),
        "desc_act": st.booleans(),
        "mse": st.just(2.4),
    },
)
PATTERNS = st.lists(ATOMS, min_size=1, max_size=6).map("".join)
KEYS = st.tuples(st.sampled_from(["-:", "+:", "", ".*", "-:.*", "+:.*", "-"]), PATTERNS).map(
    "".join
)
LITERALS = st.sampled_from(NAMES).map(
    lambda name: "^" + name.replace(".", r"\.").replace("_", r"\_") + "$"
)
DYNAMICS = st.dictionaries(KEYS | LITERALS, RULE_FIELDS, min_size=1, max_size=4)


def gptqmodel_config(dynamic: dict[str, dict[str, Any]]) -> QuantizeConfig:
    return QuantizeConfig(
        bits=BASE.bits,
        group_size=BASE.group_size,
        sym=BASE.sym,
        desc_act=BASE.desc_act,
        dynamic=dynamic,
        offload_to_disk=False,
    )


def gptqmodel_spec(config: QuantizeConfig, name: str) -> QuantSpec | Dense:
    """What GPTQModel makes of one module."""
    if dynamic_get(config.dynamic, layer_relative(name)) is False:
        return DENSE
    if dynamic_get(config.dynamic, name) is False:
        return DENSE
    fields = {
        key: dynamic_get(config.dynamic, name, key, getattr(BASE, key)) for key in SPEC_FIELDS
    }
    return QuantSpec(**fields)


def accepted(dynamic: dict[str, dict[str, Any]]) -> bool:
    """Whether GPTQModel compiles every pattern."""
    try:
        dynamic_get(dynamic, "no module has this name")
    except ValueError:
        return False
    return True


@settings(max_examples=1500, suppress_health_check=[HealthCheck.too_slow])
@given(DYNAMICS)
@example({"+:.*layers\\.0\\..*": {"bits": 8}, "-:.*down_proj": {}})
@example({"+:.*o_proj": {}, ".*": {"bits": 8}})
@example({"-:self_attn.q_proj": {}, ".*": {"bits": 3}})
@example({r".*\K": {"bits": 8}})
@example({"-model": {"bits": 2}, "+:model": {"bits": 8}})
def test_every_module_resolves_as_in_gptqmodel(dynamic: dict[str, dict[str, Any]]) -> None:
    if not accepted(dynamic):
        with pytest.raises(RuleError):
            RuleSet.parse(dynamic, BASE)
        return
    rules = RuleSet.parse(dynamic, BASE, lm_head=True)
    config = gptqmodel_config(dynamic)
    for name in NAMES:
        assert rules.resolve_name(name).spec == gptqmodel_spec(config, name), name


def test_saved_order_is_the_order_of_application() -> None:
    dynamic = {"+:.*proj": {"bits": 8}, "-:.*q_proj": {}, ".*": {"bits": 2}, "-:.*up": {}}
    saved = gptqmodel_config(dynamic).dynamic
    assert list(RuleSet.parse(dynamic, BASE).to_dynamic()) == list(saved)
