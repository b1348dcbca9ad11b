"""Calibration text as token sequences: the same options and files give the same tokens, always.

All text is tokenized into one stream, the stream is cut into sequences of equal length, and a
seeded choice of them is used, so that every part of a mixed text has its share. Each sequence
begins with the tokens that the tokenizer puts in front of any text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrazzo.checkpoint.json_files import parse_json
from terrazzo.checkpoint.tokenizer_file import blaming, open_tokenizer
from terrazzo.errors import ConfigError, MissingFileError, QuantizationError
from terrazzo.quantization.options import BuiltinText, CalibrationOptions

TEXT_FOLDER = "calibration_text"


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """token_ids_BL: int64 [sequences, length]. sha256: of its bytes, little-endian, in hex."""

    token_ids_BL: Tensor
    sha256: str

    @property
    def num_tokens(self) -> int:
        return self.token_ids_BL.numel()


def load_calibration(tokenizer_file: Path, options: CalibrationOptions) -> Calibration:
    """Read, tokenize, cut, choose.

    tokenizer_file: a `tokenizer.json`. Raises MissingFileError and ConfigError for files that are
    not there or not readable, and QuantizationError when the text is too short.
    """
    tokenizer = open_tokenizer(tokenizer_file, "calibration needs the tokenizer.json of the model")
    stream: list[int] = []
    with blaming(tokenizer_file, "cannot encode the calibration text"):
        prefix = tokenizer.encode("").ids
        for document in documents(options.source):
            stream += tokenizer.encode(document, add_special_tokens=False).ids
    pieces_PL = _cut(stream, options.sequence_length - len(prefix))
    if len(pieces_PL) < options.num_sequences:
        raise _too_short(len(stream), len(pieces_PL), options)
    generator = torch.Generator().manual_seed(options.seed)
    chosen_B = torch.randperm(len(pieces_PL), generator=generator)[: options.num_sequences]
    prefix_BP = torch.tensor(prefix, dtype=torch.int64).expand(len(chosen_B), -1)
    token_ids_BL = torch.cat([prefix_BP, pieces_PL[chosen_B]], dim=1)
    digest = hashlib.sha256(token_ids_BL.numpy().astype("<i8").tobytes())
    return Calibration(token_ids_BL, digest.hexdigest())


def documents(source: Path | BuiltinText) -> Iterator[str]:
    """The texts of a source, in a fixed order."""
    if isinstance(source, BuiltinText):
        folder = resources.files("terrazzo.quantization") / TEXT_FOLDER
        files = (entry for entry in folder.iterdir() if entry.name.endswith(".txt"))
        for entry in sorted(files, key=lambda entry: entry.name):
            yield entry.read_text(encoding="utf-8")
        return
    text = _read(source)
    if source.suffix == ".jsonl":
        yield from _json_lines(source, text)
    else:
        yield text


def _read(file: Path) -> str:
    if not file.is_file():
        raise MissingFileError(
            f"calibration file {file} is not there; give a .txt or .jsonl file, or 'builtin'"
        )
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"calibration file {file} is not UTF-8 text ({error})") from error


def _json_lines(file: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield _line_text(f"{file}, line {number}", line)


def _line_text(place: str, line: str) -> str:
    legal = 'legal is an object with "text", or with "messages" that have "role" and "content"'
    try:
        entry = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: not JSON ({error}); {legal}") from error
    if isinstance(entry, Mapping) and isinstance(entry.get("text"), str):
        return str(entry["text"])
    if isinstance(entry, Mapping) and isinstance(entry.get("messages"), Sequence):
        return "".join(_message_text(place, message, legal) for message in entry["messages"])
    raise ConfigError(f"{place}: neither text nor messages; {legal}")


def _message_text(place: str, message: Any, legal: str) -> str:
    """The chat template of the model is not applied: role and content stand as plain text."""
    if isinstance(message, Mapping) and isinstance(message.get("content"), str):
        return f"{message.get('role', '')}\n{message['content']}\n"
    raise ConfigError(f"{place}: message {message!r}; {legal}")


def _cut(stream: Sequence[int], length: int) -> Tensor:
    """int64 [pieces, length]; a rest shorter than a piece is dropped."""
    pieces = len(stream) // length
    return torch.tensor(stream[: pieces * length], dtype=torch.int64).view(pieces, length)


def _too_short(tokens: int, pieces: int, options: CalibrationOptions) -> QuantizationError:
    available = pieces * options.sequence_length
    return QuantizationError(
        f"calibration text {options.source} has {tokens} tokens, {pieces} sequences of "
        f"{options.sequence_length}; asked are {options.num_sequences} sequences, "
        f"{options.num_tokens} tokens; give more text or ask for at most {available} tokens"
    )
