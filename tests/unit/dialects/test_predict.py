"""Predictions for checkpoints as GPTQModel writes them, and for ones that were edited since."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from helpers.dialects import (
    BASE,
    outcome,
    predict,
    reasons,
    shapes,
    with_config,
    written,
)
from terrazzo.checkpoint.zero_points import ZeroReading
from terrazzo.dialects.engines import ENGINES, engine_named
from terrazzo.dialects.prediction import CONFIG, Outcome
from terrazzo.errors import ConfigError
from terrazzo.spec import Format, QuantSpec

LOADS, REFUSES, WRONG = Outcome.LOADS, Outcome.REFUSES, Outcome.SILENTLY_WRONG
ORDER = ("vllm", "sglang", "gptqmodel", "transformers")
QKV = r".*\.self_attn\.(q_proj|k_proj|v_proj|qkv_proj)$"
Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


@dataclass(frozen=True, slots=True)
class Case:
    """expected: in ORDER."""

    name: str
    dynamic: Mapping[str, Any]
    expected: tuple[Outcome, Outcome, Outcome, Outcome]
    base: QuantSpec = BASE
    lm_head: bool = False
    experts: int = 0


CASES = [
    Case("plain", {}, (LOADS, LOADS, LOADS, LOADS)),
    Case("8 bits", {}, (LOADS, LOADS, LOADS, LOADS), QuantSpec(8, 32)),
    Case("channelwise", {}, (LOADS, LOADS, LOADS, LOADS), QuantSpec(4, -1)),
    Case("3 bits", {}, (REFUSES, REFUSES, LOADS, LOADS), QuantSpec(3, 128)),
    Case("5 bits", {}, (REFUSES, REFUSES, LOADS, REFUSES), QuantSpec(5, 128)),
    Case("zero points", {}, (REFUSES, REFUSES, LOADS, LOADS), QuantSpec(4, 128, sym=False)),
    Case("groups of 16", {}, (REFUSES, REFUSES, LOADS, LOADS), QuantSpec(4, 16)),
    Case("groups of 96", {}, (REFUSES, REFUSES, REFUSES, REFUSES), QuantSpec(4, 96)),
    Case("act-order", {}, (REFUSES, WRONG, LOADS, LOADS), QuantSpec(4, 128, desc_act=True)),
    Case("fused names", {QKV: {"bits": 8}}, (LOADS, LOADS, LOADS, REFUSES)),
    Case("shard names", {r".*\.(q|k|v)_proj": {"bits": 8}}, (REFUSES, REFUSES, LOADS, REFUSES)),
    Case(
        "a shard's name eats the rest",
        {".*v_proj": {"bits": 8}},
        (REFUSES, REFUSES, LOADS, REFUSES),
    ),
    Case("a dense shard", {"-:.*v_proj": {}}, (REFUSES, WRONG, LOADS, WRONG)),
    Case("a dense row", {"-:.*o_proj": {}}, (LOADS, LOADS, LOADS, WRONG)),
    Case("relative negative", {"-:self_attn.o": {}}, (LOADS, WRONG, LOADS, WRONG)),
    Case("a rule for zero points", {".*o_proj": {"sym": False}}, (REFUSES, REFUSES, LOADS, WRONG)),
    Case("a rule for act-order", {".*o_proj": {"desc_act": True}}, (REFUSES, LOADS, LOADS, WRONG)),
    Case("idle act-order", {"nothing": {"desc_act": True}}, (REFUSES, LOADS, LOADS, LOADS)),
    Case(
        "head",
        {"lm_head": {"bits": 8, "group_size": 32}},
        (LOADS, LOADS, LOADS, WRONG),
        lm_head=True,
    ),
    Case("experts", {}, (LOADS, LOADS, LOADS, WRONG), experts=2),
    Case(
        "a rule for experts",
        {r".*\.experts": {"bits": 8}},
        (LOADS, REFUSES, LOADS, WRONG),
        experts=2,
    ),
    Case(
        "a rule for an expert",
        {r".*\.1\.up": {"bits": 8}},
        (REFUSES, REFUSES, LOADS, WRONG),
        experts=2,
    ),
    Case("a dense expert", {r"-:.*experts\.1\.": {}}, (REFUSES, WRONG, LOADS, WRONG), experts=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_engine_makes_its_own_of_a_checkpoint(case: Case) -> None:
    named = shapes(experts=case.experts)
    subject = written(case.dynamic, case.base, named, lm_head=case.lm_head)
    assert tuple(outcome(engine, subject) for engine in ORDER) == case.expected


def test_every_engine_has_its_column() -> None:
    assert tuple(ENGINES) == ORDER


def test_an_unknown_engine_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'exllama'; legal are vllm, sglang"):
        engine_named("exllama")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_sorted_config_puts_positive_rules_first(engine: str) -> None:
    """transformers sorts the keys of config.json: `+` comes before `-`."""
    subject = written({"-:.*o_proj": {}, "+:.*self_attn": {"group_size": 64}})
    expected = {"vllm": LOADS, "sglang": LOADS}
    assert outcome(engine, subject) is expected[engine]
    dynamic = dict(sorted(subject.embedded["dynamic"].items()))
    shuffled = with_config(subject, dynamic=dynamic)
    assert outcome(engine, shuffled) is {"vllm": LOADS, "sglang": WRONG}[engine]
    assert outcome("gptqmodel", shuffled) is LOADS


def test_rows_are_cut_without_a_word() -> None:
    """down_proj of 64 groups under a config that says 128: vLLM and SGLang read half the scales."""
    subject = with_config(written({".*down_proj": {"group_size": 64}}), dynamic={})
    for engine in ("vllm", "sglang"):
        found = reasons(engine, subject)
        assert set(found) == {DOWN, DOWN.replace("0", "1")}
        assert "8 groups on disk are cut to" in found[DOWN]
        assert outcome(engine, subject) is WRONG


def test_rows_too_few_raise_in_one_engine_and_are_padded_in_the_other() -> None:
    subject = with_config(written({}), dynamic={".*down_proj": {"group_size": 32}})
    assert outcome("vllm", subject) is REFUSES
    assert "filled with zeros" in reasons("sglang", subject)[DOWN]


@pytest.mark.parametrize(
    ("pattern", "vllm", "sglang"),
    [
        (r".*\.(?<part>q|k|v|qkv)_proj", LOADS, REFUSES),
        (r".*[[:alpha:]]_proj$", LOADS, REFUSES),
        (r"\Qmodel\E.*", REFUSES, REFUSES),
        (r".*(?i)(q|k|v|qkv)_proj", LOADS, REFUSES),
    ],
)
def test_pattern_engines_differ(pattern: str, vllm: Outcome, sglang: Outcome) -> None:
    subject = written({pattern: {"bits": 8}})
    assert outcome("gptqmodel", subject) is LOADS
    assert (outcome("vllm", subject), outcome("sglang", subject)) == (vllm, sglang)


def test_a_value_of_another_type_is_ignored_in_silence() -> None:
    subject = with_config(written({}), dynamic={".*o_proj": {"bits": "8", "group_size": None}})
    assert outcome("vllm", subject) is LOADS


def test_null_is_a_value_for_some() -> None:
    subject = written({"-:.*o_proj": None})
    assert outcome("vllm", subject) is LOADS
    assert "no object" in reasons("gptqmodel", subject)[CONFIG]


def test_heads_follow_their_flag_not_their_tensors() -> None:
    subject = with_config(written({}, lm_head=True), lm_head=False)
    assert "lm_head.qweight" in reasons("vllm", subject)["lm_head"]
    assert outcome("sglang", subject) is WRONG
    assert outcome("gptqmodel", replace(subject, separate=subject.embedded)) is LOADS
    claimed = with_config(written({}), lm_head=True)
    assert outcome("vllm", claimed) is LOADS
    assert outcome("sglang", claimed) is WRONG


def test_a_packed_head_needs_a_vocabulary_in_steps_of_64() -> None:
    named = {**shapes(), "lm_head": (328, 256)}
    subject = written({}, named=named, lm_head=True)
    for engine in ("vllm", "sglang"):
        assert list(reasons(engine, subject)) == ["lm_head"]
        assert outcome(engine, subject) is REFUSES


def test_inputs_must_fill_their_words() -> None:
    subject = written({}, QuantSpec(4, -1), {**shapes(), DOWN: (256, 516)})
    for engine in ("vllm", "sglang"):
        assert "516 inputs of 4 bits do not fill" in reasons(engine, subject)[DOWN]
    assert outcome("gptqmodel", subject) is LOADS


def test_a_tied_head_is_not_read() -> None:
    subject = replace(written({}, lm_head=True), ties_head=True)
    assert list(reasons("vllm", subject)) == ["lm_head"]
    assert outcome("vllm", subject) is WRONG


def test_nested_models_have_another_name_in_vllm() -> None:
    named = shapes(root="model.language_model")
    anchored = written({r"model\.language_model\..*o_proj": {"bits": 8}}, named=named)
    assert outcome("vllm", anchored) is REFUSES
    assert outcome("sglang", anchored) is LOADS
    assert outcome("vllm", written({r".*\.o_proj": {"bits": 8}}, named=named)) is LOADS
    head = written({"lm_head": {"bits": 8, "group_size": 32}}, named=named, lm_head=True)
    assert list(reasons("vllm", head)) == ["lm_head"]


def test_marlin_ignores_zero_points_whatever_the_label_says() -> None:
    subject = written({})
    linears = tuple(replace(each, zeros=ZeroReading.MIDDLE) for each in subject.linears)
    mislabelled = replace(subject, linears=linears)
    outcomes = [outcome(engine, mislabelled) for engine in ORDER]
    assert outcomes == [LOADS, LOADS, WRONG, WRONG]


def test_flags_that_tensors_contradict() -> None:
    """Tensors in order of activation, or with zero points, under flags that deny it."""
    for base in (QuantSpec(4, 128, desc_act=True), QuantSpec(4, 128, sym=False)):
        subject = written({}, base)
        claim = {"desc_act": False, "sym": True}
        denied = replace(with_config(subject, **claim), separate={**subject.separate, **claim})
        denied = replace(denied, rules=replace(subject.rules, base=BASE))
        assert [outcome(engine, denied) for engine in ORDER] == [WRONG] * 4


def test_zero_points_minus_one_are_trusted_from_gptqmodel_only() -> None:
    subject = written({}, QuantSpec(4, 128, sym=False))
    foreign = replace(subject, separate={**subject.separate, "meta": {"quantizer": ["auto:1"]}})
    assert outcome("gptqmodel", foreign) is REFUSES
    assert outcome("gptqmodel", replace(foreign, label=Format.GPTQ_V2)) is LOADS


def test_a_missing_field_is_named() -> None:
    subject = written({})
    fields = {k: v for k, v in subject.embedded.items() if k != "desc_act"}
    assert "desc_act" in reasons("vllm", replace(subject, embedded=fields))[CONFIG]


def test_a_folder_without_embedded_config() -> None:
    """quantize_config.json alone, as old tools wrote it."""
    bare = replace(written({}), embedded={})
    outcomes = [outcome(engine, bare) for engine in ORDER]
    assert outcomes == [REFUSES, WRONG, LOADS, WRONG]


def test_bit_planes_of_three_bits_are_a_stream_for_optimum() -> None:
    subject = replace(written({}, QuantSpec(3, 128)), label=Format.GPTQ_P)
    assert outcome("transformers", subject) is WRONG
    assert outcome("gptqmodel", subject) is LOADS


def test_modules_of_another_order_of_activation_share_one() -> None:
    """Rules for q, k and v alone: each has its own g_idx, and SGLang keeps that of the last."""
    subject = written({QKV: {"desc_act": True}})
    found = predict("sglang", subject).findings
    assert {f.module for f in found} >= {Q}
    assert outcome("sglang", subject) is WRONG
    same = tuple(replace(x, order="same" if x.order else x.order) for x in subject.linears)
    assert outcome("sglang", replace(subject, linears=same)) is LOADS


def test_small_experts_fall_back_to_the_base_config() -> None:
    """Where Marlin has no tile for the experts, vLLM builds them from the config without rules."""
    dynamic = {r".*\.experts": {"bits": 8}}
    named = shapes(layers=1, experts=1)
    assert outcome("vllm", written(dynamic, named=named)) is LOADS
    narrow = {k: (out, 192 if inner == 256 else inner) for k, (out, inner) in named.items()}
    base = QuantSpec(4, 64)
    assert outcome("vllm", written(dynamic, base, narrow)) is REFUSES
    assert outcome("vllm", written({}, base, narrow)) is LOADS


def test_a_prediction_says_each_reason_once() -> None:
    prediction = predict("vllm", written({r".*\.(q|k|v)_proj": {"bits": 8}}))
    lines = str(prediction).splitlines()
    assert lines[0] == "vLLM 0.33.0 (as of 2026-12-01): refuses"
    assert lines[1].startswith(f"  refuses: {Q} and 5 more: AssertionError")
    assert len(lines) == 2
    assert len(prediction.to_json()["findings"]) == 6
