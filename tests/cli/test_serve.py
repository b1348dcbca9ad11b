"""`terrazzo serve` as a process: a tiny random model end to end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from helpers.tiny_llama import write_tiny_llama
from terrazzo import LLM, cli

READY = "ready: "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "pebble")


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """The process once it is ready, and the lines it has printed."""
    command = [sys.executable, "-m", "terrazzo", "serve", f"{folder}", "--port", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines: list[str] = []
        while not (lines and lines[-1].startswith(READY)):
            line = process.stdout.readline()
            assert line, f"ended before it was ready: {lines}"
            lines.append(line.strip())
        try:
            yield process, lines
        finally:
            process.kill()


def test_from_a_folder_to_answers_and_back_to_the_shell(folder: Path) -> None:
    with serving(folder, "--max-model-len", "48", "--api-key", "sesame") as (process, lines):
        memory, summary, ready = lines
        assert "LlamaForCausalLM with 0 quantized and 15 dense linear modules" in summary
        assert memory.startswith("memory: weights")
        name, _, address = ready.removeprefix(READY).partition(" at ")
        assert name == "pebble"
        with OpenAI(base_url=address, api_key="sesame", max_retries=0) as client:
            assert client.models.list().data[0].model_dump()["max_model_len"] == 48
            _check_answers(client, LLM(folder))
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
        assert process.stdout is not None
        assert process.stdout.read() == "stopped\n"


def test_a_second_interrupt_drops_what_runs(folder: Path) -> None:
    with serving(folder) as (process, lines), ThreadPoolExecutor() as pool:
        address = lines[-1].rpartition(" at ")[2]
        asked = {"prompt": "a", "max_tokens": 60, "ignore_eos": True, "n": 128, "stream": True}
        with httpx.stream("POST", f"{address}/completions", json=asked, timeout=30) as answer:
            events = answer.iter_lines()
            next(events)
            process.send_signal(signal.SIGINT)
            ended = pool.submit(process.wait, 30)
            time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            told = "".join(events)
        assert ended.result() == 0
    assert "the server is shutting down" in told


def _check_answers(client: OpenAI, llm: LLM) -> None:
    """Those of the library on the same folder."""
    messages = [{"role": "user", "content": "hello"}]
    params = llm.default_params(temperature=0.0, max_tokens=10)
    wanted = llm.chat(messages, params)
    asked = {"model": "pebble", "messages": messages, "temperature": 0, "max_tokens": 10}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted.text
    stream = client.chat.completions.create(**asked, stream=True)
    pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
    assert "".join(pieces) == wanted.text
    drawn = client.completions.create(
        model="pebble", prompt=["a lazy", "the dog"], n=2, seed=7, max_tokens=8, logprobs=0
    )
    for index, prompt in enumerate(["a lazy", "the dog"]):
        same = llm.generate(prompt, llm.default_params(seed=7, max_tokens=8, n=2))[0]
        assert [choice.text for choice in drawn.choices[2 * index : 2 * index + 2]] == [
            choice.text for choice in same.choices
        ]


def test_a_port_in_use_is_said_before_anything_is_loaded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert cli.run(["serve", f"{folder}", "--port", f"{port}"]) == 2
    out, err = capsys.readouterr()
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in err
    assert out == ""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--port", "0", "--host", "no.such.host.invalid"], "cannot listen on no.such.host"),
        (["--port", "0", "--max-model-len", "65"], "64 positions"),
        (["--port", "0", "--max-num-seqs", "0"], "max_num_seqs is 0"),
        (["--port", "0", "--max-queue", "-1"], "max_queue is -1"),
    ],
)
def test_bad_options_are_one_message(
    folder: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", f"{folder}", *flags]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


def test_a_folder_without_a_tokenizer_cannot_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "tokenizer.json").unlink()
    assert cli.run(["serve", f"{folder}", "--port", "0"]) == 2
    assert "tokenizer.json" in capsys.readouterr().err
