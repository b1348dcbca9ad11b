"""What engines make of words, places and methods that not all of them know, and conversion."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.brute_packing import Stored, brute_module
from helpers.checkpoints import Configs, random_affine, write_folder
from helpers.dialects import BASE, config, outcome, predict, reasons, shapes, written
from terrazzo.checkpoint.checkpoint import Checkpoint
from terrazzo.dialects.convert import convert
from terrazzo.dialects.engines import ENGINES
from terrazzo.dialects.prediction import CONFIG, Outcome
from terrazzo.dialects.subject import Subject
from terrazzo.spec import QuantSpec

AUTOROUND = {"quant_method": "auto-round", "packing_format": "auto_round:gptqmodel"}


def of_words(word_type: str, **fields: Any) -> Subject:
    subject = written({}, **fields)
    linears = tuple(replace(linear, word_type=word_type) for linear in subject.linears)
    return replace(subject, linears=linears)


@pytest.mark.parametrize("word_type", ["int8", "int16", "int64"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_words_that_are_not_int32_do_not_fit(engine: str, word_type: str) -> None:
    found = reasons(engine, of_words(word_type, pack_dtype=word_type))
    assert set(found) >= {f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"}
    assert f"has words of {word_type} on disk" in found["model.layers.0.mlp.down_proj"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_experts_of_other_words_do_not_fit(engine: str) -> None:
    subject = written({}, named=shapes(1, experts=2))
    linears = tuple(replace(linear, word_type="int16") for linear in subject.linears)
    found = reasons(engine, replace(subject, linears=linears))
    assert "words of int16" in found["model.layers.0.mlp.experts.0.up_proj"]


def test_gptqmodel_reads_the_type_that_the_config_names() -> None:
    assert outcome("gptqmodel", of_words("int16", pack_dtype="int16")) is Outcome.LOADS
    assert outcome("gptqmodel", of_words("int16")) is Outcome.REFUSES
    wide = reasons("gptqmodel", of_words("int64", pack_dtype="int64"))
    assert "no kernel reads words of int64" in next(iter(wide.values()))


@pytest.mark.parametrize("word_type", ["int8", "int32"])
def test_gptqmodel_chokes_on_the_type_that_a_rule_names(word_type: str) -> None:
    found = reasons("gptqmodel", written({".*o_proj": {"pack_dtype": word_type}}))
    assert "rule .*o_proj names a pack_dtype" in found["model.layers.0.self_attn.o_proj"]


def test_transformers_looks_for_the_type_in_meta() -> None:
    said = {"meta": {"pack_dtype": "int16", "quantizer": ["gptqmodel:7.7.0"]}}
    heads = {name: shape for name, shape in shapes(1).items() if name != "lm_head"}
    subject = written({}, named=heads, **said)
    linears = tuple(replace(linear, word_type="int16") for linear in subject.linears)
    assert outcome("transformers", replace(subject, linears=linears)) is Outcome.LOADS
    silent = replace(subject, linears=linears, embedded=config(BASE, {}))
    assert "int32 by meta.pack_dtype" in next(iter(reasons("transformers", silent).values()))


def test_only_gptqmodel_looks_up_a_quantized_embedding() -> None:
    tokens = (256, 512)
    named = {name: shape for name, shape in shapes(1).items() if name != "lm_head"}
    subject = written({}, named={**named, "model.embed_tokens": tokens})
    assert {name: outcome(name, subject) for name in ENGINES} == {
        "vllm": Outcome.REFUSES,
        "sglang": Outcome.SILENTLY_WRONG,
        "gptqmodel": Outcome.LOADS,
        "transformers": Outcome.SILENTLY_WRONG,
    }
    for engine in ENGINES:
        assert set(reasons(engine, subject)) <= {"model.embed_tokens"}


def folder_of(
    folder: Path, fields: dict[str, Any], dtype: torch.dtype, stored: Stored, **model: Any
) -> Path:
    tensors: dict[str, Tensor] = {}
    spec = QuantSpec(4, 128)
    for seed, (name, shape) in enumerate(shapes(1).items()):
        if name == "lm_head":
            tensors[f"{name}.weight"] = torch.randn(shape).half()
        else:
            weight = random_affine(spec, *shape, seed)
            tensors |= brute_module(weight, spec.bits, dtype, stored, name)
    return write_folder(folder, tensors, Configs(embedded=fields, model=model))


MINUS_ONE = (torch.int32, Stored.MINUS_ONE)
FOREIGN: dict[str, tuple[dict[str, Any], torch.dtype, Stored]] = {
    "int8": ({**config(BASE, {}), "pack_dtype": "int8"}, torch.int8, Stored.MINUS_ONE),
    "int64": ({**config(BASE, {}), "pack_dtype": "int64"}, torch.int64, Stored.MINUS_ONE),
    "auto-round": ({**config(BASE, {}), **AUTOROUND}, torch.int32, Stored.TRUE),
}


@pytest.mark.parametrize("engine", sorted(ENGINES))
@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_conversion_writes_what_every_engine_loads(tmp_path: Path, name: str, engine: str) -> None:
    source = folder_of(tmp_path / "in", *FOREIGN[name], architectures=["LlamaForCausalLM"])
    conversion = convert(source, tmp_path / "out", ENGINES[engine])
    before, after = Checkpoint(source), Checkpoint(tmp_path / "out")
    assert conversion.after.outcome is Outcome.LOADS
    assert after.conflicts == ()
    assert all(torch.equal(before.dequantize(each), after.dequantize(each)) for each in before.plan)
    assert after.dtype("model.layers.0.mlp.up_proj.qweight") == torch.int32
    assert outcome(engine, Subject.of(after)) is Outcome.LOADS


def test_conversion_tells_the_change_of_words(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "in", *FOREIGN["int8"])
    changes = convert(source, tmp_path / "out", ENGINES["vllm"]).changes
    assert "model.layers.0.mlp.up_proj: words of int8 -> int32" in changes


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers"])
def test_autoround_is_read_by_parts_that_nobody_looked_at(tmp_path: Path, engine: str) -> None:
    subject = Subject.of(Checkpoint(folder_of(tmp_path, *FOREIGN["auto-round"])))
    assert outcome(engine, subject) is Outcome.UNKNOWN
    assert "convert --for" in reasons(engine, subject)[CONFIG]
    assert predict(engine, subject).to_json()["outcome"] == "not predicted"


def test_gptqmodel_refuses_the_method_of_autoround(tmp_path: Path) -> None:
    subject = Subject.of(Checkpoint(folder_of(tmp_path, *FOREIGN["auto-round"])))
    assert outcome("gptqmodel", subject) is Outcome.REFUSES


def test_who_looks_into_the_config_of_a_text_tower(tmp_path: Path) -> None:
    inner = {"text_config": {"quantization_config": config(BASE, {})}}
    source = folder_of(tmp_path / "in", {}, *MINUS_ONE, **inner)
    subject = Subject.of(Checkpoint(source))
    assert {name: outcome(name, subject) for name in ENGINES} == {
        "vllm": Outcome.LOADS,
        "sglang": Outcome.LOADS,
        "gptqmodel": Outcome.REFUSES,
        "transformers": Outcome.SILENTLY_WRONG,
    }
    convert(source, tmp_path / "out", ENGINES["gptqmodel"])
    written_config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written_config["text_config"] == {}
    assert written_config["quantization_config"]["bits"] == 4
