"""Opens `tokenizer.json`, with an error that names the file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tokenizers import Tokenizer

from terrazzo.checkpoint.small_files import LARGEST_TOKENIZER, check_regular, is_present
from terrazzo.errors import ConfigError, MissingFileError


def open_tokenizer(file: Path, remedy: str) -> Tokenizer:
    """Raises MissingFileError, which ends with `remedy`, or ConfigError naming the file."""
    if not is_present(file):
        raise MissingFileError(f"{file} is not there; {remedy}")
    check_regular(file, LARGEST_TOKENIZER)
    with blaming(file, "not a tokenizer"):
        return Tokenizer.from_file(str(file))


@contextmanager
def blaming(file: Path, fault: str) -> Iterator[None]:
    """ConfigError in place of what the library raises because of the content of `file`.

    It raises Exception itself for what it refuses, and panics over what it did not expect: a file
    can be opened and still panic at the first text. A panic is no Exception, and its class cannot
    be imported; only the name of its module tells what it is.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is Exception or type(error).__module__ == "pyo3_runtime":
            raise ConfigError(
                f"{file}: {fault} ({error}). Fetch it again from the model it belongs to"
            ) from error
        raise
