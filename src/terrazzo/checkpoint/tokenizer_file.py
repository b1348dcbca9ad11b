"""Opens `tokenizer.json`, with an error that names the file."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from terrazzo.checkpoint.small_files import LARGEST_TOKENIZER, check_regular, is_present
from terrazzo.errors import ConfigError, MissingFileError


def open_tokenizer(file: Path, remedy: str) -> Tokenizer:
    """Raises MissingFileError, which ends with `remedy`, or ConfigError naming the file."""
    if not is_present(file):
        raise MissingFileError(f"{file} is not there; {remedy}")
    check_regular(file, LARGEST_TOKENIZER)
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        raise ConfigError(
            f"{file}: not a tokenizer ({error}). Fetch it again from the model it belongs to"
        ) from error
