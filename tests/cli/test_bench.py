"""`terrazzo bench` on a tiny random model; no speed is judged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from helpers.tiny_llama import write_tiny_llama
from terrazzo import cli
from terrazzo.bench import startup
from terrazzo.bench.startup import Start

SHORT = ["--input-len", "8", "--output-len", "4", "--repeats", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("model"))


def test_offline_says_speeds_beside_the_machine(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "offline", f"{folder}", "--batch", "1, 2", *SHORT]) == 0
    out, err = capsys.readouterr()
    assert "batch 1: prefill" in out
    assert "batch 2: decode" in out
    assert "memory read:" in out
    assert "memory: weights" in err


def test_offline_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "offline", f"{folder}", "--batch", "2", "--json", *SHORT]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["input_len"], answer["output_len"]) == (8, 4)
    assert answer["machine"]["threads"] >= 1
    assert sum(answer["kernels"].values()) == 15
    (batch,) = answer["batches"]
    assert batch["batch"] == 2
    for figure in ("prefill_tokens_per_s", "decode_tokens_per_s"):
        values = batch[figure]["values"]
        assert len(values) == 2
        assert min(values) > 0
    steps = batch["decode_tokens_per_s"]["median"] / 2
    wanted = steps * batch["weight_bytes_per_step"] / 1e9
    assert batch["weights_gb_per_s"] == pytest.approx(wanted)
    share = wanted / answer["memory_read_gb_per_s"]["median"]
    assert batch["share_of_memory_read"] == pytest.approx(share)


@pytest.fixture
def _one_second_each(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(folder: Path, policy: object) -> Start:
        return Start(1.0, 1.0, 1.0, 1.0, 4.0)

    monkeypatch.setattr(startup, "start_once", start)


@pytest.mark.usefixtures("_one_second_each")
def test_startup_of_two_models_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "startup", "one", "two", "--repeats", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["machine"]["python"]
    assert [model["folder"] for model in answer["models"]] == ["one", "two"]
    seconds = answer["models"][1]["seconds"]
    assert list(seconds) == ["interpreter", "imports", "load", "first_token", "total"]
    assert seconds["total"]["values"] == [4.0, 4.0, 4.0]


@pytest.mark.usefixtures("_one_second_each")
def test_startup_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "startup", "one", "--repeats", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "seconds; median (least to most) of 3"
    assert lines[2:4] == ["one:", "  interpreter  1 (1 to 1)"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch", "1;8"], "batch is '1;8'"),
        (["--batch", "0"], "batch is 0"),
        (["--input-len", "100"], "the model knows 64"),
        (["--repeats", "0"], "repeats is 0"),
    ],
)
def test_bad_flags_are_one_message(
    folder: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["bench", "offline", f"{folder}", *flags]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize("command", ["offline", "startup"])
def test_a_folder_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", command, "no/such/folder"]) == 2
    assert "no/such/folder" in capsys.readouterr().err


def test_each_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("offline", "startup"):
        assert cli.run(["bench", command, "--help"]) == 0
        assert f"terrazzo bench {command}" in capsys.readouterr().out
