"""The scripts in benchmarks/ that write checkpoints and compare engines; no speed is judged."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiny_llama import write_tiny_llama
from terrazzo import LLM, Checkpoint, QuantSpec, SamplingParams

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
SHAPE = {
    "--hidden": 64,
    "--layers": 1,
    "--intermediate": 96,
    "--heads": 4,
    "--kv-heads": 2,
    "--head-dim": 16,
    "--vocab": 96,
    "--context": 64,
}


def run_script(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr("sys.argv", [name, *(str(each) for each in arguments)])
    runpy.run_path(str(BENCHMARKS / name), run_name="__main__")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_random_checkpoints_of_every_width_run(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    rules = {"bits": bits, "group_size": 32, "dynamic": {"+:.*v_proj": {"desc_act": True}}}
    shape = [word for pair in SHAPE.items() for word in pair]
    run_script(monkeypatch, "synthetic_gptq.py", out, *shape, "--rules", json.dumps(rules))
    checkpoint = Checkpoint(out)
    assert checkpoint.conflicts == ()
    specs = checkpoint.plan.quantized
    assert specs["model.layers.0.mlp.up_proj"] == QuantSpec(bits, 32)
    assert specs["model.layers.0.self_attn.v_proj"] == QuantSpec(bits, 32, desc_act=True)
    (completion,) = LLM(out).generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    assert len(completion.token_ids) == 4


def test_the_shape_and_tokenizer_of_a_folder_with_a_quantized_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like, out = write_tiny_llama(tmp_path / "like", tie_word_embeddings=True), tmp_path / "out"
    rules = {"bits": 4, "group_size": 32, "sym": False, "lm_head": True}
    run_script(monkeypatch, "synthetic_gptq.py", out, "--like", like, "--rules", json.dumps(rules))
    specs = Checkpoint(out).plan.quantized
    assert len(specs) == 15
    assert specs["lm_head"] == QuantSpec(8, 128, sym=False)
    assert LLM(out).generate("the quick")[0].text


def test_engines_that_are_not_there_are_named_beside_those_that_are(tmp_path: Path) -> None:
    model, answers = write_tiny_llama(tmp_path / "model"), tmp_path / "answers.json"
    command = [sys.executable, str(BENCHMARKS / "cpu_peers.py"), "--json", str(answers)]
    command += ["--rounds", "2", "--threads", "1", "--case", "2x8+4"]
    command += ["--peer", f"terrazzo:{model}@speed", "--peer", f"llama.cpp:{tmp_path}/none.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "terrazzo model@speed" in done.stdout
    assert "not measured: llama.cpp none.gguf" in done.stdout
    written = json.loads(answers.read_text())
    (peer,) = written["peers"]
    assert {key: len(rates) for key, rates in peer["tokens_per_s"].items()} == {
        "2x8+4 prefill": 2,
        "2x8+4 decode": 2,
    }
    assert len(written["memory_read_gb_per_s"]) == 2
    assert list(written["not_measured"]) == ["llama.cpp none.gguf"]
