"""`terrazzo generate` on a tiny random model."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from helpers.tiny_llama import write_tiny_llama
from helpers.towers import write_picture_model
from terrazzo import LLM, cli
from terrazzo.spellings import Spelling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder)


GREEDY = ["--temperature", "0", "--max-tokens", "12"]


def test_the_text_alone_goes_to_stdout(
    folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", f"{folder}", "the quick", *GREEDY]) == 0
    out, err = capsys.readouterr()
    wanted = llm.generate("the quick", llm.default_params(temperature=0.0, max_tokens=12))[0]
    assert out == f"{wanted.text}\n"
    assert "LlamaForCausalLM with 0 quantized and 15 dense linear modules" in err
    assert "memory: weights" in err


def test_a_picture_model_says_that_its_encoder_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_picture_model(tmp_path / "model", Spelling.INSIDE)
    assert cli.run(["generate", f"{folder}", "the quick", *GREEDY]) == 0
    assert "note: vision_tower.*: ignored, 1 tensors of an encoder" in capsys.readouterr().err


def test_json_tells_all(folder: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["generate", f"{folder}", "the quick", "--json", *GREEDY]) == 0
    answer = json.loads(capsys.readouterr().out)
    wanted = llm.generate("the quick", llm.default_params(temperature=0.0, max_tokens=12))[0]
    assert (answer["text"], tuple(answer["token_ids"])) == (wanted.text, wanted.token_ids)
    assert answer["finish_reason"] == wanted.finish.value
    assert answer["prompt_tokens"] == len(llm.tokenizer.encode("the quick"))


def test_seeds_and_stops(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*flags: str) -> str:
        assert cli.run(["generate", f"{folder}", "the quick", "--max-tokens", "30", *flags]) == 0
        return capsys.readouterr().out.rstrip("\n")

    first = text("--seed", "1")
    assert text("--seed", "1") == first
    assert text("--seed", "2") != first
    middle = first[len(first) // 2]
    assert text("--seed", "1", "--stop", middle) == first[: first.index(middle)]


def test_a_prompt_from_stdin_in_the_chat_template(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert cli.run(["generate", f"{folder}", "-", "--chat", "--json", *GREEDY]) == 0
    prompt = llm.tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("flags", "words"), [(["--top-p", "2"], "top_p is 2.0"), (["--max-tokens", "0"], "max_tokens")]
)
def test_illegal_flags_are_one_message(
    folder: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["generate", f"{folder}", "a", *flags]) == 2
    assert words in capsys.readouterr().err


def test_disagreements_are_said_first(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mistaken = write_tiny_llama(
        tmp_path,
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True},
    )
    assert cli.run(["generate", f"{mistaken}", "a", *GREEDY]) == 0
    warnings = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    assert len(warnings) == 6
    assert "9 more disagreements" in warnings[-1]
