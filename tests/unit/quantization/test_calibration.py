"""Calibration: the same tokens for the same options, and refusals that say what is legal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from helpers.tiny_llama import write_text
from helpers.tiny_tokenizer import write_tokenizer
from terrazzo.errors import ConfigError, MissingFileError, QuantizationError
from terrazzo.quantization.calibration import documents, load_calibration
from terrazzo.quantization.options import BUILTIN, CalibrationOptions


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer")) / "tokenizer.json"


def options(source: Path, num_tokens: int = 128, length: int = 16) -> CalibrationOptions:
    return CalibrationOptions(source, num_tokens=num_tokens, sequence_length=length)


def test_same_options_same_tokens(tokenizer_file: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    first, second = (load_calibration(tokenizer_file, options(text)) for _ in range(2))
    assert first.token_ids_BL.shape == (8, 16)
    assert torch.equal(first.token_ids_BL, second.token_ids_BL)
    assert first.sha256 == second.sha256
    other = load_calibration(
        tokenizer_file, CalibrationOptions(text, num_tokens=128, sequence_length=16, seed=1)
    )
    assert other.sha256 != first.sha256


def test_sequences_are_pieces_of_the_text_behind_the_tokenizers_prefix(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt")
    file = write_tokenizer(tmp_path, adds_bos=True) / "tokenizer.json"
    tokens = load_calibration(file, options(text)).token_ids_BL
    stream = Tokenizer.from_file(str(file)).encode(text.read_text(), add_special_tokens=False).ids
    places = [stream[start : start + 15] for start in range(0, len(stream) - 14, 15)]
    for row in tokens.tolist():
        assert row[0] == 0
        assert row[1:] in places
    assert len({tuple(row) for row in tokens.tolist()}) == 8


def test_tokens_are_rounded_up_to_whole_sequences() -> None:
    assert CalibrationOptions(num_tokens=100, sequence_length=32).num_sequences == 4


def test_builtin_text_is_long_enough_for_the_defaults(tokenizer_file: Path) -> None:
    assert len(list(documents(BUILTIN))) > 1
    assert load_calibration(tokenizer_file, CalibrationOptions()).num_tokens == 16384


def test_lines_of_text_and_of_messages(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    lines = [json.dumps({"text": "one"}), "", json.dumps({"messages": messages})]
    file.write_text("\n".join(lines))
    assert list(documents(file)) == ["one", "user\nHi\nassistant\nHello\n"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: not JSON"),
        ("[" * 100_000, "line 1: not JSON"),
        ('{"text": "\\ud800"}', "line 1: not JSON"),
        ('{"text": "one", "text": "two"}', "line 1: not JSON .key 'text' occurs twice"),
        ('{"prompt": "x"}', "line 1: neither text nor messages"),
        ("[1]", "line 1: neither text nor messages"),
        ('{"messages": [{"role": "user"}]}', "line 1: message {'role': 'user'}"),
    ],
)
def test_other_lines_are_refused_by_number(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=message):
        list(documents(file))


def test_too_little_text_is_refused_with_numbers(tokenizer_file: Path, tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", repeats=2)
    expected = r"has \d+ tokens, 10 sequences of 16; asked are 63 .*, 1000 tokens; .* 160"
    with pytest.raises(QuantizationError, match=expected):
        load_calibration(tokenizer_file, options(text, num_tokens=1000))


def test_missing_and_unreadable_files(tokenizer_file: Path, tmp_path: Path) -> None:
    with pytest.raises(MissingFileError, match=r"nowhere\.txt is not there"):
        load_calibration(tokenizer_file, options(tmp_path / "nowhere.txt"))
    with pytest.raises(MissingFileError, match=r"needs the tokenizer\.json"):
        load_calibration(tmp_path / "tokenizer.json", options(tmp_path))
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ConfigError, match=r"bytes\.txt is not UTF-8"):
        list(documents(tmp_path / "bytes.txt"))


@pytest.mark.parametrize(
    ("field", "least"), [("num_tokens", 1), ("sequence_length", 2), ("seed", 0)]
)
def test_illegal_options(field: str, least: int) -> None:
    with pytest.raises(ConfigError, match=f"calibration {field} is -3; legal is {least} or more"):
        CalibrationOptions(**{field: -3})
