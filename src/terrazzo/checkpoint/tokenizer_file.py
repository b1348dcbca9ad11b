"""Opens `tokenizer.json`, with an error that names the file."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from terrazzo.errors import ConfigError, MissingFileError


def open_tokenizer(file: Path, remedy: str) -> Tokenizer:
    """Raises MissingFileError, which ends with `remedy`, or ConfigError naming the file."""
    if not file.is_file():
        raise MissingFileError(f"{file} is not there; {remedy}")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(
            f"{file}: not a tokenizer ({error}). Fetch it again from the model it belongs to"
        ) from error
