"""`inspect --as` and `convert --for`: text, JSON, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from terrazzo import cli

GOLDEN = Path(__file__).parents[1] / "golden"
MIXED = str(GOLDEN / "qwen3-mixed-2-to-8")
SHARDS = str(GOLDEN / "llama-rules-shards")


def test_a_folder_that_an_engine_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", SHARDS, "--as", "vllm"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("vLLM 0.33.0 (as of 2026-12-01): refuses\n")
    assert "Detected some but not all shards of model.layers.2.self_attn.qkv_proj" in out


def test_a_folder_that_an_engine_loads(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", SHARDS, "--as", "gptqmodel"]) == 0
    assert capsys.readouterr().out == "GPTQModel 7.7.0 (as of 2026-12-01): loads\n"


def test_json_names_every_module(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["inspect", MIXED, "--as", "transformers", "--json"]) == 1
    prediction = json.loads(capsys.readouterr().out)
    assert prediction["outcome"] == "refuses"
    assert {finding["outcome"] for finding in prediction["findings"]} == {"refuses"}
    assert "model.layers.1.mlp.gate_proj" in {each["module"] for each in prediction["findings"]}


@pytest.mark.parametrize(
    "arguments", [["inspect", MIXED, "--as"], ["convert", MIXED, "out", "--for"]]
)
def test_an_unknown_engine(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run([*arguments, "exllama"]) == 2
    assert "legal are vllm, sglang, gptqmodel, transformers" in capsys.readouterr().err


def test_conversion_says_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert cli.run(["convert", MIXED, str(out), "--for", "vllm"]) == 0
    text = capsys.readouterr().out
    assert "model.layers.0.self_attn.v_proj: 5-bit g32 sym -> 8-bit g32 sym" in text
    assert "before: vLLM 0.33.0 (as of 2026-12-01): refuses" in text
    assert text.endswith("after: vLLM 0.33.0 (as of 2026-12-01): loads\n")
    assert cli.run(["inspect", str(out), "--as", "vllm"]) == 0


def test_what_cannot_be_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["convert", SHARDS, str(tmp_path / "out"), "--for", "vllm"]) == 2
    err = capsys.readouterr().err
    assert "cannot be written for vLLM 0.33.0 without quantizing anew" in err
    assert "model.layers.2.self_attn.v_proj: some are dense" in err
    assert not (tmp_path / "out").exists()


def test_conversion_needs_its_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["convert", MIXED, "out"]) == 2
    assert "--for" in capsys.readouterr().err
